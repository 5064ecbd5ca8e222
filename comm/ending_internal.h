#pragma once

#include <functional>

#include "comm/communicator.h"

/// For destructors of resources that all ranks share and must release together.

namespace tessera::comm {

/// Waits until all ranks of `host` have called it, however long their own work takes, and returns true. False
/// if nothing may be waited for: the stack is being unwound by an exception, which the other ranks are told,
/// or a rank has failed.
bool all_end(const Communicator& host) noexcept;

/// Calls f, which must not throw, on a thread of its own. True once it has returned; false if it has not
/// within call_timeout(): the thread is left behind then. For library calls that wait without a limit.
bool returns_in_time(std::function<void()> f);

}  // namespace tessera::comm
