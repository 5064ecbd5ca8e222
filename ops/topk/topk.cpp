#include "ops/topk/topk.h"

#include <vector>

#include "ops/take_along/take_along.h"
#include "ops/topk/topk_kernels.h"
#include "runtime/call_site.h"
#include "runtime/has_cuda.h"

namespace tessera::ops {
namespace {

constexpr int64_t kMostLength = (int64_t{1} << 32) - 1;  // an index takes 32 bits of a key

/// x's order of dimensions with the last one and dimension `dim` exchanged: its own inverse.
Tensor exchanged(const Tensor& x, int dim) {
  return x.transpose(dim, -1);
}

}  // namespace

TopK topk(const Tensor& x, int64_t k, int dim, Site site) {
  const CallScope call(site);
  check(x.defined(), "topk: x is undefined");
  const bool whole = x.dtype() == DType::i64 || x.dtype() == DType::i32;
  check(whole || (is_floating(x.dtype()) && x.dtype() != DType::f8e4m3), "topk: x is ", describe(x),
        "; expected f64, f32, bf16, f16, i64 or i32");
  check(dim >= -x.rank() && dim < x.rank(), "topk: dimension ", dim, " is outside ", describe(x));
  const int d = x.shape().resolve(dim);
  check(0 <= k && k <= x.size(d), "topk: k = ", k, " of ", x.size(d), " elements along dimension ", d, " of ",
        describe(x), "; expected 0 to ", x.size(d));
  check(x.size(d) <= kMostLength, "topk: ", x.size(d), " elements along dimension ", d, " of ", describe(x),
        "; expected at most ", kMostLength);
  const Tensor lines = exchanged(x.detach(), d);
  Tensor indices = Tensor::empty_packed(lines.shape().with(-1, k), DType::i64, x.device());
  if (indices.count() > 0) {
    const Tensor rows = lines.with_rows();
    if (x.device().is_cpu()) {
      topk_cpu(indices, rows);
    } else if constexpr (kCuda) {
      whole ? topk_integers_cuda(indices, rows) : topk_cuda(indices, rows);
    }
  }
  indices = exchanged(indices, d);
  return {take_along(x, indices, d), indices};
}

}  // namespace tessera::ops
