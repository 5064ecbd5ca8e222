#include <algorithm>
#include <cctype>
#include <cmath>
#include <map>
#include <set>
#include <span>
#include <string_view>

#include "optim/kernels.h"
#include "optim/optimizer_internal.h"
#include "runtime/allocator.h"

/// How an optimizer is made: which rule has which parameter, where everything lies, what each rank holds.

namespace tessera::optim {

namespace {

/// The parts of a name between dots, each as its words in lower case: "blocks.0.LayerNorm2" is {"blocks"},
/// {}, {"layer", "norm"}.
std::vector<std::vector<std::string>> words_of(std::string_view name) {
  std::vector<std::vector<std::string>> parts(1);
  bool inside = false;  // of a word
  for (size_t i = 0; i < name.size(); ++i) {
    const auto is_lower = [&](size_t at) { return at < name.size() && std::islower(uint8_t(name[at])); };
    if (name[i] == '.') parts.emplace_back();
    const bool letter = std::isalpha(uint8_t(name[i]));
    const bool capital = letter && !is_lower(i) && (is_lower(i + 1) || (i > 0 && is_lower(i - 1)));
    if (letter && (!inside || capital)) parts.back().emplace_back();
    if (letter) parts.back().back() += char(std::tolower(uint8_t(name[i])));
    inside = letter;
  }
  return parts;
}

}  // namespace

bool is_hidden_matrix(const nn::NamedParameter& parameter) {
  const Tensor& tensor = parameter.tensor;
  if (!decays(parameter) || tensor.size(-1) < 2 || tensor.size(-2) < 2) return false;
  constexpr std::string_view kOuter[] = {"token", "tokens", "position",   "positions",  "type",
                                         "types", "embed",  "embedding",  "embeddings", "head",
                                         "heads", "lm",     "classifier", "language"};
  return std::ranges::none_of(words_of(parameter.name), [&](const auto& part) {
    return !part.empty() && std::ranges::find(kOuter, part.front()) != std::end(kOuter);
  });
}

bool decays(const nn::NamedParameter& parameter) {
  if (parameter.tensor.rank() <= 1) return false;
  const std::string& name = parameter.name;
  if (name == "bias" || name.ends_with(".bias")) return false;
  return std::ranges::none_of(words_of(name), [](const auto& part) {
    return std::ranges::any_of(part, [](const std::string& word) {
      return word == "ln" || word.ends_with("norm") || word.ends_with("norms");
    });
  });
}

void check_loss_scale(const char* name, const LossScale& options) {
  const auto is_power = [](double value) {
    int exponent = 0;
    return value > 0 && std::isfinite(value) && std::frexp(value, &exponent) == 0.5;
  };
  for (const auto& [field, value] :
       {std::pair("initial", options.initial), std::pair("growth", options.growth),
        std::pair("backoff", options.backoff), std::pair("minimum", options.minimum),
        std::pair("maximum", options.maximum)})
    check(is_power(value), name, ": loss_scale.", field, " is ", value, "; expected a power of two");
  check(options.growth >= 1 && options.backoff < 1 && options.interval >= 1, name,
        ": loss_scale.growth = ", options.growth, ", backoff = ", options.backoff,
        " and interval = ", options.interval, " must be at least 1, less than 1 and at least 1");
  check(options.minimum <= options.initial && options.initial <= options.maximum &&
            options.minimum >= 0x1p-64 && options.maximum <= 0x1p64,
        name, ": loss_scale.initial = ", options.initial, " must be from minimum = ", options.minimum,
        " to maximum = ", options.maximum, ", and these from 2^-64 to 2^64");
}

Optimizer::Optimizer(const char* name, std::vector<nn::NamedParameter> parameters,
                     const OptimizerOptions& options, std::vector<RuleUse> rules)
    : state_(std::make_shared<State>()) {
  const MemoryTag tag("optimizer");
  check(!rules.empty() && rules.size() <= size_t(kMostRules), name, ": ", rules.size(),
        " rules; expected 1 to ", kMostRules);
  for (size_t i = 0; i < rules.size(); ++i) check(rules[i].rule != nullptr, name, ": rule ", i, " is null");
  check(
      !parameters.empty(), name,
      ": there are no parameters; expected at least one (a model whose parameters are all frozen has none)");
  check(options.weight_decay >= 0 && options.max_grad_norm >= 0, name,
        ": weight_decay = ", options.weight_decay, " and max_grad_norm = ", options.max_grad_norm,
        " must not be negative");
  state_->buffers = std::make_shared<Buffers>();
  state_->buffers->name = name;
  check_states(options, parameters, rules);
  assign(std::move(parameters), options, rules);
  shard_states(options.sharding, rules);
  check_missing(options, rules);
  make_gradients();
  make_rules(rules);
  state_->prepare.max_grad_norm = options.max_grad_norm;
  if (options.loss_scale) {
    const Device device = state_->buffers->packing.device();
    check_loss_scale(name, *options.loss_scale);
    state_->scale_options = *options.loss_scale;
    state_->scale = Tensor::full({}, options.loss_scale->initial, DType::f32, device);
    state_->scale_counts = Tensor::zeros({kScaleCountSlots}, DType::i64, device);
    state_->scale_version = state_->scale.version();
  }
  set_lr(options.lr);
}

bool Group::fits(const nn::NamedParameter& parameter) const {
  return parameter.name.find(contains) != std::string::npos && (!matches || matches(parameter));
}

namespace {

bool is_scale(double value) {
  return value >= 0 && std::isfinite(value);
}

/// A rate below 0 would move weights up the gradient; NaN would make them NaN, though no gradient is.
void check_scales(const std::string& name, const std::vector<Group>& groups,
                  const std::vector<RuleUse>& rules) {
  for (const RuleUse& use : rules)
    check(is_scale(use.lr_scale), name, ": lr_scale of the rule ", use.rule->name(), " is ", use.lr_scale,
          "; it must be finite and not negative");
  for (size_t g = 0; g < groups.size(); ++g) {
    const double decay = groups[g].weight_decay.value_or(0);
    check(is_scale(groups[g].lr_scale) && is_scale(decay), name, ": groups[", g, "] (contains \"",
          groups[g].contains, "\") has lr_scale = ", groups[g].lr_scale, " and weight_decay = ", decay,
          "; they must be finite and not negative");
  }
}

/// Bytes of a tensor with rows, from the start of its storage.
struct RowBytes {
  const nn::NamedParameter* parameter;
  int64_t first, width, pitch, rows;
  int64_t end() const { return first + (rows - 1) * pitch + width; }
};

/// Whether a byte of one is a byte of the other.
bool overlap(const RowBytes& a, const RowBytes& b) {
  for (int64_t row = 0; row < a.rows; ++row) {
    const int64_t begin = a.first + row * a.pitch, past = begin - b.first - b.width;
    const int64_t next = past < 0 ? 0 : past / b.pitch + 1;  // the first row of b that ends after `begin`
    if (next < b.rows && b.first + next * b.pitch < begin + a.width) return true;
  }
  return false;
}

/// A step would update common elements once per parameter, each time by a part of their gradient. Parameters
/// without rows are refused later.
void check_overlaps(const std::string& name, const std::vector<nn::NamedParameter>& parameters) {
  std::map<const Storage*, std::vector<RowBytes>> known;
  for (const nn::NamedParameter& parameter : parameters) {
    const Tensor& tensor = parameter.tensor;
    const Layout& layout = tensor.layout();
    if (tensor.count() == 0 || !layout.has_rows() || layout.is_expanded()) continue;
    const auto size = int64_t(size_of(tensor.dtype()));
    const RowBytes own{&parameter, layout.offset * size, layout.row_length() * size,
                       layout.row_stride() * size, layout.rows()};
    std::vector<RowBytes>& others = known[tensor.storage().get()];
    for (const RowBytes& other : others) {
      if (other.end() <= own.first || own.end() <= other.first || !overlap(own, other)) continue;
      const bool same = other.parameter->tensor.same_elements(tensor);
      fail_at(Site::here(), name, ": the parameters ", other.parameter->name, " and ", parameter.name,
              same
                  ? " have their elements in one place, but gradients of their own; make one of them the "
                    "parameter, and then the other a copy of it (tied weights), or clone() it"
                  : " have some elements in one place, but gradients of their own; make the tensor that they "
                    "are parts of the parameter, or clone() one of them");
    }
    others.push_back(own);
  }
}

/// A group that fits nothing changes nothing: a misspelt name would go unnoticed.
void check_groups(const std::string& name, const std::vector<Group>& groups,
                  const std::vector<nn::NamedParameter>& parameters) {
  constexpr size_t kShown = 5;
  for (size_t g = 0; g < groups.size(); ++g) {
    const Group& group = groups[g];
    if (group.optional || std::ranges::any_of(parameters, [&](const auto& p) { return group.fits(p); }))
      continue;
    std::string known;
    for (size_t i = 0; i < std::min(kShown, parameters.size()); ++i)
      known += (i ? ", " : "") + parameters[i].name;
    if (parameters.size() > kShown) known += ", ...";
    fail_at(Site::here(), name, ": groups[", g, "] (contains \"", group.contains, "\"",
            group.matches ? ", and a function of its own" : "", ") fits none of the ", parameters.size(),
            " parameters (", known, "); correct it, or set .optional = true");
  }
}

}  // namespace

/// Finds a rule and the settings for each parameter, and a place in the arenas: rule by rule, so that a
/// rule's states cover its own parameters only.
void Optimizer::assign(std::vector<nn::NamedParameter> parameters, const OptimizerOptions& options,
                       const std::vector<RuleUse>& rules) {
  Buffers& buffers = *state_->buffers;
  const std::string& name = buffers.name;
  check_scales(name, options.groups, rules);
  std::vector<double> lr_scales, decay;
  std::vector<std::vector<size_t>> members(rules.size());
  std::map<const GradState*, std::string> given;
  std::set<std::string> names;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const nn::NamedParameter& parameter = parameters[i];
    check(parameter.tensor.defined(), name, ": the parameter ", parameter.name,
          " is undefined; make its tensor before the optimizer, or leave it out as nn::parameters does");
    if (const GradState* const state = parameter.tensor.grad_state().get()) {
      const auto [first, is_new] = given.emplace(state, parameter.name);
      check(is_new, name, ": the parameters ", first->second, " and ", parameter.name,
            " are one tensor (tied weights?); give it once, as nn::parameters does");
    }
    check(names.insert(parameter.name).second, name, ": two parameters are named ", parameter.name,
          ", the second ", describe(parameter.tensor),
          "; states are saved by these names: give each its own, such as a prefix for each model");
    const auto group =
        std::ranges::find_if(options.groups, [&](const Group& g) { return g.fits(parameter); });
    const bool grouped = group != options.groups.end(), told = grouped && !group->rule.empty();
    const auto use = std::find_if(rules.begin(), rules.end(), [&](const RuleUse& candidate) {
      return told ? candidate.rule->name() == group->rule : !candidate.takes || candidate.takes(parameter);
    });
    check(use != rules.end(), name, ": ", parameter.name, " ", describe(parameter.tensor),
          told ? " is in a group with the rule \"" + group->rule + "\", which this optimizer lacks"
               : std::string(" has no rule; let the last rule take all"));
    buffers.rule_of.push_back(int(use - rules.begin()));
    members[size_t(use - rules.begin())].push_back(i);
    lr_scales.push_back(use->lr_scale * (grouped ? group->lr_scale : 1.0));
    decay.push_back(decays(parameter) ? options.weight_decay : 0);
    if (grouped) decay.back() = group->weight_decay.value_or(decay.back());
  }
  check_overlaps(name, parameters);
  check_groups(name, options.groups, parameters);
  std::vector<size_t> arrangement;
  for (size_t r = 0; r < rules.size(); ++r) {
    const auto key = [&](size_t i) {
      const Tensor& tensor = parameters[i].tensor;
      const std::span<const int64_t> sizes = tensor.shape().sizes();
      return std::pair(tensor.dtype(), std::vector<int64_t>(sizes.begin(), sizes.end()));
    };
    if (rules[r].rule->batches())
      std::stable_sort(members[r].begin(), members[r].end(),
                       [&](size_t a, size_t b) { return key(a) < key(b); });
    arrangement.insert(arrangement.end(), members[r].begin(), members[r].end());
  }
  buffers.packing =
      Packing(name.c_str(), std::move(parameters), std::move(arrangement), state_->args.short_states);
  buffers.members = std::move(members);
  for (size_t i = 0; i < lr_scales.size(); ++i) {
    buffers.packing.places()[i].lr_scale = lr_scales[i];
    buffers.packing.places()[i].weight_decay = decay[i];
  }
}

