#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "comm/call.h"

namespace tessera::comm {

/// What a rank is doing, in a page of memory that it shares with the launcher, so that the launcher can read
/// it after the rank's death.
struct Status {
  static constexpr uint64_t kMagic = 0x7373'6575'7461'7473u;
  uint64_t magic = kMagic;
  std::atomic<int64_t> step = -1;       // training step, counted from 1; -1: none started
  std::atomic<uint32_t> in_call = 0;    // within a call of a communicator
  std::atomic<int32_t> caused_by = -1;  // this rank ended because that rank failed; -1: it did not
  char call[256] = {};                  // the last one, Call::text()
  char error[1024] = {};                // what it said when it failed
  char run[4096] = {};                  // folder of the run, once there is one
};

/// The status of this process: the launcher's page (kStatusVariable), or a local one.
Status& own_status();
/// The environment variable with the number of the page's file descriptor.
inline constexpr const char* kStatusVariable = "TESSERA_STATUS_FD";

void copy_text(char* to, size_t bytes, const std::string& text);

/// Notes the call in own_status() while it lives. In a process with several ranks (threads) the last one
/// wins.
class StatusScope {
 public:
  explicit StatusScope(const Call& call);
  ~StatusScope();
  StatusScope(const StatusScope&) = delete;
};

}  // namespace tessera::comm
