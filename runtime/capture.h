#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "runtime/device.h"

namespace tessera {

/// A piece of work that becomes one CUDA graph: the first call runs it eagerly (a real step: it fills caches
/// and creates lazily made state), the second captures it and launches the graph, later calls replay the
/// graph with one launch.
///
///   Captured step(device, [&] { Tape tape; Tensor loss = ...; tape.backward(loss); optimizer.step(); });
///   for (...) { inputs.copy_from(batch); step(); }
///
/// What changes from step to step must live on the device (inputs in fixed tensors, learning rate, random
/// offset): the host code does not run again. During capture, reading a value to the host, synchronising, and
/// allocating outside the graph's pool throw and say why; the stream is usable afterwards. On the CPU every
/// call runs the body.
class Captured {
 public:
  Captured(Device device, std::function<void()> body);
  ~Captured();
  Captured(Captured&&) noexcept;
  void operator()();
  /// True once calls replay a graph.
  bool is_graph() const;
  size_t nodes() const;  // of the graph; 0 before capture
  /// Forgets the graph: the next call runs eagerly, the one after it captures anew.
  void reset();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// What somebody with device-resident state adds to a graph being captured.
struct CaptureHook {
  const void* key;                      // a second hook with the same key is ignored
  std::function<void()> before_launch;  // on the host, before each launch
  std::function<void()> capture_end;    // issues the last captured work
  std::function<void()> after_launch;   // on the host, after each launch
  std::function<void()> failed;         // the captured body threw: undo what it did on the host
};

/// The capture under way on this thread, for the few who must know.
class CaptureSession {
 public:
  explicit CaptureSession(Device device);
  ~CaptureSession();
  CaptureSession(const CaptureSession&) = delete;
  static CaptureSession* current();
  Device device() const { return device_; }
  /// False if a hook with that key is there already.
  bool add(CaptureHook hook);

 private:
  friend class Captured;
  Device device_;
  std::vector<CaptureHook> hooks_;
};

}  // namespace tessera
