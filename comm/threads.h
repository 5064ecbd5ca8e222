#pragma once

#include <functional>
#include <vector>

#include "comm/communicator.h"

namespace tessera::comm {

/// Communicators of `size` ranks that are threads of this process, one for each: for tests and sanitizers.
/// Messages are copied from the sender's memory into the receiver's.
std::vector<Communicator> thread_communicators(int size);

/// Runs main(communicator) on a thread for each rank, and waits for all. A rank that throws fails the others;
/// then throws what the first one threw.
void run_threads(int size, const std::function<void(Communicator&)>& main);

}  // namespace tessera::comm
