#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "runtime/config.h"

struct CUstream_st;  // cudaStream_t is a pointer to it
struct CUevent_st;   // cudaEvent_t likewise

namespace tessera {

class Allocator;
using StreamHandle = CUstream_st*;

enum class DeviceKind : uint8_t { cpu, cuda };

/// What the driver says of a GPU.
struct CardInfo {
  std::string name;
  int major = 0, minor = 0;  // compute capability
  int multiprocessors = 0;
  size_t memory_bytes = 0;
  size_t l2_bytes = 0;
};

/// A place where tensors live and operators run: a handle to an immortal context, cheap to copy. A tensor
/// knows its device and a device its stream, so there is no "current" device or stream. All work of a device
/// is issued, in program order, to its one compute stream; host copies run there too unless they say
/// otherwise.
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
  const CardInfo& card() const;
  Allocator& allocator() const;
  /// The compute stream; null on the CPU. Throws while another thread captures a graph on it.
  StreamHandle stream() const;
  StreamHandle copy_stream() const;  // for copies that overlap the compute stream
  /// Waits until all issued work is done and throws the first error it met. Throws while a graph is being
  /// captured.
  void synchronize() const;
  /// True while a graph is being captured on the compute stream, by any thread.
  bool capturing() const;
  /// Makes this GPU the CUDA runtime's current one for the calling thread; nothing on the CPU.
  void activate() const;

  friend bool operator==(Device a, Device b) { return a.context_ == b.context_; }

 private:
  friend class CaptureSession;
  explicit Device(struct DeviceContext* context) : context_(context) {}
  struct DeviceContext* context_;
};

/// A point in the compute stream of a device, for timing and for ordering between streams. On the CPU it is a
/// wall clock.
class Event {
 public:
  explicit Event(Device device);
  ~Event();
  Event(Event&&) noexcept;
  Event& operator=(Event&&) = delete;
  /// Marks the point after all work issued so far to `stream` (the compute stream by default).
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
