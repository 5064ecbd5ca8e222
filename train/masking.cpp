#include "train/masking.h"

#include <algorithm>
#include <cmath>

#include "runtime/error.h"
#include "train/random_purpose.h"

namespace tessera::train {

namespace {

/// A number of [0, n) by multiplication: its bias is below n / 2^32.
int64_t below(uint32_t random, size_t n) {
  return int64_t(uint64_t(random) * uint64_t(n) >> 32);
}

}  // namespace

Masking::Masking(const io::Tokenizer& tokenizer, double share, int64_t order) : share_(share), order_(order) {
  const io::SpecialTokens& special = tokenizer.special();
  check(special.cls && special.sep && special.mask, "mlm: the tokenizer ", tokenizer.path(),
        " lacks one of [CLS], [SEP] and [MASK]; take one of a BERT or RoBERTa, or none: it is made of the "
        "text");
  cls_ = *special.cls, sep_ = *special.sep, mask_ = *special.mask;
  for (int32_t id = 0; id < tokenizer.vocab_size(); ++id)
    if (tokenizer.has(id) && !tokenizer.is_special(id)) ordinary_.push_back(id);
  check(!ordinary_.empty(), "mlm: the tokenizer ", tokenizer.path(), " has special tokens only");
}

int64_t masked_tokens(int64_t length, double share) {
  return std::clamp<int64_t>(std::llround(share * double(length)), 1, length);
}

MaskedBatch Masking::batch(const std::vector<std::vector<int64_t>>& texts, uint64_t seed, uint64_t index,
                           uint64_t first) const {
  MaskedBatch batch;
  const uint64_t purpose = seed_for(RandomPurpose::masking, seed);
  for (uint64_t row = first; const std::vector<int64_t>& text : texts) {
    const int64_t count = masked_tokens(int64_t(text.size()), share_),
                  begin = int64_t(batch.tokens.size()) + 1;
    batch.tokens.push_back(cls_);
    batch.tokens.insert(batch.tokens.end(), text.begin(), text.end());
    batch.tokens.push_back(sep_);
    batch.lengths.push_back(int64_t(text.size()) + 2);
    const datasets::Permutation order(int64_t(text.size()), purpose, index, row, order_);
    std::vector<int64_t> places;
    for (int64_t i = 0; i < count; ++i) places.push_back(order(i));
    std::ranges::sort(places);
    for (size_t i = 0; i < places.size(); ++i) {
      const int64_t place = begin + places[i];
      // The permutation's domain differs, so these are numbers of their own.
      const Uint4 random = philox(purpose, index, row << 32 | uint64_t(places[i]));
      batch.rows.push_back(place);
      batch.targets.push_back(batch.tokens[size_t(place)]);
      const int64_t tenth = below(random.word[0], 10);
      if (tenth < 8) batch.tokens[size_t(place)] = mask_;
      if (tenth == 8)
        batch.tokens[size_t(place)] = ordinary_[size_t(below(random.word[1], ordinary_.size()))];
    }
    ++row;
  }
  return batch;
}

models::BertBatch masked_bert_batch(const MaskedBatch& batch, const models::BertConfig& config, Device device,
                                    Tensor& targets) {
  const auto on_device = [&](const std::vector<int64_t>& values) {
    return Tensor::from(values, {int64_t(values.size())}, device);
  };
  std::vector<int64_t> positions;
  for (const int64_t length : batch.lengths)
    for (int64_t t = 0; t < length; ++t) positions.push_back(config.position_offset() + t);
  targets = on_device(batch.targets);
  return {.tokens = on_device(batch.tokens),
          .types = Tensor(),
          .sequences = {batch.lengths},
          .positions = on_device(positions),
          .masked = on_device(batch.rows)};
}

}  // namespace tessera::train
