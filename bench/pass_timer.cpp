#include "bench/pass_timer.h"

#include <algorithm>
#include <cmath>

#include "autograd/on_record.h"
#include "bench/cold.h"
#include "bench/timer.h"
#include "runtime/call_site.h"
#include "runtime/has_cuda.h"

namespace tessera::bench {

PassTimer::PassTimer(Device device) : device_(device), flush_(make_flush(device)) {}

Event& PassTimer::mark() {
  if (used_ == events_.size()) events_.emplace_back(device_);
  Event& event = events_[used_++];
  event.record();
  return event;
}

/// Each call of make_cold_cuda lasts a tenth of a millisecond and more. A host that shares its cores may take
/// half as long again as it did before.
void PassTimer::hold_device() const {
  if constexpr (kCuda)
    if (flush_.defined())
      for (int i = 0; i <= int(std::ceil(host_ms_ * 1.5 / 0.1)); ++i) make_cold_cuda(flush_);
}

PassTimes PassTimer::operator()(const std::function<Tensor()>& loss) {
  device_.synchronize();
  used_ = 0;
  Event host_begin(Device::cpu()), host_end(Device::cpu());
  PassTimes times;
  hold_device();
  host_begin.record();
  mark();
  {
    Tape tape;
    std::optional<OnRecord> forward(std::in_place, [&](const char* op, size_t index) {
      const char* const layer = CallScope::current().module;
      times.forward.push_back(
          {.op = op, .layer = layer ? layer : "", .entry = index, .begin_ms = 0, .ms = 0});
      mark();
    });
    const Tensor value = loss();
    forward.reset();
    check(!times.forward.empty(), "pass timer: the loss records no operator");
    tape.on_entry([&](const char* op, size_t index) {
      const char* const layer = index < times.forward.size() ? times.forward[index].layer : "";
      times.backward.push_back({.op = op, .layer = layer, .entry = index, .begin_ms = 0, .ms = 0});
      mark();
    });
    tape.backward(value);
  }
  host_end.record();
  const Event& begin = events_[0];
  double before = 0;
  size_t next = 1;
  for (std::vector<TimedOp>* ops : {&times.forward, &times.backward})
    for (TimedOp& op : *ops) {
      const double end = events_[next++].milliseconds_since(begin);
      op.begin_ms = before, op.ms = std::max(0.0, end - before);
      before = std::max(before, end);
    }
  if (flush_.defined()) host_ms_ = host_end.milliseconds_since(host_begin);
  return times;
}

}  // namespace tessera::bench
