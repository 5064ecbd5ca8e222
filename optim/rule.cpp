#include "optim/rule.h"
#include "runtime/has_cuda.h"

#include <algorithm>

namespace tessera::optim {

size_t Rule::bytes() const {
  size_t bytes = 0;
  for (const Tensor& tensor : memory_) bytes += tensor.bytes();
  return bytes;
}

Tensor Rule::make_arena(DType dtype) {
  const int64_t elements =
      state_shards_.empty() ? 0 : state_shards_.back().at + state_shards_.back().range.elements;
  memory_.push_back(Tensor::zeros({elements}, dtype, device()));
  return memory_.back();
}

Tensor Rule::scratch_arena() {
  return make_arena(compute_dtype());
}

Tensor Rule::scratch(int64_t elements, DType dtype) {
  memory_.push_back(Tensor::empty_packed({elements}, dtype, device()));
  return memory_.back();
}

Tensor Rule::arena(const char* state) {
  const Tensor made = make_arena(args_.short_states ? DType::bf16 : compute_dtype());
  // By the order of the model, whatever that of the arenas: checkpoints list names in that order.
  std::vector<size_t> order(members_.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return members_[a] < members_[b]; });
  if (is_sharded_) sharded_arenas_.push_back({made, {}});
  for (const size_t i : order) {
    if (is_sharded_) sharded_arenas_.back().views.emplace_back(saved_.size(), members_[i]);
    saved_.push_back(
        {std::string(state) + "." + parameters_[i].name, is_sharded_ ? Tensor() : view(made, i)});
  }
  return made;
}

void Rule::keep(const std::string& name, const Tensor& state) {
  memory_.push_back(state);
  saved_.push_back({name, state});
}

size_t Rule::every(const std::string& name, int64_t period, int64_t first) {
  const Tensor left = Tensor::full({1}, double(period > 0 ? first : -1), DType::i64, Device::cpu());
  countdowns_.push_back({left, period});
  if (period > 0) saved_.push_back({name, left});
  return countdowns_.size() - 1;
}

bool Rule::due(size_t countdown) const {
  return countdowns_[countdown].left.data<int64_t>()[0] == 0;
}

void Rule::done(size_t countdown) const {
  const Countdown& one = countdowns_[countdown];
  one.left.data<int64_t>()[0] = one.period;
}

void Rule::tick() const {
  for (const Countdown& one : countdowns_)
    if (int64_t& left = one.left.data<int64_t>()[0]; left > 0) left -= 1;
}

bool Rule::waits_for_host() const {
  for (size_t i = 0; i < countdowns_.size(); ++i)
    if (due(i)) return true;
  return false;
}

double Rule::status_of(StatusSlot slot) const {
  return status_.at({int64_t(slot)}).item<double>();
}

bool Rule::applies() const {
  return status_of(kApply) != 0;
}

std::pair<double, double> Rule::bias_corrections() const {
  const int first = kBias1 + 2 * args_.rule;
  return {status_of(StatusSlot(first)), status_of(StatusSlot(first + 1))};
}

void Rule::restart_moments(std::initializer_list<Tensor> states) const {
  check(restarts_, name(), ": restart_moments() without restarts() in begin()");
  for (const Tensor& state : states) state.fill(0);
  restart_counts_.at({args_.rule}).copy_from(counts_.at({kSteps}));
}

size_t Rule::restarts_every(const std::string& name, int64_t period) {
  if (period > 0) restarts();
  return every(name, period, period - 1);
}

void Rule::restart_if_due(size_t countdown, std::initializer_list<Tensor> states) const {
  if (!due(countdown) || !applies()) return;
  restart_moments(states);
  done(countdown);
}

Tensor Rule::view(const Tensor& arena, size_t parameter) const {
  check(parameter < members_.size(), name(), ": there is no parameter ", parameter, " of ", members_.size());
  return packing_->view(arena, members_[parameter], range_.first);
}

void Rule::commit(const Tensor& state, const Tensor& value) const {
  check(state.dtype() == value.dtype() && state.count() == value.count() && state.layout().is_packed() &&
            value.layout().is_packed() && state.device() == device() && value.device() == device(),
        name(), ": commit of ", describe(value), " to ", describe(state),
        "; expected packed tensors of one dtype and size on ", device().name());
  if (device().is_cpu()) {
    commit_cpu(state.raw(), value.raw(), state.bytes(), args_.status);
  } else {
    if constexpr (kCuda) commit_cuda(device(), state.raw(), value.raw(), state.bytes(), args_.status);
  }
}

}  // namespace tessera::optim
