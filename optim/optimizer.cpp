#include "optim/optimizer.h"

#include <algorithm>
#include <cmath>

#include "optim/kernels.h"
#include "runtime/allocator.h"
#include "runtime/capture.h"
#include "runtime/profile.h"

namespace tessera::optim {

struct Optimizer::Buffers {
  Buffers(const char* name, std::vector<nn::NamedParameter> parameters)
      : name(name), packing(name, std::move(parameters)) {}
  const char* name;
  Packing packing;
  Tensor gradients, masters, partials;
  std::vector<Tensor> states;
};

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
                     std::vector<const char*> states, double lr, double weight_decay,
                     const std::vector<Group>& groups, const std::optional<LossScale>& loss_scale)
    : state_(std::make_shared<State>()) {
  const MemoryTag tag("optimizer");
  state_->buffers = std::make_shared<Buffers>(name, std::move(parameters));
  Buffers& buffers = *state_->buffers;
  Packing& packing = buffers.packing;
  const auto& list = packing.parameters();
  const DType compute = packing.compute_dtype();
  for (size_t i = 0; i < list.size(); ++i) {
    const auto& [parameter, tensor] = list[i];
    check(requires_grad(tensor), name, ": ", parameter, " ", describe(tensor),
          " does not require a gradient; call nn::make_parameter");
    check(tensor.grad_state()->grad_dtype == compute, name, ": the gradient of ", parameter, " is ",
          tensor.grad_state()->grad_dtype, ", expected ", compute, "; call nn::make_parameter or ",
          "require_grad(tensor, DType::", compute, ")");
    Place& place = packing.places()[i];
    place.weight_decay = decays(list[i]) ? weight_decay : 0;
    const auto group = std::find_if(groups.begin(), groups.end(), [&](const Group& candidate) {
      return parameter.find(candidate.contains) != std::string::npos;
    });
    if (group == groups.end()) continue;
    place.lr_scale = group->lr_scale;
    place.weight_decay = group->weight_decay.value_or(place.weight_decay);
  }
  packing.upload();

  buffers.gradients = packing.make_arena();
  for (const char* const state : states) {
    buffers.states.push_back(packing.make_arena());
    for (size_t i = 0; i < list.size(); ++i)
      state_->parts.push_back(
          {std::string(state) + "." + list[i].name, packing.view(buffers.states.back(), i)});
  }
  buffers.masters = packing.make_masters();
  for (size_t i = 0; i < list.size(); ++i)
    if (packing.has_master(i))
      state_->parts.push_back({"master." + list[i].name, packing.master_view(buffers.masters, i)});
  sync_masters();
  for (size_t i = 0; i < list.size(); ++i)
    set_grad_buffer(list[i].tensor, packing.view(buffers.gradients, i));

  const Device device = packing.device();
  buffers.partials = Tensor::empty({int64_t(packing.norm_blocks().size())}, DType::f64, device);
  state_->status = Tensor::zeros({kStatusSlots}, DType::f64, device);
  state_->counts = Tensor::zeros({kCountSlots}, DType::i64, device);
  if (loss_scale) {
    check_loss_scale(name, *loss_scale);
    state_->scale_options = *loss_scale;
    state_->scale = Tensor::full({}, loss_scale->initial, DType::f32, device);
    state_->scale_counts = Tensor::zeros({kScaleCountSlots}, DType::i64, device);
    state_->scale_version = state_->scale.version();
  }
  set_lr(lr);
}

void Optimizer::zero_grad() const {
  for (const nn::NamedParameter& parameter : parameters()) tessera::zero_grad(parameter.tensor);
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
  check_loss_scale(state_->buffers->name, options);
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
  for (const Tensor& state : buffers.states) bytes += state.bytes();
  return bytes;
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

void Optimizer::step(const Rule& rule, PrepareOptions prepare) {
  const ProfileRange range("optimizer");
  Buffers& buffers = *state_->buffers;
  Packing& packing = buffers.packing;
  const Device device = packing.device();
  const auto& list = packing.parameters();
  bool arrived = false;
  for (size_t i = 0; i < list.size(); ++i) {
    if (grad(list[i].tensor).defined())
      arrived = true;
    else
      packing.view(buffers.gradients, i).fill(0);
  }
  if (const Tensor& scale = state_->scale; scale.defined()) {
    check(!arrived || scale.version() != state_->scale_version, buffers.name,
          ": no backward pass since the last step had the loss scale, by which the gradients are to be "
          "divided; "
          "make the tape with Tape tape({.loss_scale = optimizer.loss_scale()})");
    state_->scale_version = scale.version();
  }

  CaptureSession* const session = CaptureSession::current();
  if (session && session->device() == device) {
    session->add({.key = state_.get(),
                  .before_launch = [state = state_] { state->upload_lr(); },
                  .capture_end = [] {},
                  .after_launch = [] {}});
  } else {
    state_->upload_lr();
  }

  StepArgs args;
  args.places = packing.place_table();
  args.chunks = packing.chunk_table();
  args.chunk_count = packing.chunk_count();
  args.gradients = buffers.gradients.raw();
  args.norm_blocks = packing.norm_block_table();
  args.norm_block_count = int64_t(packing.norm_blocks().size());
  for (size_t i = 0; i < buffers.states.size(); ++i) args.states[i] = buffers.states[i].raw();
  args.masters = buffers.masters.raw();
  args.status = state_->status.data<double>();
  args.counts = state_->counts.data<int64_t>();
  if (state_->scale.defined()) {
    args.scaling = {state_->scale.data<float>(), state_->scale_counts.data<int64_t>()};
    prepare.loss_scale = state_->scale_options;
  }
  double* const partials = buffers.partials.data<double>();
  if (device.is_cpu()) {
    measure_cpu(packing.compute_dtype(), args, partials, prepare);
    update_cpu(args, rule);
  } else {
    if constexpr (kCuda) {
      measure_cuda(device, args, partials, prepare);
      update_cuda(device, args, rule);
    }
  }
  for (const nn::NamedParameter& parameter : list) parameter.tensor.bump_version();
}

}  // namespace tessera::optim
