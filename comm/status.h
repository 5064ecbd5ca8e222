#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "comm/call.h"

namespace tessera::comm {

/// What a rank is doing, where the launcher can read it after its death: a page of memory that the
/// launcher shares with it. Written by the rank, read when it is dead.
struct Status {
  static constexpr uint64_t kMagic = 0x7373'6575'7461'7473u;
  uint64_t magic = kMagic;
  std::atomic<int64_t> step = -1;     // of training, counted from 1; -1: none begun
  std::atomic<uint32_t> in_call = 0;  // within a call of a communicator
  std::atomic<int32_t> blames = -1;   // it ended because of this rank's failure; -1: not
  char call[256] = {};                // the last one, Call::text()
  char error[1024] = {};              // what it said when it failed
  char run[4096] = {};                // folder of the run, once there is one
};

/// This process's: the page of the launcher (kStatusVariable), or one of its own.
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
