#include "comm/call_check.h"

#include <gtest/gtest.h>

#include <atomic>
#include <csignal>
#include <cstring>
#include <future>

#include "comm/threads.h"
#include "comm/transport.h"
#include "tests/comm/ranks.h"
#include "tests/errors.h"

// Calls that are compared after they were made, as nccl makes them: between ranks that are threads, and that
// are processes.

namespace tessera::comm {
namespace {

using test::Ended;
using test::Rank;
using test::Ranks;

/// The number-th call, all_reduce f32[count] of another communicator.
Call call_of(uint64_t number, int64_t count, DType dtype = DType::f32) {
  Call call(Kind::all_reduce, Tensor::empty_packed({count}, dtype, Device::cpu()));
  call.communicator = 7, call.number = number;
  return call;
}

using Main = std::function<void(Communicator&)>;

struct CheckWay {
  const char* name;
  void (*run)(int, const Main&);
};

class CallChecks : public ::testing::TestWithParam<CheckWay> {
 protected:
  void run(int size, const Main& main) { GetParam().run(size, main); }
};

const CheckWay kCheckWays[] = {
    {"threads", [](int size, const Main& main) { run_threads(size, main); }},
    {"tcp",
     [](int size, const Main& main) {
       Ranks ranks(size, [&](Communicator& c, const Rank&) { main(c); });
       for (const Ended& end : ranks.wait_all()) EXPECT_EQ(end.code, 0) << end.signal << " " << end.said;
     }},
};
INSTANTIATE_TEST_SUITE_P(Transport, CallChecks, ::testing::ValuesIn(kCheckWays),
                         [](const auto& way) { return std::string(way.param.name); });

TEST_P(CallChecks, EqualCallsAreConfirmedMoreThanAreHeld) {
  for (const int size : {2, 3, 5})
    run(size, [](Communicator& c) {
      CallCheck& check = c.call_check();
      check.confirm();  // of nothing
      for (uint64_t i = 1; i <= 3 * CallCheck::kMost + 5; ++i) {
        check.post(call_of(i, int64_t(i % 7)));
        if (i % 1000 == 0) {
          check.confirm();
          EXPECT_TRUE(check.confirmed());
        }
      }
      check.confirm();
      EXPECT_FALSE(check.failed());
      c.barrier();
    });
}

TEST_P(CallChecks, AnotherShapeDtypeOrOrderPrintsBothSidesOnAllRanks) {
  struct Case {
    Call others, different;
    const char* text;
  };
  const Case cases[] = {
      {call_of(3, 10), call_of(3, 11), "rank 1 calls all_reduce f32[11] (call 3)"},
      {call_of(3, 10), call_of(3, 10, DType::f16), "rank 1 calls all_reduce f16[10] (call 3)"},
      {call_of(3, 10), call_of(4, 10), "rank 1 calls all_reduce f32[10] (call 4)"}};
  for (const Case& one : cases)
    run(3, [&](Communicator& c) {
      CallCheck& check = c.call_check();
      // Rank 0 or 2 is the one whose comparison came first, perhaps before the last rank has made its calls.
      expect_error(
          [&] {
            check.post(call_of(1, 5)), check.post(call_of(2, 5));
            check.confirm();  // all have joined: a rank that still does would end with the error
            check.post(c.rank() == 1 ? one.different : one.others);
            check.confirm();
          },
          {"the ranks disagree", "calls all_reduce f32[10] (call 3)", one.text});
      EXPECT_TRUE(check.failed());
      expect_error([&] { check.post(call_of(5, 5)); }, {"the ranks disagree", one.text});
      expect_error([&] { c.barrier(); }, {"the ranks disagree", one.text});
    });
}

TEST_P(CallChecks, AMismatchIsFoundWhileCallsGoOn) {
  run(2, [](Communicator& c) {
    CallCheck& check = c.call_check();
    expect_error(
        [&] {
          for (uint64_t i = 1;; ++i) check.post(call_of(i, c.rank() == 1 && i == 100 ? 6 : 5));
        },
        {"rank 0 calls all_reduce f32[5] (call 100), rank 1 calls all_reduce f32[6] (call 100)"});
  });
}

TEST_P(CallChecks, TheirOrderAmongCallsOnTheHostIsCompared) {
  run(2, [](Communicator& c) {
    CallCheck& check = c.call_check();
    c.barrier();
    check.post(call_of(1, 5));
    c.all_reduce(Tensor::zeros({3}, DType::f32, Device::cpu()));
    expect_error(
        [&] {
          if (c.rank() == 0) check.post(call_of(2, 5)), check.confirm();
          c.barrier();
        },
        {"rank 0 calls all_reduce f32[5] (call 2), rank 1 calls barrier (call 3), of another communicator"});
  });
}

TEST_P(CallChecks, CallsOfPartsAreNotCompared) {
  run(4, [](Communicator& c) {
    CallCheck& check = c.call_check();
    const Communicator half = c.split(c.rank() / 2);
    for (int i = 0; i <= c.rank() / 2; ++i) half.barrier();
    if (c.rank() == 0) c.send(Tensor::zeros({3}, DType::f32, Device::cpu()), 1);
    if (c.rank() == 1) c.receive(Tensor::zeros({3}, DType::f32, Device::cpu()), 0);
    check.post(call_of(1, 5)), check.confirm();
    c.barrier();
  });
}

TEST_P(CallChecks, ADeadlineNamesTheRankThatDidNotCall) {
  run(3, [](Communicator& c) {
    CallCheck& check = c.call_check();
    // The others hear of it in a call on the host, which may still be the barrier.
    expect_error(
        [&] {
          c.barrier();
          check.confirm();
          // A call without a deadline comes before the one that has one.
          if (c.rank() == 0) check.post(call_of(1, 5), 0), check.post(call_of(2, 5), 0.05), check.confirm();
          c.receive(Tensor::zeros({3}, DType::f32, Device::cpu()), c.rank() - 1);
        },
        {"rank 1", "did not take part in all_reduce f32[5] (call 2) within 0.05 s"});
  });
}

TEST_P(CallChecks, AFailureIsToldOnce) {
  run(2, [](Communicator& c) {
    CallCheck& check = c.call_check();
    std::promise<void> told;
    int count = 0, late = 0, forgotten = 0;
    check.on_failure(&count, [&] { ++count, told.set_value(); });
    check.on_failure(&forgotten, [&] { ++forgotten; });
    check.forget(&forgotten);
    check.post(call_of(1, 5 + c.rank()));
    told.get_future().wait();
    expect_error([&] { check.throw_failure_within(60); }, {"the ranks disagree"});
    check.forget(&count);
    check.on_failure(&late, [&] { ++late; });
    EXPECT_EQ(count, 1);
    EXPECT_EQ(late, 1);
    EXPECT_EQ(forgotten, 0);
  });
}

TEST_P(CallChecks, TheLastCallsAreSentByARankThatEnds) {
  for (int i = 0; i < 20; ++i)
    run(2, [](Communicator& c) {
      CallCheck& check = c.call_check();
      for (uint64_t call = 1; call <= 100; ++call) check.post(call_of(call, 5));
      if (c.rank() == 0) check.confirm();
    });
}

// ---- processes that die, hang and leave ----

TEST(CallCheckFailure, AMismatchInTheLastCallIsFoundByTheOthers) {
  Ranks ranks(2, [](Communicator& c, const Rank&) {
    CallCheck& check = c.call_check();
    check.post(call_of(1, 5 + c.rank()));
    if (c.rank() == 0) check.confirm();
  });
  const auto ends = ranks.wait_all();
  expect_parts(ends[0].said,
               {"rank 0 calls all_reduce f32[5] (call 1), rank 1 calls all_reduce f32[6] (call 1)"});
}

TEST(CallCheckFailure, ARankThatDiesBetweenItsCallAndTheComparison) {
  Ranks ranks(3, [](Communicator& c, const Rank& rank) {
    CallCheck& check = c.call_check();
    for (uint64_t call = 1; call <= 10; ++call) check.post(call_of(call, 5));
    check.confirm();
    rank.arrive();
    if (rank.number() == 1) {
      check.post(call_of(11, 5));  // perhaps not sent
      ::raise(SIGKILL);
    }
    check.post(call_of(11, 5)), check.post(call_of(12, 5));
    check.confirm();
  });
  const auto ends = ranks.wait_all();
  for (const int r : {0, 2}) {
    EXPECT_EQ(ends[size_t(r)].code, 1);
    expect_parts(ends[size_t(r)].said,
                 {"rank 1 (pid ", "ended without a word", "was in all_reduce f32[5] (call 1"});
  }
}

TEST(CallCheckFailure, ARankThatLeavesWithoutTheCallIsNamed) {
  Ranks ranks(3, [](Communicator& c, const Rank&) {
    CallCheck& check = c.call_check();
    check.post(call_of(1, 5)), check.confirm();
    if (c.rank() == 1) return;
    check.post(call_of(2, 5)), check.confirm();
  });
  const auto ends = ranks.wait_all();
  EXPECT_EQ(ends[1].code, 0) << ends[1].said;
  for (const int r : {0, 2})
    expect_parts(ends[size_t(r)].said, {"rank 1 (pid ", "left the job before all_reduce f32[5] (call 2)"});
}

TEST(CallCheckFailure, ARankThatWaitsForAHangingOneIsNotBlamed) {
  // Rank 0 waits for the call of 1, which waits for 2 on the host; 2 is stopped.
  Ranks ranks(3, [](Communicator& c, const Rank& rank) {
    CallCheck& check = c.call_check();
    c.barrier();
    rank.arrive();
    rank.await();
    const TimeoutScope timeout(0);
    if (rank.number() == 1) c.receive(Tensor::zeros({9}, DType::f32, Device::cpu()), 2);
    check.post(call_of(1, 5), 0.2);
    check.confirm();
  });
  for (int r = 0; r < 3; ++r) EXPECT_TRUE(ranks.await_arrival(r));
  ranks.send(2, SIGSTOP);
  ranks.release(1);
  ranks.await_sleep(1);
  ranks.release(0);
  for (const int r : {0, 1}) {
    const Ended end = ranks.wait(r);
    EXPECT_EQ(end.code, 1);
    // In what 1 waits for, or, where 0 has not heard of that yet, in the call itself.
    expect_parts(end.said, {"rank 2 (pid ", "did not take part in ", "within 0.2 s"});
  }
}

TEST(CallCheckFailure, ARankThatWaitsForACallIsNotBlamed) {
  // Rank 2 waits for 0 on the host, which waits for the call of 1; 1 is stopped.
  Ranks ranks(3, [](Communicator& c, const Rank& rank) {
    CallCheck& check = c.call_check();
    c.barrier();
    check.confirm();  // rank 1 is stopped only then
    if (rank.number() == 0) check.post(call_of(1, 5), 0);
    rank.arrive();
    if (rank.number() != 0) rank.await();
    const TimeoutScope timeout(0.2);
    if (rank.number() == 2) c.receive(Tensor::zeros({9}, DType::f32, Device::cpu()), 0);
    check.confirm();
  });
  for (int r = 0; r < 3; ++r) EXPECT_TRUE(ranks.await_arrival(r));
  ranks.send(1, SIGSTOP);
  ranks.release(2);
  for (const int r : {0, 2}) {
    const Ended end = ranks.wait(r);
    EXPECT_EQ(end.code, 1);
    expect_parts(end.said, {"rank 1 (pid ", "did not take part in all_reduce f32[5] (call 1) within 0.2 s"});
  }
}

TEST(CallCheckFailure, TheCallAfterTooManyUnconfirmedOnesWaits) {
  Ranks ranks(2, [](Communicator& c, const Rank& rank) {
    CallCheck& check = c.call_check();
    if (rank.number() == 1) rank.await();
    for (uint64_t call = 1; call <= CallCheck::kMost; ++call) check.post(call_of(call, 5));
    if (rank.number() == 0) {
      EXPECT_FALSE(check.confirmed());
      rank.arrive();
    }
    check.post(call_of(CallCheck::kMost + 1, 5));
    rank.arrive();
    check.confirm();
  });
  EXPECT_TRUE(ranks.await_arrival(0));
  ranks.release(1);
  for (int r = 0; r < 2; ++r) EXPECT_TRUE(ranks.await_arrival(r));
  for (const Ended& end : ranks.wait_all()) EXPECT_EQ(end.code, 0) << end.said;
}

TEST(CallCheckFailure, OtherTransportsHaveNone) {
  expect_error([] { Communicator().call_check(); }, {"alone", "cannot be compared after they were made"});
}

}  // namespace
}  // namespace tessera::comm
