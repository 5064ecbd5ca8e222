#pragma once

#include <cstdint>
#include <span>

#include "tensor/tensor.h"

namespace tessera::ops {

/// How the next token is chosen from the logits of all: they are divided by `temperature`, then only the
/// top_k largest are kept (0: all), then the fewest of these, largest first, whose probabilities add up to
/// top_p or more (Holtzman et al., arXiv:1904.09751, section 3.1), then one is drawn by its probability: the
/// first, in the order of tokens, at which the sum of probabilities exceeds the random number. Equal logits
/// rank by their index. temperature 0 takes the largest logit: greedy. Logits of +inf share all probability.
///
/// Probabilities are whole multiples of 2^-40 of the largest (sample_math.h), so that their sums have no
/// order: the same logits and the same random number give the same token on every device. A token less
/// likely than 2^-41 of the likeliest is never drawn.
struct Sampling {
  double temperature = 1;
  int64_t top_k = 0;
  double top_p = 1;

  bool operator==(const Sampling&) const = default;
  /// Throws, naming the option, unless 0 <= temperature, 0 <= top_k and 0 < top_p <= 1.
  void validate() const;
};

/// One choice on the host, the definition; `random` is a number of [0, 1), of which 53 bits count. Throws if
/// no logit is a number above -inf, or one is NaN.
int64_t sample(std::span<const float> logits, const Sampling& sampling, double random,
               Site site = Site::here());

/// The uniform random number in [0, 1) of choice `index` of a sequence.
double choice_number(uint64_t seed, uint64_t index, uint64_t sequence = 0);

/// The tokens that B sequences have chosen, at fixed addresses, so that a graph's replays find them.
struct Choices {
  Choices(int64_t batch, int64_t most, Device device);
  /// No choices yet; from now on with this seed. Not while a graph is being captured.
  void restart(uint64_t seed) const;

  static constexpr int64_t kNone = -1;  // instead of a token: a logit was NaN, or all were -inf

  Tensor next;     // i64 [B, 1] on the device: the last token of each
  Tensor counts;   // i64 [B] on the device: how many there are
  Tensor seed;     // i64 [1] on the device
  Tensor history;  // i64 [B, most], page-locked memory of the host, written by the device: all of them
};

/// Chooses a token for each row of logits [B, V] (floating, compared as f32): choice counts[b] of sequence b
/// uses choice_number, is written to next[b] and history[b, counts[b]], and increments counts[b]. On a GPU
/// the host may read history once an event recorded after this has completed. Choices beyond `most` are not
/// stored. Throws if shapes or devices do not match.
void sample(const Choices& choices, const Tensor& logits, const Sampling& sampling, Site site = Site::here());

/// lengths i32 [B] += n, in place; the positions of the n new tokens of each: i32 [B, n], from the old length
/// on.
Tensor advance(const Tensor& lengths, int64_t n, Site site = Site::here());

}  // namespace tessera::ops
