#pragma once

#include <deque>
#include <utility>
#include <vector>

#include "runtime/device.h"

namespace tessera::train {

/// Seconds that the device spent on loads: from the end of the previous work until the batch is there. In
/// them it waited for the host, copied, or drew tasks. Measured by events on the compute stream (on the CPU
/// by its clock), so that host work does not count while the device still has work. `Mark` is Event, except
/// in tests.
template <class Mark = Event>
class DataWait {
 public:
  explicit DataWait(Device device) : device_(device) {}

  /// Calls load(), which issues work, between two marks; never waits for the device.
  template <class Load>
  void around(Load&& load) {
    if (spare_.empty()) spare_.emplace_back(Mark(device_), Mark(device_));
    std::pair<Mark, Mark> marks = std::move(spare_.back());
    spare_.pop_back();
    marks.first.record();
    load();
    marks.second.record();
    pending_.push_back(std::move(marks));
    while (!pending_.empty() && pending_.front().second.done()) collect();
  }

  /// Of all loads since the last call; waits for them.
  double take() {
    while (!pending_.empty()) collect();
    return std::exchange(seconds_, 0.0);
  }

 private:
  void collect() {
    seconds_ += pending_.front().second.milliseconds_since(pending_.front().first) * 1e-3;
    spare_.push_back(std::move(pending_.front()));
    pending_.pop_front();
  }

  Device device_;
  double seconds_ = 0;
  std::deque<std::pair<Mark, Mark>> pending_;  // in stream order
  std::vector<std::pair<Mark, Mark>> spare_;
};

}  // namespace tessera::train
