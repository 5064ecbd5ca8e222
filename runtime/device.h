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

/// What the driver says of a GPU.
struct DeviceInfo {
  std::string name;
  int major = 0, minor = 0;  // compute capability
  int multiprocessors = 0;
  size_t memory_bytes = 0;
  size_t l2_bytes = 0;
};

/// A place where tensors live and operators run: a handle to an immortal context, cheap to copy. A tensor
/// knows its device and a device its stream, so there is no "current" device. All work of a device is issued,
/// in program order, to its compute stream, host copies too; a StreamScope sends a thread's work elsewhere.
class Device {
 public:
  static Device cpu();
  /// The GPU of that index. Throws if the build has no CUDA or the machine no such GPU, and says which of the
  /// two.
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
  /// What the driver says of the GPU of that index, 0 <= index < cuda_count(), without creating a context
  /// there.
  static DeviceInfo gpu_info(int index);
  /// How many SMs kernels plan for, and the only number that they plan by: those of the GPU, or what the
  /// thread's StreamScope says. On the CPU, its threads. Results may depend on it, as they do on the GPU.
  /// Kernels finish however few of these SMs are free, except ops::decoder_layers, whose blocks must all run
  /// at once.
  int multiprocessors() const;
  /// For an Allocator that takes memory of this GPU from another program (PyTorch's caching allocator):
  /// `allocate` gives null if there is none; `release` may be called by any thread, also while a graph is
  /// being captured.
  MemorySource memory_of_another_program(std::function<void*(size_t)> allocate,
                                         std::function<void(void*)> release) const;
  /// What new tensors of this thread come from: the device's allocator, or that of the StreamScope.
  Allocator& allocator() const;
  /// The stream of this thread's work: the compute stream, or that of the StreamScope; null on the CPU.
  /// Throws while another thread captures a graph on it.
  StreamHandle stream() const;
  /// `count` counters in GPU memory by which the blocks of a kernel meet, on CUDA: zero when the kernel that
  /// is launched next starts, which leaves them zero. Kernels of one stream follow each other and share them
  /// (launches that may overlap touch them only after grid_dependency_wait); kernels on different streams,
  /// and graphs, have others. A graph keeps those that it was captured with. At most kCounters.
  unsigned* counters(int64_t count) const;
  static constexpr int64_t kCounters = 16384;
  /// The end of what this thread's stream has been given so far, for Allocator::hold; null while a graph is
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
