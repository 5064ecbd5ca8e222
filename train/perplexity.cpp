#include "train/perplexity.h"

namespace tessera::train {

int64_t perplexity_windows(int64_t tokens, const PerplexityOptions& options) {
  check(options.length >= 2, "perplexity: windows of ", options.length, " tokens; expected 2 or more");
  check(options.stride >= 0 && options.stride < options.length, "perplexity: a stride of ", options.stride,
        " in windows of ", options.length, " tokens; expected less: the first tokens are context");
  check(options.batch >= 1 && options.most_windows >= 0, "perplexity: ", options.batch,
        " windows at a time and ", options.most_windows, " in all");
  check(tokens >= options.length, "perplexity: the text has ", tokens, " tokens, fewer than one window of ",
        options.length, "; give more text or a smaller --length");
  const int64_t step = options.stride ? options.stride : options.length;
  const int64_t all = (tokens - options.length) / step + 1;
  return options.most_windows ? std::min(options.most_windows, all) : all;
}

}  // namespace tessera::train
