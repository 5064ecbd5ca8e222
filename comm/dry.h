#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "comm/communicator.h"

namespace tessera::comm {

/// What calls of a dry communicator would have sent.
struct DryCounts {
  int64_t calls = 0;
  int64_t bytes = 0;  // that leave this rank, as the transport tcp sends them
};

/// A communicator of `size` ranks of which only `rank` exists. Calls check their tensors and are counted by
/// name ("all_reduce"); of a result they only write what this rank itself contributes. Only all_gather fills
/// in the same for the other ranks, so that they all have the same color in split(). Any device. For cost
/// estimates, and to see what a program would send.
class DryRun {
 public:
  DryRun(int rank, int size);
  const Communicator& communicator() const { return communicator_; }
  std::map<std::string, DryCounts> counts() const;

 private:
  struct Shared;
  std::shared_ptr<Shared> shared_;
  Communicator communicator_;
  friend class DryTransport;
};

}  // namespace tessera::comm
