#include "eval/perplexity.h"

namespace tessera::eval {

std::vector<PerplexityWindow> sliding_windows(std::span<const int64_t> tokens, int64_t first, int64_t length,
                                              int64_t stride) {
  check(length >= 2, "perplexity: windows of ", length, " tokens; expected 2 or more");
  check(stride >= 1 && stride < length, "perplexity: a stride of ", stride, " in windows of ", length,
        " tokens; expected less: the first tokens are context");
  const int64_t count = int64_t(tokens.size());
  std::vector<PerplexityWindow> windows;
  for (int64_t next = first; next < count; next += stride) {
    const int64_t end = std::min(next + stride, count), begin = std::max<int64_t>(0, end - length);
    windows.push_back({tokens.subspan(size_t(begin), size_t(end - begin)), next - begin});
  }
  return windows;
}

std::vector<PerplexityWindow> perplexity_windows(std::span<const int64_t> tokens,
                                                 const PerplexityOptions& options) {
  const int64_t length = options.length, count = int64_t(tokens.size());
  check(length >= 2, "perplexity: windows of ", length, " tokens; expected 2 or more");
  check(options.batch >= 1 && options.most_windows >= 0, "perplexity: ", options.batch,
        " windows at a time and ", options.most_windows, " in all");
  check(count >= length, "perplexity: the text has ", count, " tokens, fewer than one window of ", length,
        "; give more text or a smaller --length");
  std::vector<PerplexityWindow> windows;
  if (options.stride == 0) {
    for (int64_t begin = 0; begin + length <= count; begin += length)
      windows.push_back({tokens.subspan(size_t(begin), size_t(length)), 1});
  } else {
    windows = sliding_windows(tokens, length - options.stride, length, options.stride);
    if (int64_t(windows.back().tokens.size()) - windows.back().first < options.stride) windows.pop_back();
  }
  if (options.most_windows > 0 && options.most_windows < int64_t(windows.size()))
    windows.resize(size_t(options.most_windows));
  return windows;
}

double perplexity_of(const models::LanguageModel& model, std::span<const PerplexityWindow> windows,
                     int64_t batch) {
  return measure_perplexity(model, windows, model.device(), batch).perplexity();
}

void check_finite(const char* name, double measured) {
  check(std::isfinite(measured), name,
        ": the log-likelihood of the text is not finite; the model's weights are damaged, or its activations "
        "overflow");
}

}  // namespace tessera::eval
