#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "runtime/device.h"
#include "runtime/override.h"

namespace tessera {

class GraphRecorder;

/// A function that becomes a CUDA graph: the first call runs it eagerly (a real step, which fills caches and
/// creates lazily made state), the second captures it and launches the graph, later calls replay the graph
/// with one launch.
///
/// ```cpp
/// Captured step(device, [&] {  // a whole step
///   Tape tape;
///   tape.backward(loss_of(inputs));
///   optimizer.step();
///   optimizer.zero_grad();
/// });
/// for (int64_t i = 0; i < steps; ++i) {
///   inputs.copy_from(batch);
///   step();
/// }
/// ```
/// A body of forward and backward alone adds its gradients up, call by call, until zero_grad().
///
/// Everything that changes from step to step must be on the device (inputs in fixed tensors,
/// learning rate, random offset): host code does not run again. Gradients behave as if the body
/// ran at each call: where a replay would do something else (overwrite a gradient that the body
/// would add to, or write to a buffer that was replaced), the body is captured once more into
/// another graph. At most 8 graphs are kept, in one memory pool. A tensor that the body leaves in
/// a handle outside (a loss, a retained gradient) holds the result of the last call, whichever
/// graph ran.
///
/// During capture, reading a value to the host, synchronising, and allocating outside the graph's pool throw
/// and say why. A capture that throws leaves random offsets and the gradients of all leaves as they were, and
/// the stream usable. The effects of a body that throws while it runs eagerly remain, as in a plain call. On
/// the CPU every call runs the body.
class Captured {
 public:
  Captured(Device device, std::function<void()> body);
  /// With another recorder, for devices that have none; tests use it.
  Captured(Device device, std::function<void()> body, std::unique_ptr<GraphRecorder> recorder);
  ~Captured();
  Captured(Captured&&) noexcept;
  void operator()();
  /// True once calls replay a graph.
  bool is_graph() const;
  size_t graphs() const;  // how many are kept
  size_t nodes() const;   // of the graph that was launched last; 0 before capture
  /// Forgets the graphs: the next call runs eagerly, the one after it captures again.
  void reset();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// For the lifetime of the scope, every call of a Captured on this thread drops its graphs (Captured::reset)
/// and runs the body eagerly: for host code in the body that must run each time. The first call after its end
/// captures again.
class EagerScope {
 public:
  static bool active() { return active_; }

 private:
  static inline constinit thread_local bool active_ = false;
  Override<bool> scope_{active_, true};
};

/// Callbacks by which the owner of state outside the graph takes part in a capture. Any function may be
/// empty.
struct CaptureHook {
  const void* key;                           // a second hook with the same key is ignored
  std::function<void()> before_launch = {};  // on the host, before each launch
  std::function<void()> capture_end = {};    // issues the last captured work
  std::function<void()> after_launch = {};   // on the host, after each launch
  std::function<void()> failed = {};         // the capture threw: undo what the body did on the host
  std::function<bool()> still_matches = {};  // would the body do now what the graph does?
};

/// The capture in progress on this thread. Throws if there is one already, here or on the device.
class CaptureSession {
 public:
  explicit CaptureSession(Device device);
  ~CaptureSession();
  CaptureSession(const CaptureSession&) = delete;
  static CaptureSession* current();
  Device device() const { return device_; }
  /// False if a hook with that key is there already.
  bool add(CaptureHook hook);
  /// Keeps `thing` alive as long as the graph: memory that the graph reads or writes.
  void keep(std::shared_ptr<const void> thing);
  /// State of the owner of `key` during this capture; null until the owner sets it.
  std::shared_ptr<void>& state(const void* key) { return states_[key]; }

 private:
  friend class Captured;
  Device device_;
  std::vector<CaptureHook> hooks_;
  std::vector<std::shared_ptr<const void>> kept_;
  std::map<const void*, std::shared_ptr<void>> states_;
};

}  // namespace tessera
