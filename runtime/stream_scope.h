#pragma once

#include <memory>
#include <unordered_set>
#include <vector>

#include "runtime/allocator.h"
#include "runtime/device.h"

namespace tessera {

/// Resources of another program that a StreamScope uses in addition to its stream.
struct StreamOptions {
  /// The allocator for new tensors; null: the device's own allocator, whose blocks then belong to the stream.
  /// It outlives all tensors made from it. Device::memory_of_another_program makes one.
  Allocator* allocator = nullptr;
  int multiprocessors = 0;  // for which kernels plan on this stream; 0: all of the GPU's
};

/// While it lives, operators that this thread runs on `device` are issued to `stream`, which may belong to
/// another program in this process (PyTorch's current stream, the null stream), and may be one that this
/// program is capturing into a graph. Scopes nest, and end in the order opposite to that of their creation;
/// other threads go on as before. The thread's current GPU, in the sense of cudaSetDevice, is afterwards what
/// it was before.
///
/// Memory. A tensor that was allocated for another stream may be used in the scope: its memory is not used
/// for anything else before the scope's work is done. That the work which wrote it comes before the scope's
/// work is the caller's business (Event::block), as is the opposite for what the scope wrote. While another
/// program captures a graph, its allocator must be given, which keeps memory for the graph, and the caller
/// keeps the tensors that the graph reads.
///
/// CUDA only. Throws if the device is the CPU.
class StreamScope {
 public:
  StreamScope(Device device, StreamHandle stream, StreamOptions options = {});
  ~StreamScope();
  StreamScope(const StreamScope&) = delete;

  /// The innermost scope of this thread on that device, or null.
  static StreamScope* current(Device device);
  StreamHandle stream() const { return stream_; }
  /// Whether a graph is being captured on the stream, by another program or as a branch of ours, other than
  /// as the stream that we capture.
  bool foreign_capture() const;
  /// `owner` owns `block`, which belongs to another stream and which the scope's work uses.
  void uses(Allocator& allocator, MemoryBlock* block, std::shared_ptr<const void> owner);

 private:
  friend class Device;
  struct Used {
    Allocator* allocator;
    MemoryBlock* block;
    std::shared_ptr<const void> owner;
  };
  /// The thread's current GPU, which it restores.
  class CurrentGpu {
   public:
    CurrentGpu();
    ~CurrentGpu();
    CurrentGpu(const CurrentGpu&) = delete;

   private:
    [[maybe_unused]] int index_ = -1;
  };
  uint64_t number_of_streams() const;

  Device device_;
  StreamHandle stream_;
  StreamOptions options_;
  CurrentGpu before_;
  uint64_t id_;
  StreamOfThread mark_;
  StreamScope* outer_;
  std::vector<Used> used_;
  std::unordered_set<const MemoryBlock*> used_blocks_;
  unsigned* counters_ = nullptr;  // on loan from the device, once asked for
};

/// The work that this thread issues next uses `block` of `device`, which `owner` owns. Tensor calls it for
/// blocks of other streams.
void use_block(Device device, Allocator& allocator, MemoryBlock* block,
               const std::shared_ptr<const void>& owner);

}  // namespace tessera
