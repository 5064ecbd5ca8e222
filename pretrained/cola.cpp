#include "pretrained/cola.h"

#include "nn/low_rank.h"

namespace tessera::pretrained {
namespace {

constexpr std::string_view kEnd = ".weight";

bool is_attention(const std::string& name) {
  return name.find(".attention.") != std::string::npos;
}

int64_t rank_of(const ColaConfig& cola, const std::string& ours) {
  return is_attention(ours) ? cola.attention_rank : cola.mlp_rank;
}

/// Whether a parameter is the weight of a linear layer of a block.
bool is_block_weight(const NameRule& rule) {
  return rule.ours.starts_with("blocks.") && rule.ours.ends_with(kEnd) && rule.parts[0].shape.rank() == 2;
}

}  // namespace

NameTable with_cola(const NameTable& table, const ColaConfig& cola) {
  NameTable made = table;
  made.rules.clear();
  for (const NameRule& rule : table.rules) {
    const int64_t rank = is_block_weight(rule) ? rank_of(cola, rule.ours) : 0;
    if (rank == 0) {
      made.rules.push_back(rule);
      continue;
    }
    const std::string ours = rule.ours.substr(0, rule.ours.size() - kEnd.size());
    NameRule a{.ours = ours + ".form.a"}, b{.ours = ours + ".form.b"};
    for_each_part(rule, [&](const NameRule::Part& part, int64_t, int64_t rows) {
      const std::string theirs = part.theirs.substr(0, part.theirs.size() - kEnd.size());
      a.parts.push_back({theirs + ".a", {rank, rule.transposed ? part.shape[0] : part.shape[1]}});
      b.parts.push_back({theirs + ".b", {rows, rank}});
    });
    made.rules.push_back(std::move(a));
    made.rules.push_back(std::move(b));
  }
  return made;
}

template <class Model>
std::optional<ColaConfig> cola_of(const Model& model) {
  std::optional<ColaConfig> found;
  const auto add = [&](const std::string& name, const nn::Linear& layer) {
    const auto* const form = std::get_if<nn::Cola>(&layer.form);
    if (!form) return;
    if (!found) found = ColaConfig{.activation = form->activation};
    int64_t& rank = is_attention(name) ? found->attention_rank : found->mlp_rank;
    check(
        (rank == 0 || rank == form->factors.rank()) && found->activation == form->activation &&
            name.starts_with("blocks."),
        "save: ", name, " is cola of rank ", form->factors.rank(), " with ", ops::name_of(form->activation),
        "; a model directory has one activation, and one rank for all of attention and for all of the MLPs");
    rank = form->factors.rank();
  };
  nn::for_each<nn::Linear>(model, add);
  if (!found) return found;
  nn::for_each<nn::Linear>(model, [&](const std::string& name, const nn::Linear& layer) {
    check(!name.starts_with("blocks.") || rank_of(*found, name) == 0 ||
              std::holds_alternative<nn::Cola>(layer.form),
          "save: ", name, " is ", nn::name_of(layer.form), ", but others of its kind are cola");
  });
  return found;
}

template std::optional<ColaConfig> cola_of(const models::Gpt&);
template std::optional<ColaConfig> cola_of(const models::Llama&);
template std::optional<ColaConfig> cola_of(const models::Bert&);

void make_cola(const LinearModules& modules, const ColaConfig& cola) {
  Rng unused(0);
  for (const LayerParts& part : layer_parts(modules)) {
    const int64_t rank = part.name.starts_with("blocks.") ? rank_of(cola, part.name) : 0;
    if (rank == 0) continue;
    nn::factorize(*part.layer, part.rows,
                  {.kind = nn::FactorKind::cola,
                   .rank = rank,
                   .init = nn::FactorInit::blank,
                   .activation = cola.activation},
                  unused);
  }
}

}  // namespace tessera::pretrained
