#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <span>
#include <vector>

#include "autograd/tape.h"
#include "tensor/tensor.h"

namespace tessera::train {

/// How a text is cut into windows, each of which a model sees alone.
///
/// stride 0, the protocol of GPTQ, SparseGPT and Wanda for WikiText: windows of `length` tokens one behind
/// the other; every token but the first of each is predicted. stride s > 0, the protocol of TEAL: windows of
/// `length` tokens that begin every s tokens; the last s of each are predicted, so that each of them sees
/// length - s tokens or more (TEAL's context of 2048 and window of 512 are length 2560 and stride 512). What
/// is left at the end, shorter than a window, is not used.
struct PerplexityOptions {
  int64_t length = 2048;
  int64_t stride = 0;
  int64_t batch = 1;         // windows at a time
  int64_t most_windows = 0;  // 0: all
};

struct Perplexity {
  int64_t windows = 0;
  int64_t predicted = 0;  // tokens
  double nats = 0;        // mean negative log-likelihood of those
  double perplexity() const { return std::exp(nats); }
};

/// Windows that `tokens` tokens give. Throws, naming the number, if that is none or an option is out of
/// range.
int64_t perplexity_windows(int64_t tokens, const PerplexityOptions& options);

/// Model: Gpt, Llama, or what has their loss(tokens, targets). Losses of windows are averaged in f64.
/// `progress` is called after each batch with the windows done; false ends the work there.
template <class Model>
Perplexity measure_perplexity(const Model& model, std::span<const int64_t> tokens, Device device,
                              const PerplexityOptions& options,
                              const std::function<bool(const Perplexity&)>& progress = {}) {
  const NoTape no_tape;
  const int64_t windows = perplexity_windows(int64_t(tokens.size()), options), length = options.length;
  const int64_t step = options.stride ? options.stride : length;
  const int64_t unpredicted = options.stride ? length - options.stride : 1;
  Perplexity result;
  double sum = 0;
  while (result.windows < windows) {
    const int64_t batch = std::min(options.batch, windows - result.windows);
    std::vector<int64_t> inputs, targets;
    for (int64_t b = 0; b < batch; ++b) {
      const auto window = tokens.subspan(size_t((result.windows + b) * step), size_t(length));
      inputs.insert(inputs.end(), window.begin(), window.end());
      for (int64_t i = 0; i < length; ++i)  // place i predicts token i + 1
        targets.push_back(i + 1 < length && i + 1 >= unpredicted ? window[size_t(i + 1)] : -100);
    }
    const Shape shape{batch, length};
    const double loss =
        model.loss(Tensor::from(inputs, shape, device), Tensor::from(targets, shape, device)).item();
    const int64_t predicted = batch * (length - unpredicted);
    sum += loss * double(predicted);
    result.windows += batch;
    result.predicted += predicted;
    result.nats = sum / double(result.predicted);
    if (progress && !progress(result)) break;
  }
  return result;
}

}  // namespace tessera::train
