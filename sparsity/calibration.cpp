#include "sparsity/calibration.h"

#include "datasets/shuffle.h"
#include "runtime/error.h"
#include "train/random_purpose.h"

namespace tessera::sparsity {

Samples choose_samples(std::span<const int64_t> text, const SampleOptions& options) {
  const int64_t length = options.length, count = options.count, tokens = int64_t(text.size());
  check(length >= 1, "calibration: samples of ", length, " tokens; expected 1 or more");
  check(count >= 1, "calibration: ", count, " samples; expected 1 or more");
  check(tokens >= length, "calibration: the text has ", tokens, " tokens, fewer than one sample of ", length,
        "; give more text or a smaller --length");
  const int64_t places = tokens - length + 1;
  check(places >= count, "calibration: a text of ", tokens, " tokens has only ", places,
        " different samples of ", length, " tokens, fewer than ", count,
        "; give more text, or a smaller --samples or --length");
  const datasets::Permutation order(places, train::seed_for(train::RandomPurpose::calibration, options.seed),
                                    0, 0);
  Samples samples{.length = length, .seed = options.seed, .begins = {}, .tokens = {}};
  samples.tokens.reserve(size_t(count * length));
  for (int64_t i = 0; i < count; ++i) {
    const int64_t begin = order(i);
    samples.begins.push_back(begin);
    const auto part = text.subspan(size_t(begin), size_t(length));
    samples.tokens.insert(samples.tokens.end(), part.begin(), part.end());
  }
  return samples;
}

}  // namespace tessera::sparsity
