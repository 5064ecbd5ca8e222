#include "optim/optimizer.h"

#include <algorithm>

#include "ops/pointwise/pointwise.h"
#include "ops/reduce/reduce.h"
#include "optim/kernels.h"
#include "optim/optimizer_internal.h"
#include "runtime/capture.h"
#include "runtime/has_cuda.h"
#include "runtime/profile.h"
#include "runtime/text.h"

namespace tessera::optim {

void Optimizer::zero_grad() const {
  for (const nn::NamedParameter& parameter : parameters()) tessera::zero_grad(parameter.tensor);
  state_->complete = false;
  if (const auto made = ring()) made->forget();
}

void Optimizer::check_replaced(size_t parameter) const {
  const auto& [name, tensor] = parameters()[parameter];
  const std::string by = tensor.grad_state()->replaced_by;
  check(by == "nn::freeze" && state_->missing == MissingGrad::skip, state_->buffers->name, ": ", name, " ",
        describe(tensor), " is no parameter of a model any more: ", by,
        " was called after the optimizer was made; make the optimizer afterwards");
}

/// Whether the gradient of that parameter has arrived since zero_grad(). Throws if it lies elsewhere than in
/// this optimizer's memory, which a step reads.
bool Optimizer::has_gradient(size_t parameter) const {
  const auto& [name, tensor] = parameters()[parameter];
  const Buffers& buffers = *state_->buffers;
  // Of a copy of a model that was frozen or moved the parameters are still those of the model itself.
  const std::shared_ptr<GradState>& own = tensor.grad_state();
  if (own->replaced_by && own.use_count() == 1) check_replaced(parameter);
  const Tensor arrived = grad(tensor);
  if (!arrived.defined()) return false;
  check(ring() || arrived.raw() == buffers.packing.view(buffers.gradients, parameter).raw(), buffers.name,
        ": the gradient of ", name,
        " belongs to another optimizer of the same parameters, made later (or set_grad_buffer moved it); "
        "take one optimizer per parameter, and make it last");
  return true;
}

void Optimizer::complete_gradients() const {
  const Buffers& buffers = *state_->buffers;
  for (size_t i = 0; !ring() && i < parameters().size(); ++i)
    if (!has_gradient(i)) buffers.packing.view(buffers.gradients, i).fill(0);
  state_->complete = true;
}

void Optimizer::on_gradients(std::function<void(const Tensor& gradients)> f) {
  check(!f || state_->missing == MissingGrad::zero, state_->buffers->name,
        ": gradients that something else completes are never missing; take MissingGrad::zero");
  state_->on_gradients = std::move(f);
}

MissingGrad parse_missing_grad(const std::string& name) {
  return parse_name<MissingGrad>("optimizer: there is no way to treat missing gradients", {"zero", "skip"},
                                 name);
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
  check(state_ != nullptr, "optimizer: it was moved from; call the one that it moved to");
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

std::vector<Bucket> Optimizer::buckets(double bucket_mb) const {
  return state_->sharded ? state_->sharded->buckets : buckets_of(state_->buffers->packing, bucket_mb);
}

std::shared_ptr<GradientRing> Optimizer::ring() const {
  return state_->sharded ? state_->sharded->ring : nullptr;
}

void Optimizer::join(const comm::Communicator& ranks) const {
  if (!state_->sharded) return;
  const Sharding& own = state_->sharding;
  check(ranks.size() == own.parts && ranks.rank() == own.part, state_->buffers->name, ": rank ", ranks.rank(),
        " of ", ranks.size(), " joins, but the optimizer holds part ", own.part, " of ", own.parts,
        " of its states");
  state_->sharded->ranks = ranks;
}

void Optimizer::check_whole() const {
  check(!state_->sharded || state_->sharded->whole, state_->buffers->name, ": its states are spread over ",
        state_->sharding.parts, " ranks; make an optim::WholeState before they are saved or loaded");
}

DType Optimizer::states() const {
  return state_->args.short_states ? DType::bf16 : state_->buffers->packing.compute_dtype();
}

const Tensor& Optimizer::masters() const {
  return state_->buffers->masters;
}

void Optimizer::sync_masters() const {
  const Buffers& buffers = *state_->buffers;
  if (const ShardedState* const sharded = state_->sharded.get()) {
    for (const WeightShard& weight_shard : weight_shards_of(sharded->buckets, buffers.packing)) {
      if (weight_shard.owner != state_->sharding.part || !buffers.packing.has_master(weight_shard.parameter))
        continue;
      const auto state_shard = std::ranges::find_if(sharded->state_shards, [&](const StateShard& p) {
        return p.range.first <= weight_shard.first && weight_shard.first < p.range.first + p.range.elements;
      });
      const int64_t at = buffers.packing.masters_before(weight_shard.first) - state_shard->first_master +
                         state_shard->master_at;
      buffers.masters.slice(0, at, at + weight_shard.weight.count()).copy_from(weight_shard.weight);
    }
    return;
  }
  for (size_t i = 0; i < parameters().size(); ++i)
    if (buffers.packing.has_master(i))
      buffers.packing.master_view(buffers.masters, i).copy_from(parameters()[i].tensor);
  state_->note_versions();
}

size_t Optimizer::bytes() const {
  const Buffers& buffers = *state_->buffers;
  size_t bytes = (ring() ? ring()->bytes() : buffers.gradients.bytes()) + buffers.masters.bytes();
  for (const auto& rule : state_->rules) bytes += rule->bytes();
  return bytes;
}

void Optimizer::State::check_weights() {
  check(averages == 0, buffers->name,
        ": step() while the averages of an Ema are in the weights' place, which would be lost; call "
        "Ema::restore() first");
  // In a capture nothing can be read; each launch of the graph comes here before it.
  if (buffers->masters.count() > 0 && !sharded && !CaptureSession::current()) check_masters();
}

/// A step computes on masters: weights that were written since the last one, and masters that were not, must
/// be these masters rounded, as after weights were replaced for an evaluation. Reads them only then.
void Optimizer::State::check_masters() {
  const Packing& packing = buffers->packing;
  const auto& list = packing.parameters();
  const bool restored = buffers->masters.version() != masters_version;
  for (size_t i = 0; !restored && i < list.size(); ++i) {
    const Tensor weight = list[i].tensor.detach();
    if (!packing.has_master(i) || weight.version() == weight_versions[i] || weight.count() == 0) continue;
    const NoTape off;
    const Tensor excess = ops::sub(weight, packing.master_view(buffers->masters, i).to(weight.dtype()));
    const bool differs = ops::max(excess).item() > 0 || ops::max(ops::scale(excess, -1)).item() > 0;
    check(!differs, buffers->name, ": ", list[i].name, " ", describe(weight),
          " was written since the last step, but not its f32 master, from which the step computes the weight "
          "anew; call sync_masters() after writing weights");
  }
  note_versions();
}

void Optimizer::State::note_versions() {
  masters_version = buffers->masters.version();
  weight_versions.clear();
  for (const nn::NamedParameter& parameter : buffers->packing.parameters())
    weight_versions.push_back(parameter.tensor.version());
}

bool Optimizer::State::waits_for_host() const {
  return std::any_of(rules.begin(), rules.end(), [](const auto& rule) { return rule->waits_for_host(); });
}

void Optimizer::State::tick() const {
  for (const auto& rule : rules) rule->tick();
  if (sharded && sharded->ring) sharded->ring->use_sums();
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

void Optimizer::State::upload_arrived(const std::vector<uint8_t>& table) {
  if (arrived_there == table) return;
  arrived.copy_from(Tensor::from(table, {int64_t(table.size())}));
  arrived_there = table;
}

/// By parameter: 0, or 1 + the number of its rule where its gradient arrived.
std::vector<uint8_t> Optimizer::arrivals() const {
  std::vector<uint8_t> table;
  for (size_t i = 0; i < parameters().size(); ++i)
    table.push_back(has_gradient(i) ? uint8_t(1 + state_->buffers->rule_of[i]) : 0);
  return table;
}

void Optimizer::measure(const StepArgs& args, const PrepareOptions& prepare) const {
  const Buffers& buffers = *state_->buffers;
  double* const partials = buffers.partials.data<double>();
  const auto run = [&](Measure part) {
    optim::measure(buffers.packing.device(), buffers.packing.compute_dtype(), args, partials, prepare, part);
  };
  if (!state_->sharded) {
    run(Measure::whole);
    if (!args.arrived) return;
    if (buffers.packing.device().is_cpu()) {
      prepare_parameters_cpu(args, prepare);
    } else {
      if constexpr (kCuda) prepare_parameters_cuda(buffers.packing.device(), args, prepare);
    }
    return;
  }
  // Each slot is one rank's, to which the others add zeros: the sum over all is that of one rank, bit for
  // bit.
  buffers.partials.fill(0);
  run(Measure::squares);
  state_->sharded->ranks->all_reduce(buffers.partials);
  run(Measure::decision);
}

void Optimizer::step(Site site) {
  const CallScope call(site);
  const ProfileRange range("optimizer");
  parameters();  // throws if it was moved from
  state_->check_weights();
  check(!state_->sharded || state_->sharded->ranks, state_->buffers->name, ": its states are spread over ",
        state_->sharding.parts, " ranks, which nothing has joined; make a dist::DataParallel before step()");
  Buffers& buffers = *state_->buffers;
  Packing& packing = buffers.packing;
  const Device device = packing.device();
  const auto& list = packing.parameters();
  const auto slots = ring();
  bool arrived = slots && slots->arrived();
  for (size_t i = 0; i < list.size(); ++i) {
    if (has_gradient(i))
      arrived = true;
    else if (!state_->complete && !slots)
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
  const bool skips = state_->missing == MissingGrad::skip;
  const std::vector<uint8_t> table = skips ? arrivals() : std::vector<uint8_t>();

  CaptureSession* const session = CaptureSession::current();
  const bool captured = session && session->device() == device;
  if (captured) {
    check(!state_->waits_for_host(), buffers.name,
          ": this step factorises matrices on the host, or does something else there, and cannot be "
          "captured; run it "
          "in an EagerScope while waits_for_host()");
    const bool first = session->add({.key = state_.get(),
                                     .before_launch =
                                         [state = state_, table] {
                                           state->check_weights();
                                           state->upload_lr();
                                           if (!table.empty()) state->upload_arrived(table);
                                         },
                                     .capture_end = [] {},
                                     .after_launch = [state = state_] { state->tick(); },
                                     .still_matches = [state = state_] { return !state->waits_for_host(); }});
    const bool counts_down =
        std::ranges::any_of(state_->rules, [](const auto& rule) { return rule->counts_down(); });
    check(first || !(skips || counts_down), buffers.name,
          ": a second step() in one captured body, but the host takes part in each step, once per launch; "
          "capture one step per body");
  } else {
    state_->upload_lr();
    if (skips) state_->upload_arrived(table);
  }

  StepArgs args = state_->args;
  PrepareOptions prepare = state_->prepare;
  // Nothing to step by. Not if ranks decide together, or if a graph's replays may have what is missing now.
  const bool alone = !state_->on_gradients && !state_->sharded && !captured;
  prepare.nothing = !arrived && (skips || (alone && !state_->complete));
  if (state_->scale.defined()) {
    args.scaling = {state_->scale.data<float>(), state_->scale_counts.data<int64_t>()};
    prepare.loss_scale = state_->scale_options;
  }
  const NoTape off;
  measure(args, prepare);
  for (const auto& rule : state_->rules) rule->step();
  if (const ShardedState* const sharded = state_->sharded.get())
    sharded->ranks->share(sharded->weights, sharded->owners);
  if (!captured) state_->tick();
  for (const nn::NamedParameter& parameter : list) parameter.tensor.bump_version();
  if (!captured && buffers.masters.count() > 0) state_->note_versions();
}

}  // namespace tessera::optim
