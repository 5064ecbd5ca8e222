#include "eval/bert_batch.h"

#include <algorithm>

#include "runtime/error.h"

namespace tessera::eval {

models::BertBatch bert_batch(const datasets::GlueBatch& batch, const models::BertConfig& config,
                             int64_t fixed_length, Device device) {
  const auto ends = batch.lengths.to_vector<int32_t>();
  const int64_t count = int64_t(ends.size()) - 1, tokens = batch.ids.count();
  auto ids = batch.ids.to_vector<int64_t>(), types = batch.types.to_vector<int64_t>();
  check(config.types == 1 || types.empty() || *std::max_element(types.begin(), types.end()) < config.types,
        "glue: the tokenizer gives a token type that the model, with ", config.types,
        " of them, does not have");
  nn::Sequences sequences;
  for (int64_t i = 0; i < count; ++i) sequences.lengths.push_back(ends[size_t(i) + 1] - ends[size_t(i)]);
  const int64_t rows = fixed_length > 0 ? count * fixed_length : tokens;
  std::vector<int64_t> positions;
  for (const int64_t length : sequences.lengths)
    for (int64_t t = 0; t < length; ++t) positions.push_back(config.position_offset() + t);
  ids.resize(size_t(rows), config.pad_token), types.resize(size_t(rows), 0);
  positions.resize(size_t(rows), config.position_offset());
  models::BertBatch result{.tokens = Tensor::from(ids, {rows}, device),
                           .types = config.types > 1 ? Tensor::from(types, {rows}, device) : Tensor(),
                           .sequences = sequences,
                           .positions = Tensor::from(positions, {rows}, device),
                           .first_rows = sequences.first_rows(device)};
  if (fixed_length > 0) result.cu_seqlens = sequences.cu_seqlens(device);
  return result;
}

void copy_batch(const models::BertBatch& to, const models::BertBatch& from) {
  for (const auto& [ours, theirs] :
       {std::pair(to.tokens, from.tokens), std::pair(to.types, from.types),
        std::pair(to.positions, from.positions), std::pair(to.first_rows, from.first_rows),
        std::pair(to.cu_seqlens, from.cu_seqlens)})
    if (ours.defined()) ours.copy_from(theirs);
}

}  // namespace tessera::eval
