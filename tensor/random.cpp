#include "tensor/random.h"
#include "runtime/has_cuda.h"

#include "tensor/random_kernels.h"

namespace tessera {
namespace {

void fill(const Tensor& tensor, const RandomFill& fill) {
  tensor.bump_version();
  if (tensor.count() == 0) return;
  if (tensor.device().is_cpu()) return random_fill_cpu(tensor, fill);
  if constexpr (kCuda) random_fill_cuda(tensor, fill);
}

}  // namespace

void fill_uniform(const Tensor& tensor, double low, double high, Rng& rng) {
  check(low <= high, "fill_uniform: [", low, ", ", high, ") is empty");
  fill(tensor, {RandomFill::Kind::uniform, rng.reserve(tensor.device()), float(low), float(high - low), 0});
}

void fill_normal(const Tensor& tensor, double mean, double deviation, Rng& rng) {
  fill(tensor, {RandomFill::Kind::normal, rng.reserve(tensor.device()), float(mean), float(deviation), 0});
}

void fill_integers(const Tensor& tensor, int64_t high, Rng& rng) {
  check(high >= 1, "fill_integers: [0, ", high, ") is empty");
  fill(tensor, {RandomFill::Kind::integer, rng.reserve(tensor.device()), 0, 0, high});
}

void random_fill_cpu(const Tensor& tensor, const RandomFill& fill) {
  // Row-major indices need the logical order: walk a packed copy if the layout is not packed already.
  const Tensor target = tensor.layout().is_packed()
                            ? tensor
                            : Tensor::empty_packed(tensor.shape(), tensor.dtype(), tensor.device());
  const auto run = [&]<class T>() {
    T* const out = target.data<T>();
    parallel_for(target.count(), 16384, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) out[i] = random_element<T>(fill, uint64_t(i));
    });
  };
  if (is_floating(tensor.dtype())) {
    dispatch_floating(tensor.dtype(), "random fill", run);
  } else {
    dispatch_index(tensor.dtype(), "random fill", run);
  }
  if (!target.shares_storage(tensor)) copy_cpu(tensor, target);
}

}  // namespace tessera
