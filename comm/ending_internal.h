#pragma once

#include <functional>

#include "comm/communicator.h"

/// For destructors of resources that all ranks share and must release together.

namespace tessera::comm {

/// Barrier without timeout: returns true once all ranks of `host` have called it. Returns false without
/// waiting if the stack is being unwound by an exception (the other ranks are told so) or a rank has
/// failed.
bool all_end(const Communicator& host) noexcept;

/// Calls f, which must not throw, on another thread. Returns true once f has returned, false if it has not
/// within call_timeout(); then the thread is detached. For library calls that wait without a timeout.
bool returns_in_time(std::function<void()> f);

}  // namespace tessera::comm