/// Decides which ranks hold what.
void Optimizer::shard_states(const Sharding& sharding, const std::vector<RuleUse>& rules) {
  const Buffers& buffers = *state_->buffers;
  const Packing& packing = buffers.packing;
  check(sharding.parts >= 1 && sharding.part >= 0 && sharding.part < sharding.parts, buffers.name, ": part ",
        sharding.part, " of ", sharding.parts, " of the states");
  state_->sharding = sharding;
  if (sharding.parts == 1) return;
  for (const RuleUse& use : rules)
    check(use.rule->spreads(), buffers.name, ": the states of the rule ", use.rule->name(),
          " cannot be spread over ranks: it works on whole tensors; use adamw or sgd, without momentum "
          "resets, or --zero 0");
  ShardedState sharded;
  sharded.buckets = buckets_of(packing, sharding.bucket_mb);
  cut_buckets(sharded.buckets, packing, sharding.parts);
  sharded.state_shards =
      state_shards_of(sharded.buckets, packing, sharding.part, packing.range(0, parameters().size()));
  for (const WeightShard& weight_shard : weight_shards_of(sharded.buckets, packing)) {
    sharded.weights.push_back(weight_shard.weight);
    sharded.owners.push_back(weight_shard.owner);
  }
  std::vector<NormBlock> own;
  for (NormBlock block : packing.norm_blocks()) {
    const auto state_shard = std::ranges::find_if(sharded.state_shards, [&](const StateShard& p) {
      return p.range.first <= block.offset && block.offset < p.range.first + p.range.elements;
    });
    if (state_shard == sharded.state_shards.end()) continue;
    if (sharding.gradients) block.offset += state_shard->own_at - state_shard->range.first;
    own.push_back(block);
  }
  sharded.own_blocks = Packing::table_on(packing.device(), own);
  sharded.own_block_count = int64_t(own.size());
  state_->sharded = std::make_shared<ShardedState>(std::move(sharded));
}

