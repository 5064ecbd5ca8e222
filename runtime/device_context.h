#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "runtime/allocator.h"
#include "runtime/device.h"

namespace tessera {

/// Counters (Device::counters) that no stream uses now, and those of captures in progress. They
/// are zero: each kernel resets what it uses, and a kernel that is aborted takes down the CUDA
/// context.
struct CounterPool {
  struct Free {
    unsigned* counters;
    std::shared_ptr<const Fence> last_use;  // null: done
  };
  struct Captured {
    unsigned long long id;  // of the capture; its graph owns them
    StreamHandle stream;
    unsigned* counters;
  };
  std::mutex mutex;  // not held in calls of CUDA, which takes it where it ends a graph
  std::vector<Free> free;
  std::vector<Captured> captured;
};

/// The state that a Device points to. Never destroyed: tensors in static storage may outlive main().
struct DeviceContext {
  DeviceKind kind = DeviceKind::cpu;
  int index = 0;
  std::string name;
  DeviceInfo info;
  StreamHandle stream = nullptr;
  std::atomic<bool> capturing = false;           // by the thread that has the CaptureSession
  std::atomic<StreamHandle> captured = nullptr;  // the stream that it captures
  std::unique_ptr<Allocator> allocator;
  std::atomic<unsigned*> counters = nullptr;  // of the compute stream, once asked for
  CounterPool counter_pool;
};

}  // namespace tessera
