#include "train/form_settings.h"

#include <fmt/format.h>

#include "runtime/error.h"

namespace tessera::train {
namespace {

constexpr int64_t kMostRank = int64_t(1) << 20;

bool is_attention(const std::string& name) {
  return name.find(".attention.") != std::string::npos;
}

}  // namespace

void FormSettings::add_to(SettingList& list) {
  const FormSettings usual;
  list.group("Model");
  list.add("form", form, "Weights of the blocks' linear layers: dense, or factors (docs/low_rank.md)")
      .one_of({"dense", "low_rank", "cola", "sltrain", "lost"})
      .absent_means(usual.form);
  list.add("rank", rank, "Rank of the factors of --form")
      .range(int64_t{1}, kMostRank)
      .shown_as("")
      .absent_means(0);
  list.add("attention_rank", attention_rank, "Rank of the factors in attention; default: --rank")
      .range(int64_t{1}, kMostRank)
      .shown_as("")
      .absent_means(0);
  list.add("mlp_rank", mlp_rank, "Rank of the factors in the MLPs; default: --rank")
      .range(int64_t{1}, kMostRank)
      .shown_as("")
      .absent_means(0);
  list.add("form_layers", layers, "Linear layers of the blocks that --form applies to")
      .one_of({"all", "attention", "mlp"})
      .absent_means(usual.layers);
  list.add("factor_init", init,
           "Initial factors: random (drawn), or by SVD of a dense weight (svd); default: svd with --model "
           "and for lost")
      .shown_as("")
      .absent_means(usual.init);
  list.add("cola_activation", activation, "cola: activation between the factors")
      .one_of({"silu", "relu_squared"})
      .absent_means(usual.activation);
  list.add("alpha", alpha, "sltrain: alpha; the product of the factors is scaled by alpha / rank")
      .range(1e-6, 1e6)
      .absent_means(usual.alpha);
  list.add("density", density, "sltrain: share of the weight's elements in the sparse part")
      .range(0.0, 1.0)
      .absent_means(usual.density);
  list.add("column_share", column_share, "lost: share of the weight's columns that have weights of their own")
      .range(0.0, 1.0)
      .absent_means(usual.column_share);
  list.add("gamma", gamma, "lost: gamma, the scale of the factors; the columns are scaled by 1 - gamma")
      .range(1e-6, 1 - 1e-6)
      .absent_means(usual.gamma);
  list.add("columns", columns,
           "lost: choice of the columns: random, by gradient norm, or by the residual that the factors leave")
      .one_of({"random", "gradient", "residual"})
      .absent_means(usual.columns);
  list.add("residual_rank", residual_rank,
           "lost: rank of the approximation that --columns residual subtracts; default: --rank")
      .range(int64_t{1}, kMostRank)
      .shown_as("")
      .absent_means(0);
}

nn::FactorOptions FormSettings::options(bool of_attention, bool has_weights) const {
  nn::FactorOptions made{.kind = nn::parse_factor_kind(form)};
  if (!factorizes(of_attention)) made.kind = nn::FactorKind::dense;
  if (made.kind == nn::FactorKind::dense) return made;
  made.rank = rank_of(of_attention);
  check(made.rank >= 1, form, ": the rank of ", of_attention ? "attention" : "the MLPs",
        " is not given; give --rank, or ", of_attention ? "--attention-rank" : "--mlp-rank");
  const bool from_weights = has_weights || made.kind == nn::FactorKind::lost;
  check(init.empty() || init == "drawn" || init == "svd", form,
        ": the start of factors (--factor-init) is \"", init, "\"; expected drawn or svd");
  check(init != "drawn" || !has_weights, form,
        ": drawn factors would replace the weights of --model; leave --factor-init out");
  check(made.kind != nn::FactorKind::cola || !has_weights,
        "cola: no dense weight computes what factors with an activation between them do, so it cannot start "
        "from "
        "--model; take low_rank, sltrain or lost, or no --model");
  made.init = !init.empty()  ? nn::parse_factor_init(init)
              : from_weights ? nn::FactorInit::svd
                             : nn::FactorInit::drawn;
  made.activation = ops::parse_activation(activation);
  made.alpha = alpha, made.density = density, made.column_share = column_share, made.gamma = gamma;
  made.columns = nn::parse_column_choice(columns), made.residual_rank = residual_rank;
  made.validate();
  return made;
}

void FormSettings::validate(bool has_weights) const {
  options(true, has_weights), options(false, has_weights);
}

void FormSettings::check_given(const Given& given) const {
  const auto only = [&](std::initializer_list<const char*> flags, bool has_effect, const char* of) {
    check_is_for(given, flags, has_effect, of, "--form", form);
  };
  only({"--rank", "--attention-rank", "--mlp-rank", "--form-layers", "--factor-init"}, factorizes(),
       "weights made of factors (--form low_rank, cola, sltrain, lost)");
  only({"--cola-activation"}, form == "cola", "--form cola");
  only({"--alpha", "--density"}, form == "sltrain", "--form sltrain");
  only({"--column-share", "--gamma", "--columns", "--residual-rank"}, form == "lost", "--form lost");
  only({"--attention-rank"}, layers != "mlp", "attention, and --form-layers is mlp");
  only({"--mlp-rank"}, layers != "attention", "the MLPs, and --form-layers is attention");
  check(!given.contains("--rank") || (factorizes(true) && attention_rank == 0) ||
            (factorizes(false) && mlp_rank == 0),
        "--rank is for layers without a rank of their own, and --attention-rank and --mlp-rank leave none; "
        "leave it out");
  only({"--residual-rank"}, columns == "residual", "--columns residual");
}

std::vector<std::string> FormSettings::apply(const pretrained::LinearModules& modules, const Rng& rng,
                                             const FactorStart& start) const {
  std::vector<std::string> names;
  for (const pretrained::LayerParts& part : pretrained::layer_parts(modules)) {
    if (!part.name.starts_with("blocks.")) continue;
    nn::FactorOptions made = options(is_attention(part.name), start.has_weights);
    if (made.kind == nn::FactorKind::dense) continue;
    if (start.restored) made.init = nn::FactorInit::blank;
    const auto gradient = start.gradients.find(part.name);
    if (start.gradients.empty() && needs_gradient()) made.columns = nn::ColumnChoice::random;
    try {
      nn::factorize(*part.layer, part.rows, made, rng,
                    gradient == start.gradients.end() ? Tensor() : gradient->second);
    } catch (const Error& error) {
      fail_at(Site::here(), error.message(), "; in ", part.name);
    }
    names.push_back(part.name);
  }
  return names;
}

std::string FormSettings::description() const {
  std::string text = form;
  if (layers != "mlp") text += " of rank " + std::to_string(rank_of(true)) + " in attention";
  if (layers == "all") text += " and";
  if (layers != "attention")
    text += (layers == "all" ? " " : " of rank ") + std::to_string(rank_of(false)) + " in the MLPs";
  if (form == "cola") text += ", " + activation + " between the factors";
  if (form == "sltrain") text += fmt::format(", density {:g}", density);
  if (form == "lost") {
    text += fmt::format(", column share {:g}, columns by {}", column_share, columns);
    if (columns == "residual" && residual_rank > 0) text += fmt::format(" of rank {}", residual_rank);
  }
  return text;
}

void check_optimizer_form(const std::string& optimizer, const FormSettings& factors) {
  check(optimizer != "loro" || factors.form == "low_rank",
        "loro: it updates weights made of two factors alone, and "
        "--form is ",
        factors.form, "; give --form low_rank, or another --optimizer");
}

optim::ModelStructure structure_of(const pretrained::LinearModules& modules) {
  optim::ModelStructure structure;
  for (const pretrained::LayerParts& part : pretrained::layer_parts(modules)) {
    if (part.layer->weight.defined()) structure.matrices[part.name + ".weight"] = part.rows;
    const nn::Factors* const factors = nn::factors_of(part.layer->form);
    if (!factors) continue;
    const std::string a = part.name + ".form.a", b = part.name + ".form.b";
    structure.matrices[a] = std::vector<int64_t>(factors->rows.size(), factors->rank());
    structure.matrices[b] = factors->rows;
    if (std::holds_alternative<nn::ColumnsPlusLowRank>(part.layer->form))
      structure.matrices[part.name + ".form.c"] = factors->rows;
    if (std::holds_alternative<nn::LowRank>(part.layer->form))
      structure.pairs.push_back({a, b, factors->rows});
  }
  return structure;
}

}  // namespace tessera::train