void Optimizer::check_states(const OptimizerOptions& options,
                             const std::vector<nn::NamedParameter>& parameters,
                             const std::vector<RuleUse>& rules) const {
  const std::string& name = state_->buffers->name;
  check(options.states == DType::f32 || options.states == DType::bf16, name, ": states in ", options.states,
        "; expected f32 or bf16");
  state_->args.short_states = options.states == DType::bf16;
  state_->args.rounding_seed = options.rounding_seed;
  if (options.states == DType::f32) return;
  for (const auto& [parameter, tensor] : parameters)
    check(!tensor.defined() || tensor.dtype() == DType::f32 || tensor.dtype() == DType::bf16, name, ": ",
          parameter, " ", describe(tensor),
          ": states in bf16 are for bf16 and f32 parameters; take states in f32");
  for (const RuleUse& use : rules)
    check(use.rule->takes_short_states(), name, ": the rule ", use.rule->name(),
          " cannot have states in bf16: it does more with them than one elementwise update; take adamw or "
          "sgd, or states in f32");
}

void Optimizer::check_missing(const OptimizerOptions& options, const std::vector<RuleUse>& rules) const {
  state_->missing = options.missing;
  if (options.missing == MissingGrad::zero) return;
  check(options.sharding.parts == 1, state_->buffers->name,
        ": missing gradients are skipped on one rank alone: others may have got them; take zero");
  for (const RuleUse& use : rules)
    check(use.rule->spreads(), state_->buffers->name, ": the rule ", use.rule->name(),
          " cannot skip missing gradients: it does more than one elementwise update; take adamw without "
          "restarts of its moments, or sgd, or let missing gradients be zero");
}

