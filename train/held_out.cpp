#include "train/held_out.h"

#include <algorithm>

#include "datasets/ngram.h"

namespace tessera::train {

namespace {

/// The position after the last token of each document, the empty ones too.
std::vector<uint64_t> document_ends(const datasets::TokenWindows& windows) {
  std::vector<uint64_t> ends;
  uint64_t first = 0;
  for (const datasets::TokenShard& shard : windows.shards()) {
    for (const uint64_t end : shard.ends()) ends.push_back(first + end);
    first += shard.info().tokens;
  }
  return ends;
}

/// Stretches of tokens that are seen together: documents, or the whole.
std::vector<std::span<const int64_t>> stretches(const std::vector<int64_t>& tokens,
                                                std::vector<uint64_t> begins) {
  begins.push_back(tokens.size());
  std::vector<std::span<const int64_t>> parts;
  uint64_t from = 0;
  for (const uint64_t begin : begins) {
    if (begin > from) parts.push_back(std::span(tokens).subspan(size_t(from), size_t(begin - from)));
    from = begin;
  }
  return parts;
}

}  // namespace

HeldOut held_out(const LanguageData& data, int64_t most) {
  HeldOut out;
  if (!data.validation()) return out;
  const datasets::TokenWindows &train = data.train(), &validation = *data.validation();
  std::vector<uint64_t> ends = document_ends(validation);
  const std::vector<uint64_t> train_ends = document_ends(train);
  out.continued = ends.size() == train_ends.size();
  if (!out.continued && !data.documents()) ends = {validation.tokens()};
  uint64_t begin = 0;
  for (size_t i = 0; i < ends.size() && out.targets < most; begin = ends[i], ++i) {
    HeldOut::Stretch stretch;
    if (out.continued && ends[i] > begin) {
      // The training part does not end with the text, which goes on in the validation part.
      const uint64_t first = i ? train_ends[i - 1] : 0, last = train_ends[i];
      const uint64_t ended = last > first && train.shards().front().info().end_token >= 0 ? 1 : 0;
      const uint64_t context = std::min(last - first - ended, uint64_t(data.length()));
      stretch.tokens = read_tokens(train, last - ended - context, last - ended);
    }
    // A token with nothing before it is no target.
    stretch.first = std::max<int64_t>(1, int64_t(stretch.tokens.size()));
    const uint64_t missing = stretch.tokens.empty() ? 1 : 0;
    const uint64_t end = std::min(ends[i], begin + uint64_t(most - out.targets) + missing);
    const std::vector<int64_t> tokens = read_tokens(validation, begin, end);
    stretch.tokens.insert(stretch.tokens.end(), tokens.begin(), tokens.end());
    const int64_t targets = int64_t(stretch.tokens.size()) - stretch.first;
    if (targets <= 0) continue;
    out.targets += targets;
    out.stretches.push_back(std::move(stretch));
  }
  return out;
}

NgramBaseline ngram_baseline(const LanguageData& data, int order, const HeldOut& held_out, uint64_t most) {
  datasets::NgramModel model(order, data.tokenizer().vocab_size());
  const uint64_t trained = std::min(most, data.train().tokens());
  {
    const std::vector<int64_t> tokens = read_tokens(data.train(), 0, trained);
    for (const auto part : stretches(
             tokens, data.documents() ? document_begins(data.train(), 0, trained) : std::vector<uint64_t>()))
      model.add(part);
  }
  model.finish();
  double nll = 0;
  for (const HeldOut::Stretch& stretch : held_out.stretches)
    for (size_t at = size_t(stretch.first); at < stretch.tokens.size(); ++at)
      nll -= model.log_probability(stretch.tokens, at);
  return {.order = order,
          .nll = nll / double(std::max<int64_t>(1, held_out.targets)),
          .trained = trained,
          .ngrams = model.ngrams()};
}

std::string target_text(const LanguageData& data, const HeldOut& held_out) {
  std::vector<int32_t> targets;
  for (const HeldOut::Stretch& stretch : held_out.stretches)
    targets.insert(targets.end(), stretch.tokens.begin() + stretch.first, stretch.tokens.end());
  return data.tokenizer().decode(targets);
}

}  // namespace tessera::train
