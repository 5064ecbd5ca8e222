#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "comm/socket.h"

/// How the processes of a job find each other: rank 0, or the program that started the job, listens at one
/// address; the others say who they are and get the list of all. Then each has two connections to rank 0, one
/// for messages and one for notices of failures, and one to every other rank.

namespace tessera::comm {

/// Where and as whom a process takes part in a job.
struct Meeting {
  int rank = 0, size = 1;
  std::string host = "127.0.0.1";  // of rank 0
  int port = 0;
  int listener = -1;     // rank 0: a socket that listens there already, inherited; -1: make one
  std::string token;     // of the job; a process without it is refused. At most 255 bytes
  std::string origin;    // rank 0: where tokens come from, for a process that has another; "": no matter
  std::string what;      // the program and what it was told: equal on all ranks. At most 1,023 bytes
  double seconds = 120;  // for all to come
  double quiet = 10;     // after so many, rank 0 says once for which ranks it waits
};

struct Member {
  std::string host, address;  // name of its machine; where it can be reached
  int pid = 0, port = 0;
};

/// The connections of one rank.
struct Connections {
  std::vector<Member> members;  // by rank
  std::vector<File> data;       // by rank; closed for this rank itself
  std::vector<File> notices;    // rank 0: by rank; the others: one, to rank 0
};

/// Throws on every rank that has come, with the same reason, if two say that they are the same rank, if they
/// disagree about the number of ranks or about what they run, if one ends before all have come, or if not all
/// come in time. Connections of other programs are dropped, those with another token told so, the first of
/// them also by rank 0 on standard error; neither disturbs the job, and what they send is bounded.
Connections meet(const Meeting& meeting);

/// One message on a connection for notices (comm/watch_internal.h).
struct Notice {
  enum class What : uint32_t { failed = 1, left = 2, question = 3, answer = 4 };
  static constexpr uint32_t kMagic = 0x7473'6e74;
  uint32_t magic = kMagic;
  What what = What::failed;
  int32_t rank = -1;     // failed: which failed first, -1: the ranks disagree; else who speaks
  int32_t to = -1;       // question, answer: for whom it is
  int32_t awaited = -1;  // answer: for whom the speaker waits, in the call `text`; -1: for none
  char text[1024] = {};
};

}  // namespace tessera::comm
