#include "runtime/rng.h"

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

namespace {

thread_local RandomReplay* t_replay = nullptr;

void check_there(const void* shared) {
  check(shared != nullptr,
        "Rng: this generator was moved from; a dropout refers to the generator that it was made with, which "
        "must stay where it is: keep it outside of a model that is moved");
}

}  // namespace

RandomReplay::RandomReplay(Mode mode, std::vector<RandomStream>& log)
    : mode_(mode), log_(log), outer_(t_replay) {
  t_replay = this;
}

RandomReplay::~RandomReplay() {
  t_replay = outer_;
}

Rng::Rng(uint64_t seed) : shared_(std::make_shared<Shared>()) {
  shared_->seed = seed;
}

RandomStream Rng::reserve(Device device) {
  // The innermost replay decides; every recording scope around it notes what was drawn.
  RandomReplay* scope = t_replay;
  while (scope && scope->mode_ == RandomReplay::Mode::record) scope = scope->outer_;
  if (scope) {
    check(scope->next_ < scope->log_.size(),
          "Rng: the recomputation draws more random streams than the forward pass did; a "
          "checkpointed function must do the same each time");
  }
  const RandomStream stream = scope ? scope->log_[scope->next_++] : draw(device);
  for (RandomReplay* noting = t_replay; noting && noting != scope; noting = noting->outer_)
    noting->log_.push_back(stream);
  return stream;
}

RandomStream Rng::draw(Device device) {
  check_there(shared_.get());
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
  check_there(shared_.get());
  return {shared_->seed, shared_->offset};
}

void Rng::set_state(State state) {
  check_there(shared_.get());
  shared_->seed = state.seed;
  shared_->offset = state.offset;
}

}  // namespace tessera
