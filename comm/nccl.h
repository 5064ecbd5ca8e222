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

/// The communicator of the ranks of `host`, each with a GPU of its own: calls are issued to the compute
/// stream of `device` and may be captured. All ranks call it. `host` carries what they tell each other: the
/// identifier, and, of calls that run or are captured (replays are not checked), what they are, so that
/// different calls are an error before anything is sent. Two ranks add a + b in NCCL; more exchange messages
/// and add in the order of the tree.
///
/// The communicators of NCCL do not block. A rank that fails is noticed through `host`. The end of the last
/// handle, and of the last graph that holds calls, is a call of all ranks, too: it waits for the others as
/// long as their work takes, and then for NCCL at most call_timeout(), after which the standard error says
/// so.
Communicator connect_nccl(const Communicator& host, Device device);

}  // namespace tessera::comm
