#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "comm/socket.h"

/// Rendezvous of the processes of a job: rank 0, or the program that started the job, listens at one address;
/// the others identify themselves there and get the table of all ranks. Then each has a connection to every
/// other rank for data, one for the comparison of calls (comm/call_check.h), and one to rank 0 for notices of
/// failures.

namespace tessera::comm {

/// Options of a process that joins a job.
struct RendezvousOptions {
  int rank = 0, size = 1;
  std::string host = "127.0.0.1";  // address of rank 0
  int port = 0;
  int listener = -1;        // rank 0: inherited file descriptor of a listening socket; -1: make one
  std::string token = {};   // of the job; a process with another token is refused. At most 255 bytes
  std::string origin = {};  // rank 0: origin of tokens, told to a process with another one; "": not told
  std::string what = {};    // program and arguments; must be equal on all ranks. At most 1,023 bytes are used
  double seconds = 120;     // timeout for all ranks to join
  double report_after = 10;  // seconds after which rank 0 prints once which ranks are missing
};

struct Member {
  std::string host, address;  // name of its machine; where it can be reached
  int pid = 0, port = 0;
};

/// The connections of one rank.
struct Connections {
  std::vector<Member> members;  // by rank
  std::vector<File> data;       // by rank; closed for this rank itself
  std::vector<File> checks;     // likewise
  std::vector<File> notices;    // rank 0: by rank; the others: one, to rank 0
};

/// Throws on every rank that has joined, with the same reason: if two processes claim the same rank, if they
/// disagree about the number of ranks or about `what`, if one ends before all have joined, or at the timeout.
/// Connections of other programs are dropped, and those with another token refused (rank 0 reports the first
/// one on stderr); neither disturbs the job, and the memory they can take is bounded.
Connections rendezvous(const RendezvousOptions& options);

/// A message on a connection for notices (comm/watch_internal.h).
struct Notice {
  enum class What : uint32_t { failed = 1, left = 2, question = 3, answer = 4 };
  static constexpr uint32_t kMagic = 0x7473'6e74;
  uint32_t magic = kMagic;
  What what = What::failed;
  int32_t rank = -1;     // failed: the rank that failed first, -1: the ranks disagree; otherwise the sender
  int32_t to = -1;       // question, answer: the receiver
  int32_t awaited = -1;  // answer: the rank that the sender waits for, in the call `text`; -1: none
  char text[1024] = {};
};

}  // namespace tessera::comm
