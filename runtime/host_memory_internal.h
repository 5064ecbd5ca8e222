#pragma once

#include "runtime/allocator.h"

namespace tessera {

/// Memory of the host for tensors, in pages. It lends `most` bytes in all and no more, whatever the system
/// would promise: what is promised beyond the machine's memory ends the process, or another one, when it is
/// used.
MemorySource host_memory(size_t most);

/// Bytes of the machine's memory and swap.
size_t machine_memory();

}  // namespace tessera
