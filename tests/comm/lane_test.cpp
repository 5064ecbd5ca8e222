#include "comm/lane.h"

#include <gtest/gtest.h>

#include <latch>

#include "comm/deadline.h"
#include "comm/threads.h"
#include "tests/errors.h"
#include "tests/tensors.h"

// Calls that run next to the computation, between ranks that are threads.

namespace tessera::comm {
namespace {

Tensor filled(int64_t count, double value) {
  return Tensor::full({count}, value, DType::f32, kCpu);
}

TEST(Lane, CallsRunInTheirOrderAndEndBeforeJoin) {
  run_threads(3, [](Communicator& c) {
    Lane lane(c, kCpu);
    EXPECT_LT(lane.exposed_ms(), 0);
    for (int round = 0; round < 3; ++round) {
      std::vector<Tensor> all;
      for (int64_t i = 0; i < 20; ++i) {
        all.push_back(filled(1 + 37 * i, double(c.rank() + i)));
        lane.all_reduce(all.back());
      }
      lane.join();
      for (int64_t i = 0; i < 20; ++i)
        EXPECT_EQ(all[size_t(i)].to_vector<float>(),
                  std::vector<float>(size_t(1 + 37 * i), float(3 + 3 * i)));
      EXPECT_GE(lane.exposed_ms(), 0);
      c.barrier();  // calls of the communicator itself, in between
    }
  });
}

TEST(Lane, PartsOfAnArenaWhileOthersAreWritten) {
  run_threads(2, [](Communicator& c) {
    Lane lane(c, kCpu);
    const Tensor arena = Tensor::zeros({4, 100}, DType::f64, kCpu);
    for (int64_t part = 4; part-- > 0;) {
      const Tensor own = arena.select(0, part);
      own.fill(double(part + c.rank()));
      lane.all_reduce(own);
    }
    lane.join();
    for (int64_t part = 0; part < 4; ++part)
      EXPECT_EQ(arena.at({part, 99}).item(), double(2 * part + 1)) << part;
  });
}

TEST(Lane, MemoryIsUsedAgainOnceItsCallIsDone) {
  run_threads(2, [](Communicator& c) {
    Lane lane(c, kCpu);
    const Tensor slot = Tensor::zeros({100}, DType::f32, kCpu),
                 own = Tensor::zeros({8, 60}, DType::f32, kCpu);
    const int64_t count = c.rank() == 0 ? 60 : 40;
    for (int64_t i = 0; i < 8; ++i) {
      lane.wait(lane.posted());
      slot.fill(double(i + c.rank()));
      lane.reduce_parts(slot, {60, 100}, own.select(0, i).slice(0, 0, count));
      EXPECT_EQ(lane.posted(), size_t(i + 1));
    }
    lane.join();
    lane.wait(8);
    for (int64_t i = 0; i < 8; ++i) {
      EXPECT_EQ(own.at({i, 0}).item(), double(2 * i + 1)) << i;
      EXPECT_EQ(own.at({i, count - 1}).item(), double(2 * i + 1)) << i;
    }
    expect_error([&] { lane.wait(9); }, {"wait: 9 of 8 calls"});
    expect_error([&] { lane.reduce_parts(slot, {60, 100}, slot); }, {"reduce_parts to", "expected"});
  });
}

TEST(Lane, WaitThrowsWhatACallThrew) {
  run_threads(2, [](Communicator& c) {
    Lane lane(c, kCpu);
    lane.all_reduce(Tensor::zeros({3}, DType::i32, kCpu));
    expect_error([&] { lane.wait(1); }, {"all_reduce", "i32", "cannot be summed"});
    expect_error([&] { lane.join(); }, {"all_reduce", "i32", "cannot be summed"});
  });
}

TEST(Lane, AnErrorNamesTheLineOfTheThreadThatPosted) {
  const auto message = [](const std::function<void(Lane&)>& post) {
    std::string said;
    run_threads(2, [&](Communicator& c) {
      Lane lane(c, kCpu);
      post(lane);
      try {
        lane.join();
      } catch (const Error& error) {
        if (c.rank() == 0) said = error.what();
      }
    });
    return said;
  };
  const auto post = [](Lane& lane) { lane.all_reduce(Tensor::zeros({3}, DType::i32, kCpu)); };
  EXPECT_EQ(message(post).find("called at"), std::string::npos) << message(post);
  EXPECT_NE(message([&](Lane& lane) {
              const CallScope call(Site{"loop.cpp", 7});
              post(lane);
            }).find("; called at loop.cpp:7"),
            std::string::npos);
}

TEST(Lane, CallsOfOtherThreadsAreRefusedUntilJoin) {
  run_threads(2, [](Communicator& c) {
    const Communicator same = c.split(0);
    Lane lane(c, kCpu);
    const Tensor x = filled(3, 1);
    lane.all_reduce(x);
    // A refused call is none: one rank may make it alone.
    if (c.rank() == 0)
      expect_error([&] { c.barrier(); }, {"barrier: another thread makes calls", "DataParallel::overlap()"});
    expect_error([&] { same.all_reduce(x.clone()); }, {"all_reduce: another thread makes calls"});
    lane.join();
    c.barrier();
    EXPECT_EQ(x.to_vector<float>(), std::vector<float>(3, 2));
  });
}

TEST(Lane, JoinThrowsWhatACallThrew) {
  run_threads(2, [](Communicator& c) {
    Lane lane(c, kCpu);
    lane.all_reduce(filled(3, 1));
    lane.all_reduce(Tensor::zeros({3}, DType::i32, kCpu));  // not on the links: it is refused before
    lane.all_reduce(filled(3, 1));
    expect_error([&] { lane.join(); }, {"all_reduce", "i32", "cannot be summed"});
    lane.join();  // nothing is left
    const Tensor x = filled(3, 1);
    lane.all_reduce(x);
    lane.join();
    EXPECT_EQ(x.to_vector<float>(), std::vector<float>(3, 2));
  });
}

TEST(Lane, DifferentCallsAreNamedOnAllRanks) {
  EXPECT_THROW(run_threads(2,
                           [](Communicator& c) {
                             Lane lane(c, kCpu);
                             lane.all_reduce(filled(c.rank() == 0 ? 3 : 4, 1));
                             expect_error([&] { lane.join(); }, {"rank 0 calls all_reduce f32[3]",
                                                                 "rank 1 calls all_reduce f32[4]"});
                             throw Error("told", "", 0);
                           }),
               Error);
}

TEST(Lane, ARankThatEndsWithCallsUnderWayTellsTheOthers) {
  std::latch ended(1);
  run_threads(2, [&](Communicator& c) {
    if (c.rank() == 0) {
      Lane(c, kCpu).all_reduce(filled(3, 1));  // which rank 1 never makes
      ended.count_down();
    } else {
      ended.wait();                    // else the two calls might be found to differ first
      const TimeoutScope timeout(30);  // of a rank that is told nothing, which then names itself
      expect_error([&] { c.barrier(); }, {"rank 0", "it ended while its gradients were being summed"});
    }
  });
}

TEST(Lane, WhatIsNotPackedIsRefused) {
  Lane lane(Communicator(), kCpu);
  const Tensor x = Tensor::zeros({4, 6}, DType::f32, kCpu);
  expect_error([&] { lane.all_reduce(x.slice(1, 0, 2)); }, {"all_reduce next to", "is not packed"});
  expect_error([&] { lane.all_reduce(Tensor()); }, {"all_reduce next to"});
}

}  // namespace
}  // namespace tessera::comm
