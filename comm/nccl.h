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

/// A communicator over the ranks of `host`, each with its own GPU: calls are issued to the compute stream of
/// `device` and can be captured. All ranks call it. `host` carries the unique id and, before a call is issued
/// or captured (not at replays), its description, so that mismatched calls throw before anything is sent; not
/// for send and receive, nor for communicators made by split(). Two ranks sum with ncclAllReduce; more
/// exchange messages and sum by the tree.
///
/// NCCL runs in nonblocking mode. A rank that fails is noticed through `host`. Destroying the
/// last handle, and the last graph that holds calls, is collective: it waits for the other ranks
/// without timeout, then for NCCL at most call_timeout(); after that it prints an error to
/// stderr.
Communicator connect_nccl(const Communicator& host, Device device);

}  // namespace tessera::comm
