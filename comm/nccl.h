#pragma once

#include <string>

#include "comm/communicator.h"

namespace tessera::comm {

/// Why this process cannot use NCCL, and what to do: "" if it can. The library (libnccl.so.2) is loaded at
/// run time, so that one program serves machines with and without it; the build needs its header.
std::string nccl_lacks();
/// "2.28.9"; "" if it cannot be used. NVLink multicast stays off: NCCL_NVLS_ENABLE=0 is set in this process
/// before the library is loaded, whichever launcher started it.
std::string nccl_version();
/// "GPU-1b2c3d4e-...", as nvidia-smi -L lists it; "" for the CPU.
std::string gpu_uuid(Device device);

/// A communicator over the ranks of `host`, each with its own GPU: calls are issued to the compute stream of
/// `device` and can be captured. All ranks call it. `host` carries the unique id. Two ranks sum with
/// ncclAllReduce; more exchange messages and sum by the tree.
///
/// Calls are compared with those of the other ranks (CallCheck of `host`), not send and receive, nor calls of
/// communicators made by split(). A call of a new kind or shape is compared before it is issued, and so is
/// one that is captured (replays are not compared); any other is issued at once and compared afterwards.
/// Where calls differ, or a rank fails, the communicator is aborted, so that no kernel waits for ever, and
/// the next call throws, as does from then on every wait of the host for a GPU (Device::synchronize,
/// Event::wait): what the GPU holds is undefined, and nothing of it is read or saved. A mismatch of the last
/// calls that is found when the communicator is destroyed is printed to stderr.
///
/// barrier() of a communicator made by split() is a message to the first of its ranks and back, on the host.
/// Of one rank it is the communicator that only copies.
///
/// Destroying the last handle, and the last graph that holds calls, is collective: it waits for the other
/// ranks without timeout, then for NCCL at most call_timeout(); after that it prints an error to stderr.
Communicator connect_nccl(const Communicator& host, Device device);

}  // namespace tessera::comm
