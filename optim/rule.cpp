#include "optim/rule.h"

#include <algorithm>

namespace tessera::optim {

size_t Rule::bytes() const {
  size_t bytes = 0;
  for (const Tensor& tensor : memory_) bytes += tensor.bytes();
  return bytes;
}

Tensor Rule::scratch_arena() {
  memory_.push_back(Tensor::zeros({range_.elements}, compute_dtype(), device()));
  return memory_.back();
}

Tensor Rule::arena(const char* state) {
  const Tensor made = scratch_arena();
  // By the order of the model, whatever that of the arenas: checkpoints list names in that order.
  std::vector<size_t> order(members_.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return members_[a] < members_[b]; });
  for (const size_t i : order)
    saved_.push_back({std::string(state) + "." + parameters_[i].name, view(made, i)});
  return made;
}

void Rule::keep(const std::string& name, const Tensor& state) {
  memory_.push_back(state);
  saved_.push_back({name, state});
}

Tensor Rule::view(const Tensor& arena, size_t parameter) const {
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
