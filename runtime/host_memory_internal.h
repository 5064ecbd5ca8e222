#pragma once

#include "runtime/allocator.h"

namespace tessera {

/// Memory of the host for tensors, in pages. It lends no more bytes in all than `most` says when it is asked,
/// whatever the system would promise: what is promised beyond the machine's memory ends the process, or
/// another one, when it is used.
MemorySource host_memory(std::function<size_t()> most);

/// Bytes that this process could have in all: what it has, and what is available to it (memory and swap).
size_t memory_within_reach();

}  // namespace tessera
