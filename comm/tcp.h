#pragma once

#include <functional>
#include <string>

#include "comm/communicator.h"
#include "comm/rendezvous.h"

namespace tessera::comm {

struct TcpOptions {
  Meeting meeting;
  /// Called on a thread of its own, with the message of the RankFailure, if the job has failed and this rank
  /// has made no call of the communicator for `grace` seconds that could have thrown it: the rank computes,
  /// or hangs. Commands end the process then. Empty: nothing.
  std::function<void(const std::string& message)> lost = {};
  double grace = 4;
};

/// The communicator of processes that exchange messages over TCP, in host memory. Blocks until all ranks of
/// the meeting have come (comm/rendezvous.h, whose errors it throws). A thread of its own watches the other
/// ranks: one that ends without a word is noticed within milliseconds, on all of them.
///
/// The last handle's end takes leave of the others; during the unwinding of an exception it reports a failure
/// instead, without its text: call fail() with that.
Communicator connect_tcp(const TcpOptions& options);

}  // namespace tessera::comm
