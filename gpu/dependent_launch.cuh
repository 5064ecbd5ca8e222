#pragma once

#include "gpu/barrier.cuh"
#include "gpu/launch.cuh"

/// Chains of kernels by programmatic dependent launch (PTX ISA: "griddepcontrol"): the blocks of a kernel
/// that is launched with `launch_dependent` may begin while earlier kernels of the stream still run, so its
/// launch and its prologue hide behind their last blocks. In a graph the edge between two such kernels stays
/// programmatic; one from or to a copy or a fill by the driver is an ordinary edge, so nothing overlaps
/// there.
///
/// The rule. A dependent kernel calls `wait_and_launch_dependents` (or `grid_dependency_wait`) in every
/// thread that goes on to touch global memory, before it does so: before it reads what earlier kernels wrote,
/// and before it writes what they may still read, which the allocator makes common (it hands memory of a
/// freed tensor to the next one in stream order). Ahead of it are allowed: shared memory, barriers,
/// parameters, prefetches of tensor maps, arithmetic. Weights are not constants, since an optimizer may just
/// have written them; compressed weights are, where their owner waited for that
/// (ops::SparseWeight::constant).
///
/// Why this is enough. griddepcontrol.wait returns when the kernel before has ended and its writes are
/// visible. That kernel ended only after its own wait returned, so all before it have ended too: the chain is
/// transitive as long as no dependent kernel ends without a thread that waited. Hence no dependent kernel
/// returns ahead of `wait_and_launch_dependents` in all its threads, whatever the arguments, and threads may
/// leave early once they waited. A kernel launched without the attribute waits for everything, as ever.
///
/// When the next kernel may start (griddepcontrol.launch_dependents) is only a hint: it orders no memory
/// accesses. Here it is given right after the wait; the kernels of attention give it at once, so that the
/// blocks of several kernels may be waiting. Waiting blocks occupy what the last wave of running blocks
/// leaves free.

namespace tessera::gpu {

/// Launches a kernel that follows the rule above. An ordinary launch on GPUs below compute capability 9.0.
template <class... Params, class... Args>
void launch_dependent(Device device, LaunchShape shape, void (*kernel)(Params...), Args&&... args) {
  shape.overlaps = device.info().major >= 9;
  launch(device, shape, kernel, std::forward<Args>(args)...);
}

/// The first statement of a dependent kernel that prepares nothing: waits for all earlier kernels of the
/// stream, then lets the next one's blocks start. Does nothing in a kernel that was launched by `launch`.
__device__ __forceinline__ void wait_and_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  grid_dependency_wait();
  launch_dependents();
#endif
}

}  // namespace tessera::gpu
