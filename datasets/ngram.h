#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

/// The baseline of a language model: how well the last few tokens alone predict the next.

namespace tessera::datasets {

/// An n-gram model by interpolated modified Kneser-Ney smoothing (Chen, Goodman: "An Empirical Study of
/// Smoothing Techniques for Language Modeling", Computer Speech & Language 13, 1999, section 3; the lower
/// orders of Kneser, Ney, ICASSP 1995):
///
///   p(w | h) = max(c(h w) - D, 0) / sum_v c(h v)  +  g(h) p(w | h without its first token)
///
/// c counts occurrences in the highest order and different tokens to the left in all others; D is one of
/// three discounts an order, for counts of 1, 2, and 3 or more, estimated from how many n-grams have counts
/// of 1 to 4; g(h) is what the discounts took away. Below the single tokens lies the uniform distribution,
/// so every token has a probability.
///
/// The estimate of D is that of the paper with one half added to each count of counts: an order in which no
/// n-gram is rare (characters, on their own) then has discounts too.
class NgramModel {
 public:
  /// Throws unless 1 <= order <= 16 and 1 <= vocabulary.
  NgramModel(int order, int64_t vocabulary);

  /// Counts a stretch of text; n-grams do not reach from one stretch into the next. Throws for a token
  /// outside the vocabulary, and beyond 2^31 different n-grams.
  void add(std::span<const int64_t> tokens);
  /// Estimates the discounts. Afterwards nothing can be added.
  void finish();

  /// ln p of tokens[at] after the order - 1 tokens before it (fewer at the beginning). After finish().
  double log_probability(std::span<const int64_t> tokens, size_t at) const;

  int order() const { return order_; }
  uint64_t tokens() const { return tokens_; }
  uint64_t ngrams() const { return nodes_.size() - 1; }  // different ones, of all orders

 private:
  /// An n-gram: its first tokens are its parent's. The root is the empty one.
  struct Node {
    uint32_t parent, token;
    uint32_t count = 0;        // occurrences
    uint32_t left = 0;         // different tokens in front of it
    uint32_t order = 0;        // tokens
    uint32_t total_index = 0;  // of those with children, after finish()
  };
  /// What follows an n-gram: the sum of the counts, and how many counts are 1, 2, and 3 or more.
  struct Followers {
    uint64_t total = 0;
    std::array<uint32_t, 3> kinds{};
  };
  static constexpr uint32_t kNone = ~uint32_t{0};

  uint32_t find(uint32_t parent, uint32_t token) const;
  uint32_t find_or_add(uint32_t parent, uint32_t token);
  void grow();
  size_t slot_of(uint32_t parent, uint32_t token) const;
  uint32_t value(const Node& node) const { return int(node.order) == order_ ? node.count : node.left; }

  int order_;
  int64_t vocabulary_;
  uint64_t tokens_ = 0;
  bool finished_ = false;
  std::vector<Node> nodes_;
  std::vector<uint32_t> slots_;  // of nodes, open addressing
  std::vector<Followers> followers_;
  std::vector<std::array<double, 3>> discounts_;  // of an order, from 1 on
};

}  // namespace tessera::datasets
