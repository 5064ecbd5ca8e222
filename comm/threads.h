#pragma once

#include <functional>
#include <vector>

#include "comm/communicator.h"

namespace tessera::comm {

/// Communicators of `size` ranks that are threads of this process, one for each: for tests and sanitizers.
/// Messages are copied from the sender's memory into the receiver's.
std::vector<Communicator> thread_communicators(int size);

/// Runs main(communicator) on one thread per rank, and joins them. If a rank throws, or returns before a call
/// that the others make, these fail; the first exception is rethrown.
void run_threads(int size, const std::function<void(Communicator&)>& main);

}  // namespace tessera::comm
