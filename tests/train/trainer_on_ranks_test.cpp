#include <array>
#include <condition_variable>
#include <csignal>
#include <functional>
#include <mutex>
#include <vector>

#include "comm/deadline.h"
#include "comm/threads.h"
#include "dist/world.h"
#include "runtime/interrupt.h"
#include "tests/train/regression.h"

namespace tessera::train {
namespace {

using test::options_of;
using test::Ran;
using test::Regression;

/// Makes the calls of another communicator; before each it says for how many seconds that may wait.
class Timed : public comm::Transport {
 public:
  Timed(comm::Communicator inner, std::function<void(double limit)> before)
      : inner_(std::move(inner)), before_(std::move(before)) {}
  const char* name() const override { return "timed"; }
  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  bool takes(Device device) const override { return device.is_cpu(); }
  void run(const comm::Call& call, const Tensor& in, const Tensor& out) override {
    before_(comm::call_timeout());
    switch (call.kind) {
      case comm::Kind::all_reduce:
        return inner_.all_reduce(out);
      case comm::Kind::all_gather:
        return inner_.all_gather(in, out);
      case comm::Kind::broadcast:
        return inner_.broadcast(out, call.peer);
      case comm::Kind::barrier:
        return inner_.barrier();
      default:
        FAIL() << call.text();
    }
  }
  void reduce_parts(const comm::Call&, const Tensor&, std::span<const int64_t>) override {}
  void share(const comm::Call&, std::span<const Tensor>, std::span<const int>) override {}
  std::shared_ptr<comm::Transport> part(const std::vector<int>&, uint64_t) override { return nullptr; }
  void fail(const std::string& cause) override { inner_.fail(cause); }

 private:
  comm::Communicator inner_;
  std::function<void(double)> before_;
};

/// The limits of the calls that each of two ranks has made, in their order, which is the same on both.
class CallLimits {
 public:
  void add(int rank, double limit) {
    const std::lock_guard lock(mutex_);
    of_rank_[size_t(rank)].push_back(limit);
    changed_.notify_all();
  }
  /// Called on rank 0 between two calls: the limit of rank 1's next one, once it waits in that.
  double of_waiting_rank() {
    std::unique_lock lock(mutex_);
    const size_t next = of_rank_[0].size();
    changed_.wait(lock, [&] { return of_rank_[1].size() > next; });
    awaited_.push_back(next);
    return of_rank_[1][next];
  }
  /// Those of rank 0 in the calls in which rank 1 waited for it.
  std::vector<double> of_rank_zero() const {
    std::vector<double> limits;
    for (const size_t call : awaited_) limits.push_back(of_rank_[0].at(call));
    return limits;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::array<std::vector<double>, 2> of_rank_;
  std::vector<size_t> awaited_;
};

/// Trains on two ranks, from `first_step` on; prepare(job, rank) adds what a rank does besides.
std::array<Ran, 2> train_on_two(const std::function<void(Regression&, int rank)>& prepare,
                                TrainerOptions options, int64_t first_step = 0,
                                CallLimits* limits = nullptr) {
  const InterruptGuard outermost;
  options.bucket_mb = 0;
  std::array<Ran, 2> ran;
  comm::run_threads(2, [&](comm::Communicator& c) {
    const comm::Communicator timed(std::make_shared<Timed>(c, [&, rank = c.rank()](double limit) {
      if (limits) limits->add(rank, limit);
    }));
    const dist::World world(timed, timed);
    TrainerOptions own = options;
    own.world = &world;
    Regression regression(2);
    prepare(regression, c.rank());
    Ran& end = ran[size_t(c.rank())];
    end = train(regression, own, first_step);
    check(end.error.empty(), end.error);
  });
  return ran;
}

// Rank 0 may write a large checkpoint for longer than a call may take.
TEST(TrainerOnRanks, WaitForRankZeroWhileItSavesAndSamples) {
  TrainerOptions options = options_of(3);
  options.save_every = 1, options.sample_every = 1;
  for (const int64_t first_step : {0, 2}) {
    CallLimits limits;
    int alone = 0;
    train_on_two(
        [&](Regression& regression, int rank) {
          const auto work = [&, rank](int64_t step) {
            if (rank > 0) return;
            alone += 1;
            EXPECT_EQ(limits.of_waiting_rank(), 0) << step;
          };
          regression.on_save = regression.on_sample = work;
        },
        options, first_step, &limits);
    EXPECT_EQ(alone, first_step == 0 ? 6 : 3);
    // Rank 0 itself waited without end for a rank that hung before it came to the end of a save.
    EXPECT_EQ(limits.of_rank_zero(), std::vector<double>(size_t(alone), comm::call_timeout()));
  }
}

/// Two ranks whose evaluations are not the same number.
TEST(TrainerOnRanks, AllDecideByTheEvaluationOfRankZero) {
  for (const bool rank_zero_stops : {true, false}) {
    TrainerOptions options = options_of(6);
    options.eval_every = 2;
    const std::array<Ran, 2> ran = train_on_two(
        [&](Regression& regression, int rank) {
          regression.on_evaluate = [rank] { return Values{{"eval_a", 3 + rank}, {"eval_nll", rank}}; };
          regression.on_judge = [&](const Values& values) {
            return Verdict{.save = true, .stop = (values.at("eval_nll") == 0) == rank_zero_stops};
          };
        },
        options);
    for (const Ran& one : ran) {
      EXPECT_EQ(one.result.step, rank_zero_stops ? 2 : 6);
      EXPECT_EQ(one.result.evaluation, (Values{{"eval_a", 3}, {"eval_nll", 0}}));
    }
  }
}

TEST(TrainerOnRanks, AnEvaluationInterruptedOnOneRankIsGivenUpOnAll) {
  for (const int interrupted : {0, 1}) {
    TrainerOptions options = options_of(6);
    options.eval_every = 2;
    const std::array<Ran, 2> ran = train_on_two(
        [&](Regression& regression, int rank) {
          regression.on_evaluate = [&, rank]() -> Values {
            if (rank == interrupted) throw Interrupted(SIGTERM, __FILE__, __LINE__);
            return {{"eval_nll", 1}};
          };
        },
        options);
    for (const Ran& one : ran) {
      EXPECT_EQ(one.result.outcome, Outcome::interrupted);
      EXPECT_EQ(one.result.step, 2);
      EXPECT_TRUE(one.result.evaluation.empty());
    }
    EXPECT_EQ(ran[0].metrics.back().values.count("unevaluated"), 1u);
  }
}

}  // namespace
}  // namespace tessera::train
