#include "ops/random/random.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "ops/random/random_kernels.h"
#include "runtime/call_site.h"
#include "runtime/has_cuda.h"

namespace tessera::ops {
namespace {

void check_target(const Tensor& tensor, const char* what) {
  tensor.check_writable(what);
  check(!tensor.layout().is_expanded(), what, ": ", describe(tensor),
        " is expanded: several of its elements share memory");
}

void check_floating(const Tensor& tensor, const char* what) {
  check_target(tensor, what);
  check(is_floating(tensor.dtype()) && tensor.dtype() != DType::f8e4m3, what, ": ", describe(tensor),
        "; expected f64, f32, bf16 or f16");
}

void fill(const Tensor& tensor, const RandomFill& fill) {
  tensor.bump_version();
  if (tensor.count() == 0) return;
  if (tensor.device().is_cpu()) return random_fill_cpu(tensor, fill);
  if constexpr (kCuda) random_fill_cuda(tensor, fill);
}

/// Whether the number is finite in f32 and in the dtype.
bool fits(double value, DType dtype) {
  return dispatch_floating(dtype, "random fill",
                           [&]<class T>() { return std::isfinite(Compute<T>(convert<T>(float(value)))); });
}

/// The largest number below `high` among those of the dtype T that an f32 holds.
template <class T>
float largest_below(double high) {
  float largest = float(high);
  if (largest >= high) largest = std::nextafter(largest, -std::numeric_limits<float>::infinity());
  if constexpr (sizeof(T) == 2) {
    T rounded(largest);
    // The next one down has the next smaller magnitude, or, of negative numbers, the next larger.
    if (float(rounded) > largest) rounded.bits = uint16_t(rounded.bits + (rounded.bits >> 15 ? 1 : -1));
    largest = float(rounded);
  }
  return largest;
}

}  // namespace

void fill_uniform(const Tensor& tensor, double low, double high, const Rng& rng, Site site) {
  const CallScope call(site);
  check_floating(tensor, "fill_uniform");
  check(low <= high, "fill_uniform: [", low, ", ", high, ") is empty");
  check(std::isfinite(float(high - low)) && fits(low, tensor.dtype()) && fits(high, tensor.dtype()),
        "fill_uniform: [", low, ", ", high, ") is too wide for ", describe(tensor),
        ": its values are computed in f32 and rounded to the dtype");
  float most = float(high);  // the only number of [high, high)
  if (low < high)
    dispatch_floating(tensor.dtype(), "fill_uniform", [&]<class T>() { most = largest_below<T>(high); });
  fill(tensor, {.kind = RandomFill::Kind::uniform,
                .stream = rng.reserve(tensor.device()),
                .shift = float(low),
                .scale = float(high - low),
                .most = most});
}

void fill_normal(const Tensor& tensor, double mean, double deviation, const Rng& rng, Site site) {
  const CallScope call(site);
  check_floating(tensor, "fill_normal");
  check(deviation >= 0, "fill_normal: the deviation of ", describe(tensor), " is ", deviation,
        "; expected 0 or more");
  check(fits(mean, tensor.dtype()) && fits(deviation, tensor.dtype()), "fill_normal: a mean of ", mean,
        " and a deviation of ", deviation, " are not finite in ", describe(tensor),
        ", whose values are computed in f32 and rounded to the dtype");
  fill(tensor, {.kind = RandomFill::Kind::normal,
                .stream = rng.reserve(tensor.device()),
                .shift = float(mean),
                .scale = float(deviation)});
}

void fill_integers(const Tensor& tensor, int64_t high, const Rng& rng, Site site) {
  const CallScope call(site);
  check_target(tensor, "fill_integers");
  check(tensor.dtype() == DType::i64 || tensor.dtype() == DType::i32, "fill_integers: ", describe(tensor),
        "; expected i64 or i32");
  check(tensor.dtype() == DType::i64 || high <= int64_t(1) << 31, "fill_integers: [0, ", high,
        ") has numbers that an i32 does not hold");
  check(high >= 1, "fill_integers: [0, ", high, ") is empty");
  fill(tensor, {.kind = RandomFill::Kind::integer, .stream = rng.reserve(tensor.device()), .high = high});
}

Tensor permutation(int64_t n, const Rng& rng, Device device, Site site) {
  const CallScope call(site);
  check(n >= 0, "permutation: of ", n, " numbers; expected 0 or more");
  const Tensor keys = Tensor::empty_packed({n}, DType::i64, device);
  fill_integers(keys, std::numeric_limits<int64_t>::max(), rng);
  Tensor order = Tensor::empty_packed({n}, DType::i64, device);
  if (n == 0) return order;
  if (device.is_cpu()) {
    order_of_keys_cpu(order, keys);
  } else if constexpr (kCuda) {
    order_of_keys_cuda(order, keys);
  }
  return order;
}

void order_of_keys_cpu(const Tensor& order, const Tensor& keys) {
  int64_t* const first = order.data<int64_t>();
  std::iota(first, first + order.count(), int64_t{0});
  std::stable_sort(first, first + order.count(),
                   [at = keys.data<int64_t>()](int64_t a, int64_t b) { return at[a] < at[b]; });
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

}  // namespace tessera::ops
