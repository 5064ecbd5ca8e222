#include "nn/init.h"

#include <cmath>

#include "runtime/gaussian.h"
#include "runtime/parallel.h"

namespace tessera::nn::init {
namespace {

/// Elements of `tensor` = value(stream, i), computed on the host and rounded to f32, whatever the tensor's
/// dtype: a model starts from the same numbers in f64, and a narrower dtype rounds those.
template <class F>
void draw(const Tensor& tensor, const Rng& rng, F&& value) {
  const RandomStream stream = rng.reserve(Device::cpu());
  const Tensor host = Tensor::empty_packed(tensor.shape(), DType::f32, Device::cpu());
  float* const out = host.data<float>();
  parallel_for(host.count(), 4096, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) out[i] = float(value(stream, uint64_t(i)));
  });
  tensor.copy_from(host);
}

void symmetric(const Tensor& tensor, const Rng& rng, double bound) {
  uniform(tensor, rng, -bound, bound);
}

}  // namespace

void zeros(const Tensor& tensor) {
  tensor.fill(0);
}

void ones(const Tensor& tensor) {
  tensor.fill(1);
}

void uniform(const Tensor& tensor, const Rng& rng, double low, double high) {
  check(low <= high, "init::uniform: the range [", low, ", ", high, ") is empty");
  draw(tensor, rng, [=](const RandomStream& stream, uint64_t i) {
    const Uint4 random = philox(stream.seed, stream.offset(), i / 4);
    return low + (high - low) * double(uniform_half_open(random.word[i % 4]));
  });
}

void normal(const Tensor& tensor, const Rng& rng, double mean, double deviation) {
  draw(tensor, rng, [=](const RandomStream& stream, uint64_t i) {
    return mean + deviation * gaussian(stream.seed, stream.offset(), i);
  });
}

void truncated_normal(const Tensor& tensor, const Rng& rng, double mean, double deviation, double limit) {
  check(limit >= 0.1, "init::truncated_normal: limit ", limit, " must be at least 0.1");
  draw(tensor, rng, [=](const RandomStream& stream, uint64_t i) {
    for (uint64_t attempt = 0;; ++attempt) {
      // The upper bits of the index number the attempts; no tensor has 2^48 elements.
      const Uint4 random = philox(stream.seed, stream.offset(), i | attempt << 48);
      for (size_t pair = 0; pair < 4; pair += 2) {
        const double value = gaussian_of(random.word[pair], random.word[pair + 1]);
        if (std::abs(value) <= limit) return mean + deviation * value;
      }
    }
  });
}

void apply(Init choice, const Tensor& tensor, const Rng& rng) {
  if (choice == Init::zeros) return zeros(tensor);
  check(tensor.rank() >= 2, "init: ", describe(tensor),
        " has no fan; this initialiser needs a weight [..., out, in]");
  const double in = double(tensor.size(-1)), out = double(tensor.size(-2));
  switch (choice) {
    case Init::fan_in:
      return symmetric(tensor, rng, 1 / std::sqrt(in));
    case Init::kaiming_uniform:
      return symmetric(tensor, rng, std::sqrt(6 / in));
    case Init::kaiming_normal:
      return normal(tensor, rng, 0, std::sqrt(2 / in));
    case Init::xavier_uniform:
      return symmetric(tensor, rng, std::sqrt(6 / (in + out)));
    case Init::xavier_normal:
      return normal(tensor, rng, 0, std::sqrt(2 / (in + out)));
    default:
      return truncated_normal(tensor, rng, 0, 0.02);
  }
}

}  // namespace tessera::nn::init
