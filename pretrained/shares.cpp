#include "pretrained/shares.h"

#include <algorithm>

#include "nn/narrowed.h"
#include "tensor/equal.h"

namespace tessera::pretrained {
namespace {

/// Part `rank` of `count` elements that `ranks` divides, from `begin` on.
IndexRange part_of(int64_t begin, int64_t count, int rank, int ranks) {
  const int64_t each = count / ranks;
  return {begin + rank * each, begin + (rank + 1) * each};
}

/// Calls visit(part, first, target, count): rows first ... first + count of `part`, one of the rule's
/// tensors, are rows of the rank's parameter from `target` on.
template <class Visit>
void for_each_range(const NameRule& rule, const ParameterShare& share, Visit&& visit) {
  for_each_part(rule, [&](const NameRule::Part& part, int64_t row, int64_t rows) {
    int64_t target = 0;
    for (const IndexRange& range : share.rows) {
      const int64_t begin = std::max(range.begin, row), end = std::min(range.end, row + rows);
      if (begin < end) visit(part, begin - row, target + begin - range.begin, end - begin);
      target += range.count();
    }
  });
}

Tensor columns_of(const Tensor& rows, const ParameterShare& share) {
  return share.columns ? rows.slice(1, share.columns->begin, share.columns->end) : rows;
}

/// Throws unless both tensors, of the file, have the same elements in these rows.
void check_tied(const io::WeightSource& source, const std::string& name, const std::string& first,
                const IndexRange& rows) {
  if (rows.count() == 0) return;
  check(
      equal_bits(source.load_rows(name, rows.begin, rows.end), source.load_rows(first, rows.begin, rows.end)),
      "weights: ", source.path(), ": '", io::shown(name), "' differs from '", io::shown(first),
      "', but config.json ties them; set tie_word_embeddings to false");
}

}  // namespace

ParameterShare share_of(const std::string& name, const models::LlamaConfig& config, int rank, int ranks) {
  const int64_t q = config.heads * config.effective_head_dim(),
                kv = config.kv_heads * config.effective_head_dim(), d_ff = config.d_ff, d = config.d_model;
  const auto part = [&](int64_t begin, int64_t count) { return part_of(begin, count, rank, ranks); };
  const auto of = [&](const char* layer) { return name.find(layer) != std::string::npos; };
  const bool is_bias = name.ends_with(".bias");
  if (name == "token.weight" || name == "lm_head.weight") {
    const int64_t each = nn::TensorParallel::vocabulary_rows(config.vocabulary, ranks),
                  begin = std::min(rank * each, config.vocabulary);
    return {{{begin, std::min(begin + each, config.vocabulary)}}};
  }
  if (of(".attention.qkv.")) return {{part(0, q), part(q, kv), part(q + kv, kv)}};
  if (of(".mlp.up.") && config.gated) return {{part(0, d_ff), part(d_ff, d_ff)}};
  if (of(".mlp.up.")) return {{part(0, d_ff)}};
  if (of(".attention.out.") || of(".mlp.down.")) {
    if (!is_bias) return {{{0, d}}, of(".mlp.down.") ? part(0, d_ff) : part(0, q)};
    return rank == 0 ? ParameterShare{{{0, d}}} : ParameterShare{};  // added once
  }
  check(of("norm"), "shares: '", name, "' is no parameter of a llama");
  return {{{0, of(".q_norm.") || of(".k_norm.") ? config.effective_head_dim() : d}}};
}

void copy_shares(const models::Llama& model, const NameTable& table, const Matched& matched,
                 const io::WeightSource& source) {
  std::map<std::string, const NameRule*> rules;
  for (const NameRule& rule : table.rules) rules.emplace(rule.ours, &rule);
  const int rank = model.ranks.rank(), ranks = model.ranks.size();
  for (const auto& [name, parameter] : nn::parameters(model)) {
    const auto found = rules.find(name);
    check(found != rules.end(), "weights: the table of names has no '", name, "'");
    const ParameterShare share = share_of(name, model.config, rank, ranks);
    for_each_range(*found->second, share,
                   [&, &parameter = parameter](const NameRule::Part& part, int64_t first, int64_t target,
                                               int64_t count) {
                     const auto theirs = matched.names.find(part.theirs);
                     if (theirs == matched.names.end()) return;
                     const Tensor rows = source.load_rows(theirs->second, first, first + count);
                     nn::copy_narrowed(parameter.detach().slice(0, target, target + count),
                                       columns_of(rows, share), theirs->second);
                   });
  }
  const ParameterShare of_token = share_of("token.weight", model.config, rank, ranks);
  for (const std::string& tied : table.tied)
    if (const auto theirs = matched.names.find(tied); theirs != matched.names.end())
      check_tied(source, theirs->second, matched.names.at(table.rules[0].parts[0].theirs), of_token.rows[0]);
}

void copy_shares(const models::Llama& model, const models::Llama& whole) {
  std::map<std::string, Tensor> from;
  for (const auto& [name, parameter] : nn::parameters(whole)) from.emplace(name, parameter.detach());
  for (const auto& [name, parameter] : nn::parameters(model)) {
    const ParameterShare share = share_of(name, model.config, model.ranks.rank(), model.ranks.size());
    int64_t target = 0;
    for (const IndexRange& range : share.rows) {
      if (range.count() == 0) continue;
      const Tensor rows = from.at(name).slice(0, range.begin, range.end);
      parameter.detach().slice(0, target, target + range.count()).copy_from(columns_of(rows, share));
      target += range.count();
    }
  }
}

}  // namespace tessera::pretrained