void Optimizer::make_gradients() {
  Buffers& buffers = *state_->buffers;
  Packing& packing = buffers.packing;
  const DType compute = packing.compute_dtype();
  for (const auto& [parameter, tensor] : packing.parameters()) {
    check(requires_grad(tensor), buffers.name, ": ", parameter, " ", describe(tensor),
          " does not require a gradient; call nn::make_parameter");
    check(tensor.grad_state()->grad_dtype == compute, buffers.name, ": the gradient of ", parameter, " is ",
          tensor.grad_state()->grad_dtype, ", expected ", compute, "; call nn::make_parameter or ",
          "require_grad(tensor, DType::", compute, ")");
  }
  packing.upload();
  ShardedState* const sharded = state_->sharded.get();
  const bool spreads = sharded && state_->sharding.gradients;
  if (spreads) {
    sharded->ring = std::make_shared<GradientRing>(std::shared_ptr<const Packing>(state_->buffers, &packing),
                                                   sharded->buckets, state_->sharding.part);
    buffers.gradients = sharded->ring->own();
  } else {
    buffers.gradients = packing.make_arena();
  }
  buffers.masters = packing.make_masters();
  if (sharded) {
    const int64_t own = sharded->state_shards.empty()
                            ? 0
                            : sharded->state_shards.back().master_at + sharded->state_shards.back().masters;
    buffers.masters = Tensor::zeros({own}, compute, packing.device());
  }
  sync_masters();
  for (size_t i = 0; !spreads && i < packing.parameters().size(); ++i)
    set_grad_buffer(packing.parameters()[i].tensor, packing.view(buffers.gradients, i));
  buffers.partials = Tensor::empty({int64_t(packing.norm_blocks().size())}, DType::f64, packing.device());
  state_->status = Tensor::zeros({kStatusSlots}, DType::f64, packing.device());
  state_->counts = Tensor::zeros({kCountSlots}, DType::i64, packing.device());
  if (state_->missing == MissingGrad::zero) return;
  const auto count = int64_t(packing.parameters().size());
  state_->arrived_there.assign(size_t(count), 0);
  state_->arrived = Tensor::from(state_->arrived_there, {count}, packing.device());
  state_->parameter_steps = Tensor::zeros({count}, DType::i64, packing.device());
  state_->parameter_bias = Tensor::zeros({2 * count}, DType::f64, packing.device());
}

