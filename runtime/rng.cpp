#include "runtime/rng.h"

#include <algorithm>

#include "runtime/capture.h"
#include "runtime/counter.h"
#include "runtime/error.h"
#include "runtime/has_cuda.h"

namespace tessera {

struct Rng::Shared {
  uint64_t seed = 0;
  uint64_t offset = 0;         // streams reserved, replays included
  uint64_t capture_begin = 0;  // offset when the capture in progress first drew
  // The GPU's copy, made when first captured. shared_ptr: a build without CUDA has no destructor to link.
  std::shared_ptr<DeviceCounter> counter;
};

Rng::Rng(uint64_t seed) : shared_(std::make_shared<Shared>()) {
  shared_->seed = seed;
}

RandomStream Rng::reserve(Device device) const {
  return RandomReplay::next(
      "Rng: the recomputation draws more random streams than the forward pass did; a checkpointed function "
      "must do the same each time",
      [&] { return draw(device); });
}

RandomStream Rng::draw(Device device) const {
  if (DrawnSources* const noting = DrawnSources::innermost_) {
    const auto is_same = [&](const auto& source) { return source.lock() == shared_; };
    if (std::ranges::none_of(noting->sources_, is_same)) noting->sources_.push_back(shared_);
  }
  Shared& shared = *shared_;
  CaptureSession* const session = CaptureSession::current();
  if constexpr (kCuda) {
    if (session && device == session->device()) {
      if (!shared.counter) shared.counter = std::make_shared<DeviceCounter>(device);
      check(shared.counter->device() == device, "Rng: captured on ", device.name(),
            " but its counter lives on ", shared.counter->device().name(), "; use one Rng per device");
      auto drawn = std::make_shared<uint64_t>(0);  // streams that one launch of the graph draws
      const bool first =
          session->add({.key = &shared,
                        .before_launch = [state = shared_] { state->counter->set(state->offset); },
                        .capture_end =
                            [state = shared_, drawn] {
                              *drawn = state->offset - state->capture_begin;
                              state->offset = state->capture_begin;  // only launches draw
                              state->counter->advance(*drawn);
                            },
                        .after_launch =
                            [state = shared_, drawn] {
                              state->offset += *drawn;
                              state->counter->advanced(*drawn);
                            },
                        .failed = [state = shared_] { state->offset = state->capture_begin; }});
      if (first) shared.capture_begin = shared.offset;
      return {shared.seed, shared.counter->data(), shared.offset++ - shared.capture_begin};
    }
  }
  return {shared.seed, nullptr, shared.offset++};
}

Rng::State Rng::state() const {
  return {shared_->seed, shared_->offset};
}

void Rng::set_state(State state) const {
  shared_->seed = state.seed;
  shared_->offset = state.offset;
}

// Not inline, as that of NoTape.
DrawnSources::DrawnSources() = default;

std::vector<Rng> DrawnSources::all() const {
  std::vector<Rng> left;
  for (const auto& source : sources_)
    if (auto shared = source.lock()) left.push_back(Rng(std::move(shared)));
  return left;
}

}  // namespace tessera
