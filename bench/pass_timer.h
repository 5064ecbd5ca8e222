#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "autograd/tape.h"
#include "tensor/tensor.h"

namespace tessera::bench {

/// An operator of a pass, forward or backward: the work between the end of the operator before it and its
/// own.
struct TimedOp {
  const char* op;       // as the tape names it: "linear"
  const char* layer;    // that called it (CallScope), "blocks.3.mlp"; "" where no layer is known
  size_t entry;         // its entry on the tape
  double begin_ms, ms;  // since the beginning of the forward pass
};

struct PassTimes {
  std::vector<TimedOp> forward, backward;  // in the order in which they ran
};

/// Times every operator of a forward and a backward pass where it runs: on a GPU by events on the stream, on
/// the CPU by the clock. The times of all operators add up to the pass. Work that no tape records (copies,
/// views, the choice of rows) counts as part of the operator that is recorded next.
///
/// On a GPU the passes wait until the host has issued them, as in a queue that is full (bench/cold.h), so
/// that the time of launches does not count: the first call learns how long the host takes.
class PassTimer {
 public:
  explicit PassTimer(Device device);
  PassTimer(const PassTimer&) = delete;
  /// `loss` is recorded on a tape of its own, which then runs backward. Waits for the device.
  PassTimes operator()(const std::function<Tensor()>& loss);

 private:
  Event& mark();
  void hold_device() const;

  Device device_;
  Tensor flush_;               // read to hold a GPU; undefined on the CPU
  double host_ms_ = 0;         // that the host took to issue a pass
  std::vector<Event> events_;  // used again by each pass
  size_t used_ = 0;
};

}  // namespace tessera::bench
