#include "comm/nccl.h"

#include <gtest/gtest.h>

#include <chrono>
#include <csignal>

#include "comm/peer_sums.h"
#include "comm/tcp.h"
#include "runtime/capture.h"
#include "tests/comm/ranks.h"
#include "tests/errors.h"

// Calls between two GPUs that differ, or that wait for a rank that has died: all ranks end, and none reads
// what the GPU holds. Each rank is a process; this one uses no GPU, since it forks.

namespace tessera::comm {
namespace {

using test::Ended;
using test::Rank;
using test::Ranks;

class Nccl : public ::testing::Test {
 protected:
  void SetUp() override {
    Ranks counts(1, [](const Rank&, const RendezvousOptions&) {
      check(nccl_lacks().empty() && Device::cuda_count() >= 2, "no NCCL or no two GPUs");
    });
    if (counts.wait(0).code != 0) GTEST_SKIP() << "needs NCCL and two GPUs";
  }
};

using GpuMain = std::function<void(const Communicator& host, const Communicator& data, const Rank& rank)>;

Ranks on_gpus(const GpuMain& main) {
  return Ranks(2, [=](Communicator& host, const Rank& rank) {
    const Communicator data = connect_nccl(host, Device::cuda(rank.number()));
    main(host, data, rank);
  });
}

Tensor ones(const Communicator& data, int64_t count, DType dtype = DType::f32) {
  return Tensor::full({count}, 1, dtype, Device::cuda(data.rank()));
}

/// Makes calls of both shapes, so that further ones are issued at once.
void warm_up(const Communicator& data) {
  for (int i = 0; i < 3; ++i)
    for (const int64_t count : {1000, 2000, 4000000}) {
      const Tensor x = ones(data, count);
      data.all_reduce(x);
      EXPECT_EQ(x.to_vector<float>().back(), 2);
    }
}

double seconds_of(const std::function<void()>& f) {
  const auto start = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void expect_ends(Ranks& ranks) {
  for (const Ended& end : ranks.wait_all()) EXPECT_EQ(end.code, 0) << end.signal << " " << end.said;
}

TEST_F(Nccl, EveryRankGetsTheSumOfItsPart) {
  Ranks ranks = on_gpus([](const Communicator&, const Communicator& data, const Rank&) {
    const int rank = data.rank();
    const auto element = [](int rank, int64_t i) { return double(i % 50 + 100 * rank); };
    for (const DType dtype : {DType::f32, DType::bf16})
      for (const int64_t each : {1, 1000, 3000001}) {
        std::vector<double> values;
        for (int64_t i = 0; i < 2 * each; ++i) values.push_back(element(rank, i));
        const Tensor in = Tensor::from(values, {2 * each}).to(dtype).to(Device::cuda(rank));
        const auto expect_sums = [&](const Tensor& part, int64_t first) {
          const std::vector<float> got = part.to(DType::f32).to_vector<float>();
          for (int64_t i = 0; i < int64_t(got.size()); ++i)
            ASSERT_EQ(got[size_t(i)], element(0, first + i) + element(1, first + i)) << dtype << " " << each;
        };
        const Tensor out = Tensor::full({each}, -1, dtype, Device::cuda(rank));
        data.reduce_scatter(in, out);
        expect_sums(out, rank * each);
        const Tensor whole = in.clone(), mine = whole.slice(0, rank * each, (rank + 1) * each);
        data.reduce_scatter(whole, mine);
        expect_sums(mine, rank * each);
        for (const int64_t middle : {each, each / 2}) {
          const Tensor x = in.clone();
          const int64_t ends[] = {middle, 2 * each};
          data.reduce_parts(x, ends);
          expect_sums(rank == 0 ? x.slice(0, 0, middle) : x.slice(0, middle, 2 * each),
                      rank == 0 ? 0 : middle);
        }
      }
  });
  expect_ends(ranks);
}

TEST_F(Nccl, ShapesThatDifferEndBothRanksAndNothingIsRead) {
  // Both shapes known, one of them new, all ranks' new.
  for (const auto& [first, second] : {std::pair{1000, 2000}, {2000, 4000000}, {1000, 1001}, {77, 78}}) {
    Ranks ranks = on_gpus([=](const Communicator& host, const Communicator& data, const Rank& rank) {
      warm_up(data);
      const Tensor x = ones(data, rank.number() == 0 ? first : second);
      const std::string theirs = "rank 1 calls all_reduce f32[" + std::to_string(second) + "]";
      const double seconds = seconds_of([&] {
        expect_error(
            [&] {
              data.all_reduce(x);
              x.to_vector<float>();
            },
            {"the ranks disagree: rank 0 calls all_reduce f32[", theirs.c_str()});
      });
      EXPECT_LT(seconds, 10);
      expect_error([&] { x.to_vector<float>(); }, {"the ranks disagree"});
      expect_error([&] { data.all_reduce(x); }, {"the ranks disagree"});
      expect_error([&] { host.barrier(); }, {"the ranks disagree"});
    });
    expect_ends(ranks);
  }
}

TEST_F(Nccl, WhatAFailedCallLeftIsNotReadWithoutTheCommunicatorEither) {
  Ranks ranks(2, [](Communicator& host, const Rank& rank) {
    const Tensor x = Tensor::full({1000}, 1, DType::f32, Device::cuda(rank.number()));
    {
      const Communicator data = connect_nccl(host, Device::cuda(rank.number()));
      warm_up(data);
      data.all_reduce(rank.number() == 0 ? x : ones(data, 2000));
    }
    expect_error([&] { x.to_vector<float>(); }, {"the ranks disagree"});
  });
  expect_ends(ranks);
}

TEST_F(Nccl, ACallThatOneRankLeavesOutIsFoundAtItsNextCallOnTheHost) {
  Ranks ranks = on_gpus([](const Communicator& host, const Communicator& data, const Rank& rank) {
    warm_up(data);
    expect_error(
        [&] {
          if (rank.number() == 0) {
            const Tensor x = ones(data, 1000);
            data.all_reduce(x);
            x.to_vector<float>();
          }
          host.barrier();
        },
        {"rank 0 calls all_reduce f32[1000]", "rank 1 calls barrier"});
  });
  expect_ends(ranks);
}

TEST_F(Nccl, ManyCallsInARowAndTheLastOneDiffers) {
  Ranks ranks = on_gpus([](const Communicator&, const Communicator& data, const Rank& rank) {
    warm_up(data);
    const Tensor x = ones(data, 1000), y = ones(data, 2000);
    expect_error(
        [&] {
          for (int i = 0; i < 5000; ++i) data.all_reduce(x);
          data.all_reduce(rank.number() == 0 ? x : y);
          // The calls that follow fill the queue of the GPU behind one that hangs.
          for (int i = 0; i < 5000; ++i) data.all_reduce(x);
          x.to_vector<float>();
        },
        {"the ranks disagree: rank 0 calls all_reduce f32[1000]", "rank 1 calls all_reduce f32[2000]"});
  });
  expect_ends(ranks);
}

TEST_F(Nccl, ARankThatDiesWhileAnotherWaitsForItsKernel) {
  for (const bool graph : {false, true}) {
    Ranks ranks = on_gpus([graph](const Communicator&, const Communicator& data, const Rank& rank) {
      warm_up(data);
      const Tensor x = ones(data, 1000);
      Captured call(Device::cuda(rank.number()), [&] { data.all_reduce(x); });
      for (int i = 0; graph && i < 3; ++i) call();
      x.to_vector<float>();
      rank.arrive();
      if (rank.number() == 1) rank.await();  // until it is killed
      if (graph)
        call();
      else
        data.all_reduce(x);
      rank.arrive();
      x.to_vector<float>();
    });
    for (const int r : {0, 1, 0}) EXPECT_TRUE(ranks.await_arrival(r));
    const double seconds = seconds_of([&] {
      ranks.send(1, SIGKILL);
      const Ended end = ranks.wait(0);
      EXPECT_EQ(end.code, 1);
      expect_parts(end.said, {"rank 1 (pid ", "ended without a word"});
    });
    EXPECT_LT(seconds, 10) << (graph ? "in a graph" : "eager");
  }
}

/// Ends while nothing unwinds the stack, as a program that catches the failure does.
TEST_F(Nccl, ARankThatDiesWhileTheGpuOfAnotherWaitsForItsCopies) {
  Ranks reach(2, [](Communicator& host, const Rank& rank) {
    const std::string lacks = PeerSums::lacks(host, Device::cuda(rank.number()));
    check(lacks.empty(), lacks);
  });
  if (const Ended end = reach.wait_all()[0]; end.code != 0) GTEST_SKIP() << end.said;
  for (const bool graph : {false, true}) {
    Ranks ranks = on_gpus([graph](const Communicator& host, const Communicator& data, const Rank& rank) {
      const Device device = Device::cuda(rank.number());
      const Tensor x = ones(data, 4000000);
      const PeerSums sums(host, x);
      Captured call(device, [&] { sums.all_reduce(x); });
      for (int i = 0; i < 3; ++i) graph ? call() : sums.all_reduce(x);
      EXPECT_EQ(x.to_vector<float>().back(), 8);
      rank.arrive();
      if (rank.number() == 1) rank.await();  // until it is killed
      graph ? call() : sums.all_reduce(x);
      rank.arrive();
      expect_error([&] { x.to_vector<float>(); }, {"rank 1 (pid ", "ended without a word"});
    });
    for (const int r : {0, 1, 0}) EXPECT_TRUE(ranks.await_arrival(r));
    ranks.send(1, SIGKILL);
    const Ended end = ranks.wait(0);
    EXPECT_EQ(end.code, 0) << end.said;
  }
}

}  // namespace
}  // namespace tessera::comm
