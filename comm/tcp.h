#pragma once

#include <functional>
#include <string>

#include "comm/communicator.h"
#include "comm/rendezvous.h"

namespace tessera::comm {

struct TcpOptions {
  RendezvousOptions rendezvous = {};
  /// Called on the watch thread, with the message of the RankFailure, if the job has failed and this rank has
  /// not made a call of the communicator within `grace` seconds (it is computing, or hangs), which would have
  /// thrown. Commands end the process then. Empty: nothing.
  std::function<void(const std::string& message)> lost = {};
  double grace = 4;
};

/// The communicator of processes that exchange messages in host memory over TCP. Blocks until all ranks have
/// joined (comm/rendezvous.h, whose errors it throws). A watch thread notices within milliseconds, on all
/// ranks, if a rank dies.
///
/// Destroying the last handle tells the other ranks that this one leaves; while an exception unwinds the
/// stack it reports a failure instead, without the exception's message: call fail() to send that.
Communicator connect_tcp(const TcpOptions& options);

}  // namespace tessera::comm
