#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

struct CUstream_st;  // cudaStream_t is a pointer to it
struct CUevent_st;   // cudaEvent_t likewise

namespace tessera {

class Allocator;
class Fence;
struct MemorySource;
using StreamHandle = CUstream_st*;

enum class DeviceKind : uint8_t { cpu, cuda };

/// Properties of a GPU as the driver reports them.
struct DeviceInfo {
  std::string name;
  int major = 0, minor = 0;  // compute capability
  int multiprocessors = 0;
  size_t memory_bytes = 0;
  size_t l2_bytes = 0;
};

/// A place where tensors live and operators run: a handle to an immortal context, cheap to copy. A tensor
/// has a device and a device has a stream, so there is no "current" device. All work of a device is issued,
/// in program order, to its compute stream, copies from and to the host included; a StreamScope sends a
/// thread's work to another stream.
class Device {
 public:
  static Device cpu();
  /// The GPU with that index. Throws if the build has no CUDA or the machine has no such GPU, and says which.
  static Device cuda(int index = 0);
  /// The first GPU if there is one, else the CPU.
  static Device best();
  /// "cpu", "cuda" or "cuda:1". Throws on anything else.
  static Device parse(std::string_view text);
  /// GPUs this process can use; 0 in a CPU-only build or without a driver.
  static int cuda_count();

  DeviceKind kind() const;
  bool is_cpu() const { return kind() == DeviceKind::cpu; }
  bool is_cuda() const { return kind() == DeviceKind::cuda; }
  int index() const;
  std::string name() const;  // "cpu", "cuda:0"
  const DeviceInfo& info() const;
  /// Properties of the GPU with that index, 0 <= index < cuda_count(), without creating a context on it.
  static DeviceInfo gpu_info(int index);
  /// The number of SMs that kernels are planned for: that of the GPU or of the thread's StreamScope; on the
  /// CPU the number of threads. Results may depend on it, as they depend on the GPU. Kernels also finish if
  /// fewer SMs are free, with the exceptions that docs/design.md lists (blocks or clusters that must all be
  /// co-resident).
  int multiprocessors() const;
  /// For an Allocator that takes memory of this GPU from another program (PyTorch's caching allocator):
  /// `allocate` returns null if there is no memory; `release` may be called by any thread, also while a graph
  /// is being captured.
  MemorySource memory_of_another_program(std::function<void*(size_t)> allocate,
                                         std::function<void(void*)> release) const;
  /// The allocator for new tensors of this thread: the device's, or that of the StreamScope.
  Allocator& allocator() const;
  /// The stream of this thread's work: the compute stream, or that of the StreamScope; null on the CPU.
  /// Throws while another thread captures a graph on it.
  StreamHandle stream() const;
  /// `count` (at most kCounters) counters in GPU memory for synchronisation between the blocks of a
  /// kernel (CUDA only): zero when a kernel starts; it must leave them zero. Kernels on one stream
  /// share them (with programmatic dependent launch they may be used only after grid_dependency_wait);
  /// other streams and graphs have separate ones. A graph keeps the counters that it was captured
  /// with.
  unsigned* counters(int64_t count) const;
  static constexpr int64_t kCounters = 16384;
  /// A fence after all work issued to this thread's stream so far, for Allocator::hold; null while a graph is
  /// being captured there. CUDA.
  std::shared_ptr<const Fence> fence() const;
  /// Waits until all work issued to this thread's stream is done and throws the first error it met. Throws
  /// while a graph is being captured there, and after wait_limit().
  void synchronize() const;
  /// True while a graph is being captured on this thread's stream, by any thread or program.
  bool capturing() const;
  /// Makes this GPU the CUDA runtime's current one for the calling thread; nothing on the CPU.
  void activate() const;

  friend bool operator==(Device a, Device b) { return a.context_ == b.context_; }

 private:
  friend class CaptureSession;
  friend class StreamScope;
  explicit Device(struct DeviceContext* context) : context_(context) {}
  struct DeviceContext* context_;
};

/// A point in a stream of a device, for timing and for ordering between streams. On the CPU it is a wall
/// clock. The host's waits throw after wait_limit().
class Event {
 public:
  explicit Event(Device device);
  ~Event();
  Event(Event&&) noexcept;
  Event& operator=(Event&&) = delete;
  /// Marks the point after all work issued so far to `stream` (this thread's by default).
  void record();
  void record(StreamHandle stream);
  /// Makes `stream` wait for this point, without the host waiting.
  void block(StreamHandle stream) const;
  void wait() const;  // the host waits
  bool done() const;
  /// Milliseconds from `start` to this point; waits for both.
  double milliseconds_since(const Event& start) const;

 private:
  Device device_;
  CUevent_st* event_ = nullptr;
  double seconds_ = 0;
};

}  // namespace tessera
