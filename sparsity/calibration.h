#pragma once

#include <cstdint>
#include <span>
#include <vector>

/// The samples of a text that a model is calibrated with.

namespace tessera::sparsity {

struct SampleOptions {
  int64_t count = 128;    // samples
  int64_t length = 2048;  // tokens of each
  uint64_t seed = 0;
};

/// Sequences of equal length, cut from one long text.
struct Samples {
  int64_t length = 0;
  uint64_t seed = 0;
  std::vector<int64_t> begins;  // where each begins in the text, in tokens
  std::vector<int64_t> tokens;  // [count, length], one after the other

  int64_t count() const { return int64_t(begins.size()); }
  std::span<const int64_t> sample(int64_t i) const {
    return std::span(tokens).subspan(size_t(i * length), size_t(length));
  }
};

/// Samples at different places, all places equally likely, in an order that the seed decides: the first ones
/// of a larger count are those of a smaller. Throws, naming the numbers, if the text has no place for one
/// sample or fewer places than samples.
Samples choose_samples(std::span<const int64_t> text, const SampleOptions& options);

}  // namespace tessera::sparsity
