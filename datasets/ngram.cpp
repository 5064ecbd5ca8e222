#include "datasets/ngram.h"

#include <algorithm>
#include <cmath>

#include "runtime/error.h"
#include "runtime/interrupt.h"

namespace tessera::datasets {

NgramModel::NgramModel(int order, int64_t vocabulary) : order_(order), vocabulary_(vocabulary) {
  check(order >= 1 && order <= 16, "ngram: order ", order, "; expected 1 to 16");
  check(vocabulary >= 1 && vocabulary < int64_t(kNone), "ngram: a vocabulary of ", vocabulary);
  nodes_.push_back({.parent = kNone, .token = 0});
  slots_.assign(1 << 16, kNone);
}

size_t NgramModel::slot_of(uint32_t parent, uint32_t token) const {
  // Fibonacci hashing of the pair (Knuth, The Art of Computer Programming 3, section 6.4), folded once more:
  // neighbouring tokens of one parent would otherwise lie in a row.
  uint64_t hash = (uint64_t(parent) << 32 | token) * 0x9E3779B97F4A7C15u;
  hash = (hash ^ (hash >> 29)) * 0xBF58476D1CE4E5B9u;
  const size_t mask = slots_.size() - 1;
  size_t slot = size_t(hash >> 32) & mask;
  while (slots_[slot] != kNone &&
         (nodes_[slots_[slot]].parent != parent || nodes_[slots_[slot]].token != token))
    slot = (slot + 1) & mask;
  return slot;
}

uint32_t NgramModel::find(uint32_t parent, uint32_t token) const {
  return slots_[slot_of(parent, token)];
}

void NgramModel::grow() {
  slots_.assign(slots_.size() * 2, kNone);
  for (size_t i = 1; i < nodes_.size(); ++i) slots_[slot_of(nodes_[i].parent, nodes_[i].token)] = uint32_t(i);
}

uint32_t NgramModel::find_or_add(uint32_t parent, uint32_t token) {
  if (const uint32_t found = find(parent, token); found != kNone) return found;
  check(nodes_.size() < (size_t{1} << 31), "ngram: more than 2^31 different n-grams; count less text");
  if (3 * nodes_.size() > 2 * slots_.size()) grow();
  const uint32_t made = uint32_t(nodes_.size());
  slots_[slot_of(parent, token)] = made;
  nodes_.push_back({.parent = parent, .token = token, .order = nodes_[parent].order + 1});
  return made;
}

void NgramModel::add(std::span<const int64_t> tokens) {
  check(!finished_, "ngram: text after the discounts were estimated");
  std::vector<uint32_t> suffixes(size_t(order_) + 1, kNone);  // of the text so far, by their length
  suffixes[0] = 0;
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (i % (size_t{1} << 16) == 0) check_interrupt();
    check(tokens[i] >= 0 && tokens[i] < vocabulary_, "ngram: token ", tokens[i], " of a vocabulary of ",
          vocabulary_);
    const size_t longest = std::min(size_t(order_), i + 1);
    // The longest first: what is extended is still the suffix that ends one token earlier.
    for (size_t length = longest; length >= 1; --length) {
      suffixes[length] = find_or_add(suffixes[length - 1], uint32_t(tokens[i]));
      nodes_[suffixes[length]].count += 1;
    }
    for (size_t length = longest; length >= 2; --length)
      if (nodes_[suffixes[length]].count == 1) nodes_[suffixes[length - 1]].left += 1;
  }
  tokens_ += tokens.size();
}

void NgramModel::finish() {
  check(!finished_, "ngram: the discounts are estimated already");
  finished_ = true;
  // How many n-grams of an order have counts of 1 to 4.
  std::vector<std::array<double, 4>> counts(size_t(order_) + 1, std::array<double, 4>{0.5, 0.5, 0.5, 0.5});
  followers_.emplace_back();
  nodes_[0].total_index = 0;
  for (size_t i = 1; i < nodes_.size(); ++i) {
    const Node& node = nodes_[i];
    const uint32_t times = value(node);
    if (times == 0) continue;
    if (times <= 4) counts[node.order][times - 1] += 1;
    Node& parent = nodes_[node.parent];
    if (parent.order > 0 && parent.total_index == 0) {
      parent.total_index = uint32_t(followers_.size());
      followers_.emplace_back();
    }
    Followers& followers = followers_[parent.total_index];
    followers.total += times;
    followers.kinds[std::min<uint32_t>(times, 3) - 1] += 1;
  }
  discounts_.resize(size_t(order_) + 1);
  for (size_t order = 1; order <= size_t(order_); ++order) {
    const auto& n = counts[order];
    const double y = n[0] / (n[0] + 2 * n[1]);
    for (int k = 1; k <= 3; ++k)
      // At least a little and at most the count itself: what an order gives away must exist.
      discounts_[order][size_t(k) - 1] =
          std::clamp(k - (k + 1) * y * n[size_t(k)] / n[size_t(k) - 1], 0.01 * k, double(k));
  }
}

double NgramModel::log_probability(std::span<const int64_t> tokens, size_t at) const {
  check(finished_, "ngram: finish() comes before probabilities");
  double p = 1 / double(vocabulary_);
  // From no context to the longest: each order takes its share and leaves the rest to the one before.
  for (size_t length = 0; length < size_t(order_) && length <= at; ++length) {
    uint32_t context = 0;
    for (size_t i = at - length; i < at && context != kNone; ++i)
      context = find(context, uint32_t(tokens[i]));
    if (context == kNone || (context != 0 && nodes_[context].total_index == 0)) break;
    const Followers& followers = followers_[nodes_[context].total_index];
    if (followers.total == 0) break;
    const auto& discount = discounts_[length + 1];
    double given_away = 0;
    for (size_t kind = 0; kind < 3; ++kind) given_away += discount[kind] * followers.kinds[kind];
    const uint32_t node = find(context, uint32_t(tokens[at]));
    const uint32_t times = node == kNone ? 0 : value(nodes_[node]);
    const double own = times == 0 ? 0 : double(times) - discount[std::min<uint32_t>(times, 3) - 1];
    p = (own + given_away * p) / double(followers.total);
  }
  return std::log(p);
}

}  // namespace tessera::datasets
