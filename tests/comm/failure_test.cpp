#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <exception>
#include <filesystem>
#include <fstream>
#include <future>
#include <memory>

#include "comm/call_check.h"
#include "comm/deadline.h"
#include "comm/ending_internal.h"
#include "comm/lane.h"
#include "comm/tcp.h"
#include "tests/comm/ranks.h"
#include "tests/errors.h"

// Ranks that are killed, that hang, and that do not belong: all others learn why, at once, and end.

namespace tessera::comm {
namespace {

using test::Ended;
using test::Rank;
using test::Ranks;

Tensor zeros(int64_t count) {
  return Tensor::zeros({count}, DType::f32, Device::cpu());
}

/// Every rank but `dead` ended with one message that names it.
void expect_named(Ranks& ranks, int size, int dead, const std::string& where = "") {
  const std::vector<Ended> ends = ranks.wait_all();
  const std::string name =
      "rank " + std::to_string(dead) + " (pid " + std::to_string(ranks.pid(dead)) + " on ";
  for (int r = 0; r < size; ++r) {
    const Ended& end = ends[size_t(r)];
    if (r == dead) continue;
    EXPECT_EQ(end.code, 1) << "rank " << r << ": " << end.said;
    expect_parts(end.said, {name.c_str(), where.c_str()});
    EXPECT_EQ(end.said.find('\n'), std::string::npos) << end.said;
  }
  EXPECT_EQ(ends[size_t(dead)].signal, SIGKILL);
}

class Killed : public ::testing::TestWithParam<int> {};

TEST_P(Killed, BeforeACallThatTheOthersWaitIn) {
  const int dead = GetParam();
  Ranks ranks(4, [&](Communicator& c, const Rank& rank) {
    c.all_reduce(zeros(10));
    rank.arrive();
    if (rank.number() == dead) rank.await();  // for ever
    c.all_reduce(zeros(1000));
  });
  for (int r = 0; r < 4; ++r) EXPECT_TRUE(ranks.await_arrival(r));
  ranks.send(dead, SIGKILL);
  expect_named(ranks, 4, dead, "was in all_reduce f32[1000] (call 2)");
}

TEST_P(Killed, InTheMiddleOfManyCalls) {
  const int dead = GetParam();
  Ranks ranks(4, [&](Communicator& c, const Rank& rank) {
    const Tensor x = zeros(100000);
    for (int64_t i = 0;; ++i) {
      c.all_reduce(x);
      if (i == 3) rank.arrive();
    }
  });
  for (int r = 0; r < 4; ++r) EXPECT_TRUE(ranks.await_arrival(r));
  ranks.send(dead, SIGKILL);
  expect_named(ranks, 4, dead, "was in all_reduce f32[100000]");
}

TEST_P(Killed, BeforeAllHaveCome) {
  const int dead = GetParam();
  // The dead one and one more have come; the last one comes after the death.
  const int late = dead == 3 ? 2 : 3;
  Ranks ranks(4, [&](const Rank& rank, const RendezvousOptions& rendezvous) {
    rank.arrive();
    if (rank.number() == late || (rank.number() == dead && dead == 0)) rank.await();
    RendezvousOptions own = rendezvous;
    // If the dead one has not even come, rank 0 is the first to lose patience, and says who is missing: of a
    // rank that gave up before, it would say that that one ended.
    own.seconds = rank.number() == 0 ? 3 : rank.number() == late ? 10 : 30;
    connect_tcp({.rendezvous = own}).barrier();
  });
  for (int r = 0; r < 4; ++r) EXPECT_TRUE(ranks.await_arrival(r));
  ranks.send(dead, SIGKILL);
  EXPECT_EQ(ranks.wait(dead).signal, SIGKILL);
  if (dead == 0) return;  // the port is closed: the launcher ends the others
  ranks.release(late);
  for (int r = 0; r < 4; ++r) {
    if (r == dead || r == late) continue;  // the late one may find the port closed
    const Ended end = ranks.wait(r);
    EXPECT_EQ(end.code, 1);
    const std::string name = "rank " + std::to_string(dead);
    // Killed before it said who it is, it is the one that is missing.
    if (end.said.find("ended before all") != std::string::npos) expect_parts(end.said, {name.c_str()});
  }
}

INSTANTIATE_TEST_SUITE_P(Rank, Killed, ::testing::Values(0, 1, 3));

TEST(CommFailure, AnExceptionsTextReachesAllRanks) {
  Ranks ranks(3, [&](Communicator& c, const Rank& rank) {
    c.barrier();
    if (rank.number() == 2) throw Error("out of memory: asked for 3 GiB", __FILE__, __LINE__);
    c.barrier();
  });
  const auto ends = ranks.wait_all();
  for (const int r : {0, 1})
    expect_parts(ends[size_t(r)].said,
                 {"rank 2 (pid ", "failed: out of memory: asked for 3 GiB", "was in barrier"});
  expect_parts(ends[2].said, {"out of memory"});
  for (const Ended& end : ends) EXPECT_EQ(end.code, 1);
}

TEST(CommFailure, AnErrorWhileOthersStillConnectReachesThem) {
  for (int i = 0; i < 20; ++i) {
    Ranks ranks(4, [&](Communicator& c, const Rank& rank) {
      if (rank.number() == 2) throw Error("no such file", __FILE__, __LINE__);
      c.barrier();
    });
    const auto ends = ranks.wait_all();
    for (const int r : {0, 1, 3})
      expect_parts(ends[size_t(r)].said, {"rank 2 (pid ", "failed: no such file"});
  }
}

TEST(CommFailure, ARankThatLeavesEarlyIsNamed) {
  Ranks ranks(3, [&](Communicator& c, const Rank& rank) {
    if (rank.number() != 1) c.barrier();
  });
  const auto ends = ranks.wait_all();
  EXPECT_EQ(ends[1].code, 0) << ends[1].said;
  for (const int r : {0, 2})
    expect_parts(ends[size_t(r)].said, {"rank 1 (pid ", "left the job before barrier"});
}

TEST(CommFailure, ARankThatHangsIsNamedAtTheDeadline) {
  Ranks ranks(3, [&](Communicator& c, const Rank& rank) {
    c.barrier();
    rank.arrive();
    if (rank.number() > 0) rank.await();
    const TimeoutScope timeout(rank.number() == 2 ? 0.2 : 0);
    c.all_reduce(zeros(8));
  });
  for (int r = 0; r < 3; ++r) EXPECT_TRUE(ranks.await_arrival(r));
  ranks.send(1, SIGSTOP);
  ranks.await_sleep(0);  // it has sent its part: on a busy machine it might be late itself
  ranks.release(2);
  for (const int r : {0, 2}) {
    const Ended end = ranks.wait(r);
    EXPECT_EQ(end.code, 1);
    expect_parts(end.said, {"rank 1 (pid ", "did not take part in all_reduce f32[8]", "within 0.2 s"});
  }
}

TEST(CommFailure, ARankThatWaitsForAHangingOneIsNotBlamed) {
  // Rank 3 waits for 2, 2 for 0, and 0 for 1, which is stopped, or computes; only 3 has a deadline.
  for (const bool stopped : {true, false}) {
    Ranks ranks(4, [&](Communicator& c, const Rank& rank) {
      c.barrier();
      rank.arrive();
      constexpr int kAwaited[] = {1, -1, 0, 2};
      const int awaited = kAwaited[rank.number()];
      if (awaited < 0) rank.await();
      if (rank.number() == 3) rank.await();
      const TimeoutScope timeout(rank.number() == 3 ? 0.2 : 0);
      Tensor x = zeros(8 + awaited);
      c.receive(x, awaited);
    });
    for (int r = 0; r < 4; ++r) EXPECT_TRUE(ranks.await_arrival(r));
    for (const int r : {0, 2}) ranks.await_sleep(r);
    if (stopped) ranks.send(1, SIGSTOP);
    ranks.release(3);
    for (const int r : {0, 2, 3}) {
      const Ended end = ranks.wait(r);
      EXPECT_EQ(end.code, 1);
      expect_parts(end.said, {"rank 1 (pid ", "did not take part in receive f32[9]", "within 0.2 s"});
    }
    if (!stopped) ranks.release(1);
  }
}

TEST(CommFailure, RankZeroIsNamedIfItDoesNotEvenPassQuestionsOn) {
  // Rank 2 waits for 1 and 1 for 0. Rank 2 learns it by its own deadline, or by the end of rank 1.
  for (const double seconds : {0.2, 0.0}) {
    Ranks ranks(3, [&](Communicator& c, const Rank& rank) {
      c.barrier();
      rank.arrive();
      rank.await();
      const TimeoutScope timeout(rank.number() == 1 ? 0.2 : seconds);
      c.receive(zeros(8), rank.number() - 1);
    });
    for (int r = 0; r < 3; ++r) EXPECT_TRUE(ranks.await_arrival(r));
    ranks.send(0, SIGSTOP);
    ranks.release(2);
    ranks.release(1);
    for (const int r : {1, 2}) {
      const Ended end = ranks.wait(r);
      EXPECT_EQ(end.code, 1);
      expect_parts(end.said, {"rank 0 (pid "});
    }
  }
}

TEST(CommFailure, ARankThatComputesIsToldByTheWatch) {
  Ranks ranks(2, [&](const Rank& rank, const RendezvousOptions& rendezvous) {
    const Communicator c = connect_tcp({.rendezvous = rendezvous,
                                        .lost =
                                            [&](const std::string& message) {
                                              expect_parts(message, {"rank 0 (pid ", "ended without a word"});
                                              ::_exit(::testing::Test::HasFailure() ? 3 : 7);
                                            },
                                        .grace = 0.01});
    c.barrier();
    rank.arrive();
    rank.await();  // neither computes to an end nor calls
  });
  for (int r = 0; r < 2; ++r) EXPECT_TRUE(ranks.await_arrival(r));
  ranks.send(0, SIGKILL);
  EXPECT_EQ(ranks.wait(1).code, 7);
}

// A handler of the program, or an exception of check_interrupt(), has no place on them.
TEST(CommFailure, ThreadsOfTheRanksTakeNoSignals) {
  Ranks ranks(2, [](Communicator& c, const Rank&) {
    c.call_check();
    const Lane lane(c, Device::cpu());
    int threads = 0;
    for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task")) {
      if (thread.path().filename() == std::to_string(::getpid())) continue;
      std::ifstream status(thread.path() / "status");
      std::string word;
      while (status >> word && word != "SigBlk:") {
      }
      uint64_t blocked = 0;
      EXPECT_TRUE(status >> std::hex >> blocked);
      EXPECT_TRUE(blocked >> (SIGINT - 1) & 1);
      threads += 1;
    }
    EXPECT_GE(threads, 3);  // of the watch, the comparison of calls and the lane
    c.barrier();
  });
  for (const Ended& end : ranks.wait_all()) EXPECT_EQ(end.code, 0) << end.said;
}

// ---- the end ----

TEST(CommEnd, WaitsForAllRanksBeyondTheDeadlineOfCalls) {
  Ranks ranks(2, [&](Communicator& c, const Rank& rank) {
    c.barrier();
    const TimeoutScope timeout(rank.number() == 0 ? 1e-6 : 0);
    rank.arrive();
    if (rank.number() == 1) rank.await();
    EXPECT_TRUE(all_end(c));
  });
  for (int r = 0; r < 2; ++r) EXPECT_TRUE(ranks.await_arrival(r));
  ranks.release(1);
  for (const Ended& end : ranks.wait_all()) EXPECT_EQ(end.code, 0) << end.said;
}

/// What the ranks share; a rank that unwinds stays in its destructor until the test lets it go on, as in a
/// call of NCCL that waits for the others.
struct Shared {
  ~Shared() {
    EXPECT_FALSE(all_end(host));
    if (std::uncaught_exceptions() > 0) rank.await();
  }
  const Communicator host;
  const Rank rank;
};

TEST(CommEnd, ARankThatUnwindsIsNotWaitedForAndTellsTheOthers) {
  Ranks ranks(3, [&](Communicator& c, const Rank& rank) {
    c.barrier();
    rank.arrive();  // all have passed the barrier, which a failure would end
    if (rank.number() == 1) rank.await();
    const Shared shared{c, rank};
    if (rank.number() == 1) fail_at(Site::here(), "no such file");
  });
  for (int r = 0; r < 3; ++r) EXPECT_TRUE(ranks.await_arrival(r));
  ranks.release(1);
  for (const int r : {0, 2}) {
    const Ended end = ranks.wait(r);
    EXPECT_EQ(end.code, 0) << end.said;
  }
  ranks.release(1);
  const Ended end = ranks.wait(1);
  EXPECT_EQ(end.code, 1);
  EXPECT_EQ(end.said, "no such file");
}

TEST(CommEnd, ARankThatWasKilledIsNotWaitedFor) {
  Ranks ranks(3, [&](Communicator& c, const Rank& rank) {
    c.barrier();
    rank.arrive();
    if (rank.number() == 1) rank.await();
    EXPECT_FALSE(all_end(c));
  });
  for (int r = 0; r < 3; ++r) EXPECT_TRUE(ranks.await_arrival(r));
  ranks.send(1, SIGKILL);
  for (const int r : {0, 2}) EXPECT_EQ(ranks.wait(r).code, 0);
}

TEST(CommEnd, AFunctionThatDoesNotReturnIsLeftBehind) {
  std::atomic<int> done = 0;
  EXPECT_TRUE(returns_in_time([&] { done = 1; }));
  EXPECT_EQ(done, 1);
  auto held = std::make_shared<std::promise<void>>();
  std::promise<void> left;
  {
    const TimeoutScope timeout(1e-3);
    EXPECT_FALSE(returns_in_time([held, &left] {
      held->get_future().wait();
      left.set_value();
    }));
  }
  held->set_value();
  left.get_future().wait();  // it uses this test's variables
}

// ---- the meeting ----

/// All ranks end with an error that says so.
void expect_refused(Ranks& ranks, int size, std::initializer_list<const char*> parts) {
  for (int r = 0; r < size; ++r) {
    const Ended end = ranks.wait(r);
    EXPECT_EQ(end.code, 1) << "rank " << r;
    expect_parts(end.said, parts);
  }
}

const auto kNothing = [](Communicator& c, const Rank&) { c.barrier(); };

TEST(CommMeeting, TwoProcessesThatAreTheSameRank) {
  Ranks ranks(3, kNothing, [](RendezvousOptions& m) { m.rank = m.rank == 2 ? 1 : m.rank; });
  expect_refused(ranks, 3, {"two processes are rank 1: pid ", ", and pid "});
}

TEST(CommMeeting, ASecondRankZeroCannotListen) {
  const File taken = listen_on(0, false);
  expect_error([&] { connect_tcp({.rendezvous = {.rank = 0, .size = 2, .port = port_of(taken)}}); },
               {"port", "is taken by another program", "--master"});
}

TEST(CommMeeting, DifferentNumbersOfRanks) {
  Ranks ranks(3, kNothing, [](RendezvousOptions& m) { m.size = m.rank == 1 ? 4 : 3; });
  expect_refused(ranks, 3, {"rank 1 (pid ", "counts 4 ranks, rank 0 counts 3"});
}

TEST(CommMeeting, AnotherProgramOrOtherFlagsOnOneRank) {
  Ranks ranks(3, kNothing,
              [](RendezvousOptions& m) { m.what = m.rank == 2 ? "train gpt --lr 2" : "train gpt --lr 1"; });
  expect_refused(ranks, 3, {"rank 2 (pid ", "runs \"train gpt --lr 2\", rank 0 \"train gpt --lr 1\""});
}

TEST(CommMeeting, AProcessOfAnotherJobIsRefusedAndTheJobGoesOn) {
  Ranks ranks(4, [&](const Rank& rank, const RendezvousOptions& where) {
    RendezvousOptions rendezvous = where;
    rendezvous.size = 3;
    if (rank.number() == 0) rendezvous.origin = "each is named by its parent; set VARIABLE";
    if (rank.number() == 3) rendezvous.rank = 1, rendezvous.token = "another job's";
    if (rank.number() == 1) rank.await();
    if (rank.number() == 0) testing::internal::CaptureStderr();
    connect_tcp({.rendezvous = rendezvous}).barrier();
    if (rank.number() == 0)
      expect_parts(testing::internal::GetCapturedStderr(),
                   {"rank 0 refused pid ", "rank 1 of 3", "set VARIABLE"});
  });
  const Ended stranger = ranks.wait(3);
  EXPECT_EQ(stranger.code, 1);
  expect_parts(stranger.said,
               {"the token of the job is another one; each is named by its parent; set VARIABLE"});
  ranks.release(1);
  for (const int r : {0, 1, 2}) EXPECT_EQ(ranks.wait(r).code, 0) << ranks.wait(r).said;
}

TEST(CommMeeting, NotAllCome) {
  Ranks ranks(4, [&](const Rank& rank, const RendezvousOptions& where) {
    RendezvousOptions rendezvous = where;
    rendezvous.seconds = 0.5, rendezvous.report_after = 0.01;
    if (rank.number() >= 2) return;
    if (rank.number() == 1) rendezvous.seconds = 60;
    rank.arrive();
    if (rank.number() == 0) rank.await();
    connect_tcp({.rendezvous = rendezvous});
  });
  for (const int r : {0, 1}) EXPECT_TRUE(ranks.await_arrival(r));
  ranks.await_sleep(1);  // it has come: else it would try for its 60 s to reach a rank 0 that has given up
  ranks.release(0);
  expect_parts(ranks.wait(0).said, {"not all ranks came within 0.5 s: missing", "3 of 4"});
  EXPECT_EQ(ranks.wait(0).code, 1);
  EXPECT_EQ(ranks.wait(1).code, 1);
}

/// Connects to where the job meets and says `bytes`.
File stranger_at(int port, const std::string& bytes) {
  File connection = connect_to("127.0.0.1", port, Deadline(60), -1);
  write_all(connection, std::as_bytes(std::span(bytes)), Deadline(60), -1);
  return connection;
}

TEST(CommMeeting, UnknownProgramsDisturbNothing) {
  Ranks ranks(3, [&](const Rank& rank, const RendezvousOptions& rendezvous) {
    std::vector<File> open;
    if (rank.number() == 2) {
      for (int i = 0; i < 50; ++i) open.push_back(stranger_at(rendezvous.port, ""));  // say nothing
      open.push_back(stranger_at(rendezvous.port, "GET / HTTP/1.1\r\n\r\n"));
      open.push_back(stranger_at(rendezvous.port, std::string(100000, 'x')));
      open.push_back(stranger_at(rendezvous.port, std::string("trhsello\1\0\0\0", 12)));  // and no more
      stranger_at(rendezvous.port, "x");                                                  // ends at once
    }
    const Communicator c = connect_tcp({.rendezvous = rendezvous});
    EXPECT_EQ(c.largest(c.rank()), 2);
  });
  for (const Ended& end : ranks.wait_all()) EXPECT_EQ(end.code, 0) << end.said;
}

TEST(CommMeeting, RandomBytesAreNeverAMember) {
  // Mutations of a true greeting: none may crash rank 0 or pass as a rank.
  Ranks ranks(2, [&](const Rank& rank, const RendezvousOptions& rendezvous) {
    if (rank.number() == 1) {
      uint64_t state = 1;
      const auto random = [&] {
        return state = state * 6364136223846793005u + 1442695040888963407u, state >> 33;
      };
      for (int i = 0; i < 300; ++i) {
        std::string bytes = "trhsello";
        while (bytes.size() < 1600 + random() % 64) bytes += char(random());
        stranger_at(rendezvous.port, bytes);
      }
    }
    connect_tcp({.rendezvous = rendezvous}).barrier();
  });
  for (const Ended& end : ranks.wait_all()) EXPECT_EQ(end.code, 0) << end.said;
}

TEST(CommMeeting, ImpossibleRanksAndTokens) {
  expect_error([] { connect_tcp({.rendezvous = {.rank = 2, .size = 2}}); }, {"rank 2 of 2"});
  expect_error([] { connect_tcp({.rendezvous = {.rank = 0, .size = 0}}); }, {"rank 0 of 0"});
  expect_error([] { connect_tcp({.rendezvous = {.size = 2, .token = std::string(300, 'x')}}); },
               {"token has 300 bytes"});
  expect_error([] { connect_tcp({.rendezvous = {.size = 2, .port = 70000}}); }, {"port 70000"});
  expect_error([] { connect_tcp({.rendezvous = {.size = 2, .listener = 0}}); }, {"no listening socket"});
  expect_error([] { connect_tcp({.rendezvous = {.rank = 1, .size = 2, .port = 1, .seconds = 0.1}}); },
               {"no connection to 127.0.0.1:1 within 0.1 s", "has rank 0 started"});
}

}  // namespace
}  // namespace tessera::comm
