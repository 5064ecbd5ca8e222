#include "optim/optimizer.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <span>
#include <string_view>

#include "optim/kernels.h"
#include "runtime/allocator.h"
#include "runtime/capture.h"
#include "runtime/profile.h"

namespace tessera::optim {

struct Optimizer::Buffers {
  std::string name;
  std::vector<int> rule_of;                  // by parameter
  std::vector<std::vector<size_t>> members;  // by rule: parameters, in the order of the arenas
  Packing packing;
  Tensor gradients, masters, partials;
};

bool is_hidden_matrix(const nn::NamedParameter& parameter) {
  const Tensor& tensor = parameter.tensor;
  if (!decays(parameter) || tensor.size(-1) < 2 || tensor.size(-2) < 2) return false;
  std::string_view rest = parameter.name;
  while (!rest.empty()) {
    const std::string_view part = rest.substr(0, rest.find('.'));
    for (const char* const outer : {"token", "position", "type", "embed", "head", "classifier", "language"})
      if (part.starts_with(outer)) return false;
    rest.remove_prefix(std::min(rest.size(), part.size() + 1));
  }
  return true;
}

bool decays(const nn::NamedParameter& parameter) {
  if (parameter.tensor.rank() <= 1) return false;
  const std::string& name = parameter.name;
  const size_t dot = name.rfind('.');
  return name.substr(dot == std::string::npos ? 0 : dot + 1) != "bias" &&
         name.find("norm") == std::string::npos;
}

namespace {

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

}  // namespace

Optimizer::Optimizer(const char* name, std::vector<nn::NamedParameter> parameters,
                     const OptimizerOptions& options, std::vector<RuleUse> rules)
    : state_(std::make_shared<State>()) {
  const MemoryTag tag("optimizer");
  check(!rules.empty() && rules.size() <= size_t(kMostRules), name, ": ", rules.size(),
        " rules; expected 1 to ", kMostRules);
  check(options.weight_decay >= 0 && options.max_norm >= 0, name, ": weight_decay = ", options.weight_decay,
        " and max_norm = ", options.max_norm, " must not be negative");
  state_->buffers = std::make_shared<Buffers>();
  state_->buffers->name = name;
  assign(std::move(parameters), options, rules);
  make_gradients();
  make_rules(rules);
  state_->prepare.max_norm = options.max_norm;
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

/// Finds a rule and the settings for each parameter, and a place in the arenas: rule by rule, so that a
/// rule's states cover its own parameters only.
void Optimizer::assign(std::vector<nn::NamedParameter> parameters, const OptimizerOptions& options,
                       const std::vector<RuleUse>& rules) {
  Buffers& buffers = *state_->buffers;
  const std::string& name = buffers.name;
  std::vector<double> lr_scales, decay;
  std::vector<std::vector<size_t>> members(rules.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    const nn::NamedParameter& parameter = parameters[i];
    const auto group = std::find_if(options.groups.begin(), options.groups.end(), [&](const Group& g) {
      return parameter.name.find(g.contains) != std::string::npos && (!g.matches || g.matches(parameter));
    });
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
  buffers.packing = Packing(name.c_str(), std::move(parameters), std::move(arrangement));
  buffers.members = std::move(members);
  for (size_t i = 0; i < lr_scales.size(); ++i) {
    buffers.packing.places()[i].lr_scale = lr_scales[i];
    buffers.packing.places()[i].weight_decay = decay[i];
  }
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
  buffers.gradients = packing.make_arena();
  buffers.masters = packing.make_masters();
  sync_masters();
  for (size_t i = 0; i < packing.parameters().size(); ++i)
    set_grad_buffer(packing.parameters()[i].tensor, packing.view(buffers.gradients, i));
  buffers.partials = Tensor::empty({int64_t(packing.norm_blocks().size())}, DType::f64, packing.device());
  state_->status = Tensor::zeros({kStatusSlots}, DType::f64, packing.device());
  state_->counts = Tensor::zeros({kCountSlots}, DType::i64, packing.device());
}

void Optimizer::make_rules(const std::vector<RuleUse>& rules) {
  Buffers& buffers = *state_->buffers;
  const Packing& packing = buffers.packing;
  StepArgs& common = state_->args;
  common.places = packing.place_table();
  common.gradients = buffers.gradients.raw();
  common.norm_blocks = packing.norm_block_table();
  common.norm_block_count = int64_t(packing.norm_blocks().size());
  common.masters = buffers.masters.raw();
  common.status = state_->status.data<double>();
  common.counts = state_->counts.data<int64_t>();
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
    rule.args_.chunks = packing.chunk_table() + rule.range_.first_chunk;
    rule.args_.chunk_count = rule.range_.chunks;
    rule.args_.first_state = rule.range_.first;
    rule.args_.rule = int(r);
    rule.counts_ = state_->counts, rule.status_ = state_->status;
    for (const size_t i : rule.members_) {
      const auto& [name, tensor] = packing.parameters()[i];
      rule.parameters_.push_back(
          {.name = name,
           .weight = tensor.detach(),
           .master = packing.has_master(i) ? packing.master_view(buffers.masters, i) : tensor.detach(),
           .gradient = packing.view(buffers.gradients, i),
           .lr_scale = packing.places()[i].lr_scale,
           .weight_decay = packing.places()[i].weight_decay});
    }
    rule.begin();
    if (rule.restarts_ && !state_->restarts.defined())
      state_->restarts = Tensor::zeros({kMostRules}, DType::i64, packing.device());
    state_->prepare.betas[r] = rule.betas();
    for (const Rule::NamedState& state : rule.saved_) state_->parts.push_back({state.name, state.tensor});
    state_->rules.push_back(rules[r].rule);
  }
  for (const RuleUse& use : rules) use.rule->restart_counts_ = state_->restarts;
  if (state_->restarts.defined()) common.restarts = state_->restarts.data<int64_t>();
  for (size_t i = 0; i < packing.parameters().size(); ++i)
    if (packing.has_master(i))
      state_->parts.push_back(
          {"master." + packing.parameters()[i].name, packing.master_view(buffers.masters, i)});
  std::set<std::string> names;
  for (const NamedState& part : state_->parts)
    check(names.insert(part.name).second, buffers.name, ": two states are named ", part.name,
          "; give each rule's states names of their own");
}

void Optimizer::zero_grad() const {
  for (const nn::NamedParameter& parameter : parameters()) tessera::zero_grad(parameter.tensor);
  state_->complete = false;
}

void Optimizer::complete_gradients() const {
  const Buffers& buffers = *state_->buffers;
  for (size_t i = 0; i < parameters().size(); ++i)
    if (!grad(parameters()[i].tensor).defined()) buffers.packing.view(buffers.gradients, i).fill(0);
  state_->complete = true;
}

void Optimizer::on_gradients(std::function<void(const Tensor& gradients)> f) {
  state_->on_gradients = std::move(f);
}

void Optimizer::set_lr(double lr) {
  check(lr >= 0 && lr - lr == 0, state_->buffers->name, ": learning rate ", lr,
        " must be finite and not negative");
  state_->lr = lr;
}

double Optimizer::lr() const {
  return state_->lr;
}

int64_t Optimizer::steps() const {
  return state_->counts.at({kSteps}).item<int64_t>();
}

int64_t Optimizer::skipped() const {
  return state_->counts.at({kSkipped}).item<int64_t>();
}

Tensor Optimizer::grad_norm_tensor() const {
  return state_->status.at({kNorm});
}

double Optimizer::grad_norm() const {
  return grad_norm_tensor().item<double>();
}

const Tensor& Optimizer::loss_scale() const {
  return state_->scale;
}

void Optimizer::set_loss_scale(const LossScale& options) {
  check(state_->scale.defined(), state_->buffers->name,
        ": set_loss_scale() without loss scaling; give the options' loss_scale when making the optimizer");
  check_loss_scale(state_->buffers->name.c_str(), options);
  state_->scale_options = options;
  if (steps() > 0 || skipped() > 0) return;
  state_->scale.fill(options.initial);
  state_->scale_version = state_->scale.version();
}

int64_t Optimizer::skipped_at_minimum() const {
  return state_->scale_counts.defined() ? state_->scale_counts.at({kSkippedAtMinimum}).item<int64_t>() : 0;
}

const Tensor& Optimizer::gradients() const {
  return state_->buffers->gradients;
}

const std::vector<nn::NamedParameter>& Optimizer::parameters() const {
  return state_->buffers->packing.parameters();
}

const char* Optimizer::rule_of(size_t parameter) const {
  check(parameter < parameters().size(), state_->buffers->name, ": there is no parameter ", parameter, " of ",
        parameters().size());
  return state_->rules[size_t(state_->buffers->rule_of[parameter])]->name();
}

const std::vector<size_t>& Optimizer::arrangement() const {
  return state_->buffers->packing.arrangement();
}

PackedRange Optimizer::range(size_t begin, size_t end) const {
  check(begin <= end && end <= arrangement().size(), state_->buffers->name, ": parameters ", begin, " to ",
        end, " of ", arrangement().size());
  return state_->buffers->packing.range(begin, end);
}

const Tensor& Optimizer::masters() const {
  return state_->buffers->masters;
}

void Optimizer::sync_masters() const {
  const Buffers& buffers = *state_->buffers;
  for (size_t i = 0; i < parameters().size(); ++i)
    if (buffers.packing.has_master(i))
      buffers.packing.master_view(buffers.masters, i).copy_from(parameters()[i].tensor);
}

size_t Optimizer::bytes() const {
  const Buffers& buffers = *state_->buffers;
  size_t bytes = buffers.gradients.bytes() + buffers.masters.bytes();
  for (const auto& rule : state_->rules) bytes += rule->bytes();
  return bytes;
}

bool Optimizer::State::waits_for_host() const {
  return std::any_of(rules.begin(), rules.end(), [](const auto& rule) { return rule->waits_for_host(); });
}

void Optimizer::State::tick() const {
  for (const auto& rule : rules) rule->tick();
}

bool Optimizer::waits_for_host() const {
  return state_->waits_for_host();
}

std::string Optimizer::report() const {
  std::string text;
  for (const auto& rule : state_->rules)
    if (const std::string line = rule->report(); !line.empty()) text += line + "\n";
  return text;
}

void Optimizer::State::upload_lr() {
  if (uploaded_lr == lr) return;
  if (status.device().is_cpu()) {
    status.data<double>()[kRate] = lr;
  } else {
    if constexpr (kCuda) write_status_cuda(status.device(), status.data<double>(), kRate, lr);
  }
  uploaded_lr = lr;
}

void Optimizer::step() {
  const ProfileRange range("optimizer");
  Buffers& buffers = *state_->buffers;
  Packing& packing = buffers.packing;
  const Device device = packing.device();
  const auto& list = packing.parameters();
  bool arrived = false;
  for (size_t i = 0; i < list.size(); ++i) {
    if (grad(list[i].tensor).defined())
      arrived = true;
    else if (!state_->complete)
      packing.view(buffers.gradients, i).fill(0);
  }
  if (const Tensor& scale = state_->scale; scale.defined()) {
    check(!arrived || scale.version() != state_->scale_version, buffers.name,
          ": no backward pass since the last step had the loss scale, by which the gradients are to be "
          "divided; "
          "make the tape with Tape tape({.loss_scale = optimizer.loss_scale()})");
    state_->scale_version = scale.version();
  }
  if (state_->on_gradients) state_->on_gradients(buffers.gradients);

  CaptureSession* const session = CaptureSession::current();
  const bool captured = session && session->device() == device;
  if (captured) {
    check(!state_->waits_for_host(), buffers.name,
          ": this step factorises matrices on the host, or does something else there, and cannot be "
          "captured; run it "
          "in an EagerScope while waits_for_host()");
    session->add({.key = state_.get(),
                  .before_launch = [state = state_] { state->upload_lr(); },
                  .capture_end = [] {},
                  .after_launch = [state = state_] { state->tick(); },
                  .still_matches = [state = state_] { return !state->waits_for_host(); }});
  } else {
    state_->upload_lr();
  }

  StepArgs args = state_->args;
  PrepareOptions prepare = state_->prepare;
  if (state_->scale.defined()) {
    args.scaling = {state_->scale.data<float>(), state_->scale_counts.data<int64_t>()};
    prepare.loss_scale = state_->scale_options;
  }
  double* const partials = buffers.partials.data<double>();
  if (device.is_cpu()) {
    measure_cpu(packing.compute_dtype(), args, partials, prepare);
  } else {
    if constexpr (kCuda) measure_cuda(device, args, partials, prepare);
  }
  const NoTape off;
  for (const auto& rule : state_->rules) rule->step();
  if (!captured) state_->tick();
  for (const nn::NamedParameter& parameter : list) parameter.tensor.bump_version();
}

}  // namespace tessera::optim
