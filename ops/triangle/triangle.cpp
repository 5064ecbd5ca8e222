#include "ops/triangle/triangle.h"

#include <algorithm>

#include "autograd/tape.h"
#include "ops/gather/gather_kernels.h"
#include "ops/reduce/reduce_plan.h"
#include "ops/triangle/triangle_kernels.h"
#include "runtime/has_cuda.h"
#include "runtime/parallel.h"

namespace tessera::ops {
namespace {

Tensor cut(const Tensor& x, const Triangle& triangle) {
  Tensor y = Tensor::empty_like(x);
  if (y.count() == 0) return y;
  if (x.device().is_cpu()) {
    triangle_cpu(y, x, triangle);
  } else if constexpr (kCuda) {
    triangle_cuda(y, x, triangle);
  }
  return y;
}

Tensor triangle_of(const char* name, const Tensor& x, const Triangle& triangle, Site site) {
  const CallScope call(site);
  check(x.defined(), name, ": x is undefined");
  check(x.rank() >= 2, name, ": x is ", describe(x), "; expected at least two dimensions");
  Tensor y = cut(x.detach(), triangle);
  if (Tape* const tape = Tape::recording(x))
    tape->record(name, {&x}, {&y}, [triangle](Backward& b) { b.give(0, cut(b.grad(), triangle)); });
  return y;
}

}  // namespace

Tensor tril(const Tensor& x, int64_t diagonal, Site site) {
  return triangle_of("tril", x, {.lower = true, .diagonal = diagonal}, site);
}
Tensor triu(const Tensor& x, int64_t diagonal, Site site) {
  return triangle_of("triu", x, {.lower = false, .diagonal = diagonal}, site);
}

void triangle_cpu(const Tensor& y, const Tensor& x, const Triangle& triangle) {
  Layout first = y.layout();
  first.shape = y.shape().with(-1, 1);
  const ReducePlan rows = plan_dim(x.layout(), -1, first);
  const int64_t columns = x.size(-1), height = x.size(-2);
  const int64_t y_stride = y.layout().stride(-1), x_stride = x.layout().stride(-1);
  dispatch_size(y.dtype(), [&]<class Word>() {
    auto* const out = static_cast<Word*>(y.raw());
    const auto* const in = static_cast<const Word*>(x.raw());
    parallel_for(rows.outputs, std::max<int64_t>(1, 16384 / columns), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        int64_t x_offset, y_offset;
        rows.offsets(row, x_offset, y_offset);
        for (int64_t c = 0; c < columns; ++c)
          out[y_offset + c * y_stride] =
              triangle.keeps(row % height, c) ? in[x_offset + c * x_stride] : Word(0);
      }
    });
  });
}

}  // namespace tessera::ops
