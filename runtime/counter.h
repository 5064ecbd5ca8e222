#pragma once

#include <cstdint>
#include <optional>

#include "runtime/device.h"

namespace tessera {

/// A 64-bit counter in GPU memory with the host's knowledge of its value: what lets a captured graph advance
/// by itself.
class DeviceCounter {
 public:
  explicit DeviceCounter(Device device);
  ~DeviceCounter();
  DeviceCounter(const DeviceCounter&) = delete;

  Device device() const { return device_; }
  const uint64_t* data() const { return data_; }
  /// Uploads the value in stream order, unless the counter is known to hold it.
  void set(uint64_t value);
  /// Issues the addition on the compute stream (a kernel: it may be captured).
  void advance(uint64_t step);
  /// Tells the host's side that a launched graph added `step`.
  void advanced(uint64_t step) { *known_ += step; }

 private:
  Device device_;
  uint64_t* data_ = nullptr;
  std::optional<uint64_t> known_;
};

}  // namespace tessera