void Optimizer::make_rules(const std::vector<RuleUse>& rules) {
  Buffers& buffers = *state_->buffers;
  const Packing& packing = buffers.packing;
  StepArgs& common = state_->args;
  common.places = packing.place_table();
  common.gradients = buffers.gradients.raw();
  common.norm_blocks = packing.norm_block_table();
  common.norm_block_count = common.norm_slots = int64_t(packing.norm_blocks().size());
  common.masters = buffers.masters.raw();
  ShardedState* const sharded = state_->sharded.get();
  if (sharded) {
    common.norm_blocks = static_cast<const NormBlock*>(sharded->own_blocks.raw());
    common.norm_block_count = sharded->own_block_count;
  }
  common.status = state_->status.data<double>();
  common.counts = state_->counts.data<int64_t>();
  if (state_->arrived.defined()) {
    common.arrived = state_->arrived.data<uint8_t>();
    common.parameter_steps = state_->parameter_steps.data<int64_t>();
    common.parameter_bias = state_->parameter_bias.data<double>();
    common.place_count = state_->arrived.count();
  }
  size_t position = 0;
  for (size_t r = 0; r < rules.size(); ++r) {
    Rule& rule = *rules[r].rule;
    check(rule.packing_ == nullptr, buffers.name, ": the rule ", rule.name(),
          " belongs to another optimizer; make one for each");
    rule.packing_ = &packing;
    rule.members_ = buffers.members[r];
    rule.range_ = packing.range(position, position + rule.members_.size());
    position += rule.members_.size();
    rule.args_ = common;
    rule.args_.chunks = packing.chunk_table();
    rule.args_.rule = int(r);
    rule.counts_ = state_->counts, rule.status_ = state_->status;
    rule.is_sharded_ = sharded != nullptr;
    rule.owns_gradients_ = sharded && sharded->ring;
    rule.state_shards_ = sharded
                             ? state_shards_of(sharded->buckets, packing, state_->sharding.part, rule.range_)
                             : std::vector<StateShard>{{.range = rule.range_}};
    for (const size_t i : rule.members_) {
      const auto& [name, tensor] = packing.parameters()[i];
      rule.parameters_.push_back(
          {.name = name,
           .weight = tensor.detach(),
           .master = !packing.has_master(i) ? tensor.detach()
                     : sharded              ? Tensor()
                                            : packing.master_view(buffers.masters, i),
           .gradient = sharded && sharded->ring ? Tensor() : packing.view(buffers.gradients, i),
           .lr_scale = packing.places()[i].lr_scale,
           .weight_decay = packing.places()[i].weight_decay});
    }
    rule.begin();
    if (rule.restarts_ && !state_->restarts.defined())
      state_->restarts = Tensor::zeros({kMostRules}, DType::i64, packing.device());
    state_->prepare.betas[r] = rule.betas();
    for (const Rule::ShardedArena& arena : rule.sharded_arenas_) {
      sharded->arenas.push_back({arena.own, rule.range_, false, arena.views});
      for (auto& [number, parameter] : sharded->arenas.back().views) number += state_->parts.size();
    }
    for (const Rule::NamedState& state : rule.saved_) state_->parts.push_back({state.name, state.tensor});
    state_->rules.push_back(rules[r].rule);
  }
  for (const RuleUse& use : rules) use.rule->restart_counts_ = state_->restarts;
  if (state_->restarts.defined()) common.restarts = state_->restarts.data<int64_t>();
  if (sharded) sharded->arenas.push_back({buffers.masters, packing.range(0, parameters().size()), true, {}});
  for (size_t i = 0; i < packing.parameters().size(); ++i) {
    if (!packing.has_master(i)) continue;
    if (sharded) sharded->arenas.back().views.emplace_back(state_->parts.size(), i);
    state_->parts.push_back({"master." + packing.parameters()[i].name,
                             sharded ? Tensor() : packing.master_view(buffers.masters, i)});
  }
  std::set<std::string> names;
  for (const NamedState& part : state_->parts)
    check(names.insert(part.name).second, buffers.name, ": two states are named ", part.name,
          "; give each rule's states names of their own");
}

}  // namespace tessera::optim
