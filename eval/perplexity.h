#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <span>
#include <vector>

#include "autograd/tape.h"
#include "models/language_model.h"
#include "nn/attention.h"
#include "runtime/interrupt.h"
#include "tensor/tensor.h"

namespace tessera::eval {

/// How a text is cut into windows, each of which a model sees alone.
///
/// stride 0, the protocol of GPTQ, SparseGPT and Wanda for WikiText: windows of `length` tokens back to back;
/// every token but the first of each is predicted. stride s > 0, the protocol of TEAL: windows of `length`
/// tokens that begin every s tokens; the last s of each are predicted, so that each of them sees length - s
/// tokens or more (TEAL's context of 2048 and window of 512 are length 2560 and stride 512). What is left at
/// the end, shorter than a window, is not used.
struct PerplexityOptions {
  int64_t length = 2048;
  int64_t stride = 0;
  int64_t batch = 1;         // windows at a time
  int64_t most_windows = 0;  // 0: all
};

/// Tokens that are seen alone; those from `first` (1 or more) on are predicted.
struct PerplexityWindow {
  std::span<const int64_t> tokens;
  int64_t first = 1;
};

/// Those of the protocols above. Throws, naming the number, if there is none or an option is out of range.
std::vector<PerplexityWindow> perplexity_windows(std::span<const int64_t> tokens,
                                                 const PerplexityOptions& options);

/// The sliding protocol for each token from `first` (1 or more) on: windows of up to `length` tokens, of
/// which the last `stride` are predicted, less in the last one. Each predicted token sees length - stride
/// tokens or more where so many stand before it. stride < length.
std::vector<PerplexityWindow> sliding_windows(std::span<const int64_t> tokens, int64_t first, int64_t length,
                                              int64_t stride);

struct Perplexity {
  int64_t windows = 0;
  int64_t predicted = 0;  // tokens
  double nats = 0;        // mean negative log-likelihood of those
  double perplexity() const { return std::exp(nats); }
};

/// Throws, beginning with `name`, if a perplexity, or its nats per token, is not finite.
void check_finite(const char* name, double measured);

/// Model: Gpt, Llama, or what has their loss(tokens, targets, sequences). `batch`: windows at a time. Losses
/// of batches are averaged in f64. `progress` is called after each batch with the windows done; false ends
/// the work there. Without it a signal ends the work (check_interrupt).
template <class Model>
Perplexity measure_perplexity(const Model& model, std::span<const PerplexityWindow> windows, Device device,
                              int64_t batch, const std::function<bool(const Perplexity&)>& progress = {}) {
  const NoTape no_tape;
  Perplexity result;
  double sum = 0;
  for (size_t begin = 0; begin < windows.size(); begin += size_t(batch)) {
    const auto group = windows.subspan(begin, std::min(size_t(batch), windows.size() - begin));
    std::vector<int64_t> inputs, targets;
    nn::Sequences sequences;
    int64_t predicted = 0;
    for (const PerplexityWindow& window : group) {
      const int64_t places = int64_t(window.tokens.size()) - 1;  // place i predicts token i + 1
      inputs.insert(inputs.end(), window.tokens.begin(), window.tokens.end() - 1);
      for (int64_t i = 0; i < places; ++i)
        targets.push_back(i + 1 >= window.first ? window.tokens[size_t(i + 1)] : -100);
      sequences.lengths.push_back(places);
      predicted += places + 1 - window.first;
    }
    const Shape shape{int64_t(inputs.size())};
    const double loss =
        model.loss(Tensor::from(inputs, shape, device), Tensor::from(targets, shape, device), sequences)
            .item();
    sum += loss * double(predicted);
    result.windows += int64_t(group.size());
    result.predicted += predicted;
    result.nats = sum / double(result.predicted);
    if (!progress)
      check_interrupt();
    else if (!progress(result))
      break;
  }
  return result;
}

/// The perplexity alone, of all windows.
double perplexity_of(const models::LanguageModel& model, std::span<const PerplexityWindow> windows,
                     int64_t batch = 1);

}  // namespace tessera::eval
