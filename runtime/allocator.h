#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "runtime/override.h"

/// A caching allocator: memory from the driver is kept and reused, so that a training loop makes no driver
/// calls after its second step.
///
/// Reuse is ordered by a stream: a block belongs to the stream that its thread issued work to when it was
/// allocated, and once freed returns to the free blocks of that stream only. It may be handed out again at
/// once, since stream order guarantees that the new owner's work runs after the old owner's. A block that
/// another stream used is handed out again only after that work (`hold`, `crosses`). Requests up to 1 MiB
/// come from size classes (four to a doubling) carved from 2 MiB segments; larger ones are the best fit among
/// free blocks, split and merged with their neighbours.

namespace tessera {

/// Names the purpose of memory: every block that this thread allocates during the lifetime of the scope
/// carries the tag. The innermost scope wins.
class MemoryTag {
 public:
  explicit MemoryTag(const char* name) : scope_(current_, name) {}  // a literal: the pointer is kept
  static const char* current() { return current_; }

 private:
  static inline constinit thread_local const char* current_ = "other";
  Override<const char*> scope_;
};

/// The stream that this thread issues work to, as allocators identify it: 0 is a device's own compute
/// stream; any other number always means the same stream. Nested scopes override. Used by StreamScope.
class StreamOfThread {
 public:
  explicit StreamOfThread(uint64_t id) : scope_(current_, id) {}
  static uint64_t current() { return current_; }

 private:
  static inline constinit thread_local uint64_t current_ = 0;
  Override<uint64_t> scope_;
};

struct AllocatorStats {
  size_t allocated = 0, allocated_peak = 0;            // bytes held by live blocks
  size_t reserved = 0, reserved_peak = 0;              // bytes held from the driver
  uint64_t requests = 0;                               // calls of allocate()
  uint64_t driver_calls = 0;                           // requests that needed the driver
  std::vector<std::pair<std::string, size_t>> by_tag;  // live bytes of each tag, largest first
};

class MemoryPool;

/// A point in asynchronous work, such as a copy from page-locked memory. Thread-safe. done() is also true
/// after a device error, which is reported where the device is used next.
class Fence {
 public:
  virtual ~Fence() = default;
  virtual bool done() const noexcept = 0;
};

/// A piece of memory handed out by an Allocator. `data` is aligned to 256 bytes.
struct MemoryBlock {
  void* data = nullptr;
  size_t bytes = 0;  // usable size, at least the requested size
  // The other members belong to the allocator.
  size_t asked = 0;
  size_t guard = 0;                   // bytes of each guard band; `data` points after the first
  struct Segment* segment = nullptr;  // that it was carved from
  MemoryBlock* previous = nullptr;    // neighbours in the segment (large blocks)
  MemoryBlock* next = nullptr;
  int size_class = -1;  // -1: a large block
  bool is_free = false;
  bool crosses = false;  // see Allocator::crosses
  uint64_t stream = 0;   // the stream it belongs to: see StreamOfThread
  const char* tag = nullptr;
};

/// Where an allocator gets memory from: cudaMalloc, aligned host memory, or a test's own.
struct MemorySource {
  std::string name;                       // "cpu", "cuda:0"
  std::function<void*(size_t)> allocate;  // null if there is no memory
  std::function<void(void*)> release;
  std::function<std::pair<size_t, size_t>()> usage;      // {free, total} bytes of the device
  std::function<void(void*, int, size_t)> fill;          // memset in stream order, for the debug mode
  std::function<void(void*, const void*, size_t)> read;  // device to host, synchronous, for the debug mode
  /// A fence after the work issued to the device's own stream; null while a graph is being captured there.
  /// Without it streams order nothing (host memory), and all blocks belong to stream 0.
  std::function<std::shared_ptr<const Fence>()> mark = {};
  /// False: `allocate` and `release` are another program's allocator, which caches and handles streams
  /// itself. Each block is requested and released individually; there are no pools for captured graphs.
  bool caches = true;
};

/// A block that was allocated while a pool was active and was still in use when the pool became inactive.
struct KeptBlock {
  const MemoryBlock* block = nullptr;
  void* data = nullptr;
  size_t bytes = 0;  // requested
};

class Allocator {
 public:
  explicit Allocator(MemorySource source);
  ~Allocator();
  Allocator(const Allocator&) = delete;

  /// At least `bytes` bytes (0 gives an empty block). Throws OutOfMemory, leaving live blocks as they were,
  /// after it has returned cached memory to the driver and tried once more (not for a graph's pool, whose
  /// free blocks may be written by the graph).
  MemoryBlock* allocate(size_t bytes);
  void free(MemoryBlock* block) noexcept;
  /// Work on `stream` uses the block until `fence`: once freed, the block is reused only after that. A later
  /// fence for the same stream replaces the earlier one. Needed where stream order does not protect the
  /// block: host memory, and memory used on a stream other than its own. (PyTorch: record_stream.)
  void hold(MemoryBlock* block, const void* stream, std::shared_ptr<const Fence> fence);
  /// The device's own stream uses this block, which belongs to another stream: once freed, it is reused only
  /// after the work issued to the device's own stream until then.
  void crosses(MemoryBlock* block);

  AllocatorStats stats() const;
  /// {free, total} bytes of the device.
  std::pair<size_t, size_t> usage() const;
  void reset_peaks();
  /// Returns unused segments to the driver.
  void release_cached();

  /// A separate pool for captured graphs: while it is active, the blocks of the thread that activated it
  /// come only from it, so that memory that a replay writes is never used outside the graphs. Other
  /// threads keep getting theirs from the common pool. The pool lives until the handle and all its blocks are
  /// destroyed.
  std::shared_ptr<MemoryPool> make_pool();
  /// For the calling thread; null: back to the common pool. Throws if another thread's pool is active.
  void activate_pool(std::shared_ptr<MemoryPool> pool);
  /// The pool's blocks that are in use and that no earlier call returned, in the order of their allocation.
  /// The pool does not hand out their memory again, even after they are freed: a replay writes results there.
  std::vector<KeptBlock> keep(const std::shared_ptr<MemoryPool>& pool);
  /// Whether a block that keep() returned is still in use. The pool must live.
  bool in_use(const KeptBlock& kept) const;

  /// Debug mode: blocks allocated from now on are filled with 0xFF (NaN in every floating dtype) and enclosed
  /// in two guard bands of at least `bytes` (a multiple of 256) of 0xFF, which free() and check_guards()
  /// verify. Only blocks of the device's own stream. 0 turns it off.
  void set_guard(size_t bytes);
  /// Throws if a guard band of a live block, or of one freed since the last call, was overwritten; names size
  /// and tag.
  void check_guards();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tessera
