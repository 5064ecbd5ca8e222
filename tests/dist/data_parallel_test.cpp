#include "dist/data_parallel.h"

#include <gtest/gtest.h>

#include <cmath>
#include <condition_variable>
#include <limits>
#include <mutex>

#include "autograd/tape.h"
#include "comm/dry.h"
#include "comm/recorded.h"
#include "comm/threads.h"
#include "comm/transport.h"
#include "nn/linear.h"
#include "ops/activation/activation.h"
#include "ops/pointwise/pointwise.h"
#include "ops/reduce/reduce.h"
#include "optim/adamw.h"
#include "runtime/capture.h"
#include "tests/errors.h"
#include "tests/nn/no_recorder.h"
#include "tests/tensors.h"

namespace tessera::dist {
namespace {

struct SmallNet {
  explicit SmallNet(uint64_t seed) : rng(seed), a(3, 5, rng, kCpu), b(5, 2, rng, kCpu) {}
  void fields(auto&& visit) { visit("a", a), visit("b", b); }
  Tensor loss(const Tensor& x) const { return ops::mean(ops::mul(b(a(x)), b(a(x)))); }
  Rng rng;
  nn::Linear a, b;
};

Tensor data_of(int micro, double value = 1) {
  const Tensor x = Tensor::zeros({4, 3}, DType::f32, kCpu);
  for (int64_t i = 0; i < 4; ++i)
    for (int64_t j = 0; j < 3; ++j) x.at({i, j}).fill(value * std::sin(double(7 * micro + 3 * i + j)));
  return x;
}

std::vector<std::vector<float>> weights_of(const optim::Optimizer& optimizer) {
  std::vector<std::vector<float>> all;
  for (const auto& parameter : optimizer.parameters())
    all.push_back(parameter.tensor.detach().packed().to_vector<float>());
  return all;
}

/// Three steps of eight micro-batches on a rank of `world`, with sums by the tree; `bucket_mb` > 0: next to
/// the last backward pass.
std::vector<std::vector<float>> trained_weights(const World& world, uint64_t seed, int micro_batches = 8,
                                                double bucket_mb = 0) {
  SmallNet net(seed);
  optim::AdamW optimizer(nn::parameters(net), {.lr = 0.01, .max_grad_norm = 0.1});
  DataParallel reduce(optimizer, world, {.mean = false, .bucket_mb = bucket_mb > 0 ? bucket_mb : 32});
  const Share share = share_of(micro_batches, world.rank(), world.size());
  GradientTree tree(optimizer);
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    for (int k = 0; k < share.count; ++k) {
      const bool overlaps = bucket_mb > 0 && k + 1 == share.count;
      if (overlaps) reduce.overlap([&](int64_t begin, int64_t end) { tree.finish(share.count, begin, end); });
      Tape tape;
      tape.backward(
          ops::scale(net.loss(data_of(step * micro_batches + share.first + k)), 1.0 / micro_batches));
      if (share.count > 1 && !overlaps) tree.add(k, share.count);
    }
    optimizer.step();
  }
  return weights_of(optimizer);
}

TEST(DataParallel, TheSameBitsOnAnyNumberOfRanks) {
  const auto alone = trained_weights(World(), 1);
  for (const int ranks : {2, 4, 8})
    comm::run_threads(ranks, [&](comm::Communicator& c) {
      // Weights that differ: all take rank 0's.
      EXPECT_EQ(trained_weights(World(c, c), c.rank() == 0 ? 1 : 99), alone) << ranks << " ranks";
    });
}

TEST(DataParallel, TheSameBitsBesideTheBackwardPassInBucketsOfAnySize) {
  const auto alone = trained_weights(World(), 1);
  EXPECT_EQ(trained_weights(World(), 1, 8, 2.0), alone);
  for (const int ranks : {2, 4, 8})
    for (const double bucket_mb : {1e-6, 1e-4, 2.0})
      comm::run_threads(ranks, [&](comm::Communicator& c) {
        EXPECT_EQ(trained_weights(World(c, c), 1, 8, bucket_mb), alone)
            << ranks << " ranks, " << bucket_mb << " MiB";
      });
  const auto six = trained_weights(World(), 1, 6);
  comm::run_threads(3,
                    [&](comm::Communicator& c) { EXPECT_EQ(trained_weights(World(c, c), 1, 6, 1e-4), six); });
  comm::run_threads(2, [&](comm::Communicator& c) {  // three each, the bits of two ranks alone
    EXPECT_EQ(trained_weights(World(c, c), 1, 6, 1e-4), trained_weights(World(c, c), 1, 6));
  });
}

/// Four steps of two optimizers, whose parameters alternate in the backward pass.
std::vector<std::vector<float>> trained_by_two(const World& world, bool overlaps, bool gradients) {
  Rng rng(1);
  std::vector<nn::Linear> layers;
  for (const auto& [in, out] : {std::pair(3, 40), {40, 30}, {30, 40}, {40, 2}})
    layers.emplace_back(in, out, rng, kCpu);
  std::vector<nn::NamedParameter> halves[2];
  for (size_t i = 0; i < layers.size(); ++i)
    for (nn::NamedParameter parameter : nn::parameters(layers[i])) {
      parameter.name = std::to_string(i) + "." + parameter.name;
      halves[i % 2].push_back(parameter);
    }
  const optim::AdamWOptions options{
      .lr = 0.01,
      .sharding = {.part = world.rank(), .parts = world.size(), .bucket_mb = 1e-3, .gradients = gradients}};
  optim::AdamW a(halves[0], options), b(halves[1], options);
  DataParallel of_a(a, world), of_b(b, world);
  for (int step = 0; step < 4; ++step) {
    if (overlaps) of_a.overlap(), of_b.overlap();
    Tape tape;
    Tensor y = data_of(2 * step + world.rank());
    for (const nn::Linear& layer : layers) y = ops::gelu(layer(y));
    tape.backward(ops::mean(ops::mul(y, y)));
    a.step(), b.step();
    a.zero_grad(), b.zero_grad();
  }
  std::vector<std::vector<float>> all = weights_of(a);
  for (std::vector<float>& one : weights_of(b)) all.push_back(std::move(one));
  return all;
}

TEST(DataParallel, TwoOptimizersOverlapWithOnePass) {
  for (int round = 0; round < 20; ++round)
    comm::run_threads(2, [](comm::Communicator& c) {
      const World world(c, c);
      const auto expected = trained_by_two(world, false, false);
      EXPECT_EQ(trained_by_two(world, true, false), expected);
      EXPECT_EQ(trained_by_two(world, true, true), expected);
    });
}

TEST(DataParallel, BucketsCoverTheArenaFromItsEnd) {
  SmallNet net(1);
  optim::AdamW optimizer(nn::parameters(net), {});
  const auto check_cover = [&](double bucket_mb, size_t count) {
    const std::vector<optim::Bucket> buckets = optimizer.buckets(bucket_mb);
    EXPECT_EQ(buckets.size(), count) << bucket_mb;
    int64_t end = optimizer.gradients().count();
    std::vector<size_t> seen;
    for (const optim::Bucket& bucket : buckets) {
      EXPECT_EQ(bucket.end, end);
      EXPECT_LT(bucket.begin, bucket.end);
      end = bucket.begin;
      seen.insert(seen.end(), bucket.parameters.begin(), bucket.parameters.end());
    }
    EXPECT_EQ(end, 0);
    EXPECT_EQ(seen, (std::vector<size_t>{3, 2, 1, 0}));
  };
  // Four parameters of 64 elements each, with pads.
  check_cover(1e-6, 4);
  check_cover(2.0 * 64 * 4 / (1 << 20), 2);
  check_cover(1, 1);
  expect_error([&] { optimizer.buckets(0); }, {"buckets of 0 MiB"});
}

TEST(DataParallel, AGradientAfterItsBucketIsAnError) {
  comm::run_threads(2, [](comm::Communicator& c) {
    SmallNet net(3);
    optim::AdamW optimizer(nn::parameters(net), {.lr = 0.01});
    DataParallel reduce(optimizer, World(c, c));
    const auto pass = [&] {
      Tape tape;
      tape.backward(net.loss(data_of(0)));
    };
    reduce.overlap();
    pass();
    const auto before = weights_of(optimizer);
    expect_error([&] { pass(); }, {"the gradient of b.", "had been sent", "before the last backward pass"});
    // What it added to had been summed, or not.
    expect_error([&] { optimizer.step(); }, {"the gradients of this step are lost", "zero_grad()"});
    EXPECT_EQ(weights_of(optimizer), before);
    // The next step is a new one, with overlap or without.
    optimizer.zero_grad();
    pass(), pass();
    optimizer.step();
    reduce.overlap();
    optimizer.zero_grad();
    pass();
    expect_error([&] { pass(); }, {"had been sent"});
    expect_error([&] { reduce.overlap(); }, {"overlap() after a backward pass failed", "zero_grad() first"});
    optimizer.zero_grad();
    reduce.overlap();
    pass();
    optimizer.step();
    EXPECT_EQ(optimizer.steps(), 2);
  });
}

TEST(DataParallel, APassThatMakesCallsOfItsOwnNextToOverlapIsAnError) {
  comm::run_threads(2, [](comm::Communicator& c) {
    SmallNet net(3);
    optim::AdamW optimizer(nn::parameters(net), {.lr = 0.01});
    DataParallel reduce(optimizer, World(c, c), {.bucket_mb = 1e-6});
    const comm::RowSplit rows(2, {8});
    const auto pass = [&] {
      Tape tape;
      tape.backward(ops::mean(net.b(comm::gather_rows(c, net.a(data_of(c.rank())), rows))));
    };
    reduce.overlap();
    // The gradients of b are on their way when that of the gathered rows is summed.
    expect_error([&] { pass(); }, {"another thread makes calls", "leave out DataParallel::overlap()"});
    optimizer.zero_grad();
    pass();
    optimizer.step();
    EXPECT_EQ(optimizer.steps(), 1);
  });
}

/// x, whose backward throws if `fails`.
Tensor may_fail(const Tensor& x, bool fails) {
  Tensor y = x.detach();
  Tape::recording(x)->record("planted", {&x}, {&y}, [fails](Backward& b) {
    check(!fails, "planted in backward");
    b.pass(0, {0});
  });
  return y;
}

/// A backward pass that may fail when the gradients of `b`, the first two buckets, have been sent.
void pass_of(const SmallNet& net, const World& world, int micro, bool fails) {
  const auto backward = [&] {
    Tape tape;
    tape.backward(ops::mean(net.b(may_fail(net.a(data_of(10 * world.rank() + micro)), fails))));
  };
  if (fails)
    expect_error(backward, {"planted in backward"});
  else
    backward();
}

enum class Retry { none, with_overlap, without_overlap };

/// Weights after two steps of two micro-batches each, the last pass of the first one failing once.
std::vector<std::vector<float>> weights_after_failure(const World& world, Retry retry) {
  SmallNet net(3);
  optim::AdamW optimizer(nn::parameters(net), {.lr = 0.01});
  DataParallel reduce(optimizer, world, {.bucket_mb = 1e-6});
  for (int step = 0; step < 2; ++step) {
    optimizer.zero_grad();
    pass_of(net, world, 2 * step, false);
    const auto first = grad(net.b.weight).to_vector<float>();
    if (step == 0 && retry != Retry::none) {
      reduce.overlap();
      pass_of(net, world, 7, true);
      EXPECT_EQ(grad(net.b.weight).to_vector<float>(), first);
    }
    if (step == 1 || retry != Retry::without_overlap) reduce.overlap();
    pass_of(net, world, 2 * step + 1, false);
    optimizer.step();
  }
  return weights_of(optimizer);
}

TEST(DataParallel, APassThatThrowsOnAllRanksLeavesTheNextStepRight) {
  comm::run_threads(2, [](comm::Communicator& c) {
    const World world(c, c);
    const auto expected = weights_after_failure(world, Retry::none);
    EXPECT_EQ(weights_after_failure(world, Retry::with_overlap), expected);
    EXPECT_EQ(weights_after_failure(world, Retry::without_overlap), expected);
  });
}

TEST(DataParallel, AStepThatIsGivenUpLeavesNoSumBehind) {
  const auto weights = [](const World& world, bool gives_up) {
    SmallNet net(3);
    optim::AdamW optimizer(nn::parameters(net), {.lr = 0.01});
    DataParallel reduce(optimizer, world, {.bucket_mb = 1e-6});
    if (gives_up) {
      reduce.overlap();
      pass_of(net, world, 7, false);
      optimizer.zero_grad();
    }
    reduce.overlap();
    world.host().barrier();  // an error while sums are on their way
    pass_of(net, world, 1, false);
    optimizer.step();
    return weights_of(optimizer);
  };
  comm::run_threads(2, [&](comm::Communicator& c) {
    const World world(c, c);
    EXPECT_EQ(weights(world, true), weights(world, false));
  });
}

TEST(DataParallel, ACapturedPassThatSendsGradientsEndsWithItsStep) {
  for (const bool overlap_inside : {true, false}) {
    const comm::DryRun ranks(0, 2);
    const World world(ranks.communicator(), ranks.communicator());
    SmallNet net(3);
    optim::AdamW optimizer(nn::parameters(net), {.lr = 0.01});
    DataParallel reduce(optimizer, world, {.bucket_mb = 1e-6});
    const auto pass = [&] {
      if (overlap_inside) reduce.overlap();
      pass_of(net, world, 1, false);
    };
    const auto update = [&] { optimizer.step(), optimizer.zero_grad(); };
    Captured micro_batch(kCpu, pass, std::make_unique<nn::NoRecorder>());
    for (int step = 0; step < 2; ++step) {
      if (!overlap_inside) reduce.overlap();
      if (step == 0)
        micro_batch();
      else
        expect_error([&] { micro_batch(); }, {"a captured body sends gradients", "step() in one body"});
      update();
    }
    if (!overlap_inside) continue;
    Captured whole(
        kCpu, [&] { pass(), update(); }, std::make_unique<nn::NoRecorder>());
    whole(), whole();
    EXPECT_TRUE(whole.is_graph());
  }
}

TEST(DataParallel, OneRankAloneCompletesInStepUnlessThePassThrew) {
  SmallNet net(3);
  optim::AdamW optimizer(nn::parameters(net), {.lr = 0.01});
  const World alone;
  DataParallel reduce(optimizer, alone);
  std::vector<std::pair<int64_t, int64_t>> completed;
  const auto complete = [&](int64_t begin, int64_t end) { completed.emplace_back(begin, end); };
  reduce.overlap(complete);
  pass_of(net, alone, 0, true);
  pass_of(net, alone, 0, false);
  optimizer.step();
  EXPECT_TRUE(completed.empty());
  optimizer.zero_grad();
  reduce.overlap(complete);
  pass_of(net, alone, 1, false);
  EXPECT_TRUE(completed.empty());
  optimizer.step();
  EXPECT_EQ(completed, (std::vector<std::pair<int64_t, int64_t>>{{0, optimizer.gradients().count()}}));
}

TEST(DataParallel, APassThatThrowsOnOneRankAfterItSentGradientsEndsAll) {
  for (const bool overlaps : {false, true})
    comm::run_threads(2, [&](comm::Communicator& c) {
      const World world(c, c);
      SmallNet net(3);
      optim::AdamW optimizer(nn::parameters(net), {.lr = 0.01});
      DataParallel reduce(optimizer, world, {.bucket_mb = 1e-6});
      const auto before = weights_of(optimizer);
      reduce.overlap();
      pass_of(net, world, 0, c.rank() == 1);
      // Without this error the four buckets of rank 0 would be added to two of this pass and two of the next.
      expect_error(
          [&] {
            if (c.rank() == 1 && overlaps) reduce.overlap();
            if (c.rank() == 1) pass_of(net, world, 0, false);
            optimizer.step();
          },
          {"the ranks disagree", "rank 0 calls all_reduce", "rank 1 calls barrier"});
      EXPECT_EQ(weights_of(optimizer), before) << "rank " << c.rank();
    });
}

/// Says when a sum over the ranks is done.
class Watched : public comm::Transport {
 public:
  Watched(comm::Communicator inner, std::function<void()> summed)
      : inner_(std::move(inner)), summed_(std::move(summed)) {}
  const char* name() const override { return "watched"; }
  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  bool takes(Device device) const override { return device.is_cpu(); }
  void run(const comm::Call& call, const Tensor&, const Tensor& out) override {
    if (call.kind == comm::Kind::all_reduce) return inner_.all_reduce(out), summed_();
    inner_.broadcast(out, call.peer);
  }
  void reduce_parts(const comm::Call&, const Tensor& x, std::span<const int64_t> ends) override {
    inner_.reduce_parts(x, ends), summed_();
  }
  void share(const comm::Call&, std::span<const Tensor> tensors, std::span<const int> owners) override {
    inner_.share(tensors, owners);
  }
  std::shared_ptr<comm::Transport> part(const std::vector<int>&, uint64_t) override { return nullptr; }
  void fail(const std::string& cause) override { inner_.fail(cause); }

 private:
  comm::Communicator inner_;
  std::function<void()> summed_;
};

// After the tests that fail where nothing is sent during the pass: this one would wait for ever.
TEST(DataParallel, ABucketTravelsWhileTheBackwardPassGoesOn) {
  comm::run_threads(2, [](comm::Communicator& c) {
    std::mutex mutex;
    std::condition_variable changed;
    int sums = 0;
    const comm::Communicator watched(std::make_shared<Watched>(c, [&] {
      const std::lock_guard lock(mutex);
      sums += 1;
      changed.notify_all();
    }));
    SmallNet net(3);
    optim::AdamW optimizer(nn::parameters(net), {.lr = 0.01});
    DataParallel reduce(optimizer, World(c, watched), {.bucket_mb = 1e-6});
    reduce.overlap();
    Tape tape;
    // What the pass runs last waits for the sums of both parameters of the layer that it ran first. Without
    // overlap it would wait for ever.
    Tensor x = data_of(c.rank()), y = x.clone();
    require_grad(x);
    tape.record("wait", {&x}, {&y}, [&](Backward&) {
      std::unique_lock lock(mutex);
      changed.wait(lock, [&] { return sums >= 2; });
    });
    tape.backward(ops::mean(net.b(net.a(y))));
    optimizer.step();
    EXPECT_EQ(sums, 4);
    EXPECT_GE(reduce.exposed_ms(), 0);
  });
}

TEST(DataParallel, APassThatThrowsBeforeItSentGradientsStopsNoOtherRank) {
  comm::run_threads(2, [](comm::Communicator& c) {
    const World world(c, c);
    const auto weights = [&](bool fails) {
      SmallNet net(3);
      optim::AdamW optimizer(nn::parameters(net), {.lr = 0.01});
      DataParallel reduce(optimizer, world, {.bucket_mb = 32});  // one bucket
      reduce.overlap();
      if (fails && c.rank() == 1) {
        pass_of(net, world, 7, true);
        reduce.overlap();
      }
      pass_of(net, world, 0, false);
      optimizer.step();
      return weights_of(optimizer);
    };
    EXPECT_EQ(weights(true), weights(false));
  });
}

TEST(DataParallel, ATreeOfAnyNumberOfMicroBatches) {
  // On three ranks with two each, and on one with six, whose sums wait at the end.
  const auto alone = trained_weights(World(), 1, 6);
  comm::run_threads(3, [&](comm::Communicator& c) { EXPECT_EQ(trained_weights(World(c, c), 1, 6), alone); });
  const auto five = trained_weights(World(), 1, 5);
  comm::run_threads(5, [&](comm::Communicator& c) { EXPECT_EQ(trained_weights(World(c, c), 1, 5), five); });
}

TEST(DataParallel, OneLineMakesTheMeanOfTheRanks) {
  // Equal data on all ranks: the mean is what one rank has alone, exactly for a power of two.
  const auto step = [](const World& world) {
    SmallNet net(3);
    optim::AdamW optimizer(nn::parameters(net), {.lr = 0.01});
    const DataParallel reduce(optimizer, world);
    Tape tape;
    tape.backward(net.loss(data_of(0)));
    optimizer.step();
    return std::pair(weights_of(optimizer), optimizer.grad_norm());
  };
  const auto alone = step(World());
  comm::run_threads(4, [&](comm::Communicator& c) { EXPECT_EQ(step(World(c, c)), alone); });
}

class DataParallelAlone : public ::testing::TestWithParam<bool> {};

TEST_P(DataParallelAlone, AGradientOnOneRankReachesAll) {
  comm::run_threads(2, [](comm::Communicator& c) {
    SmallNet net(3);
    optim::AdamW optimizer(nn::parameters(net), {.lr = 0.01});
    DataParallel reduce(optimizer, World(c, c), {.bucket_mb = 1e-6});
    if (GetParam()) reduce.overlap();
    if (c.rank() == 0) {
      Tape tape;
      tape.backward(net.loss(data_of(0)));
    }
    optimizer.step();
    EXPECT_GT(optimizer.grad_norm(), 0) << "rank " << c.rank();
    const auto own = weights_of(optimizer);
    const std::string text(reinterpret_cast<const char*>(own[0].data()), own[0].size() * sizeof(float));
    const auto all = c.gather_texts(text);
    EXPECT_EQ(all[0], all[1]);
  });
}

INSTANTIATE_TEST_SUITE_P(Overlap, DataParallelAlone, ::testing::Bool());

TEST(DataParallel, AllSkipAStepThatIsNotFiniteOnOne) {
  comm::run_threads(3, [](comm::Communicator& c) {
    SmallNet net(3);
    optim::AdamW optimizer(nn::parameters(net), {.lr = 0.01});
    const DataParallel reduce(optimizer, World(c, c));
    const auto before = weights_of(optimizer);
    const auto pass = [&](double value) {
      optimizer.zero_grad();
      Tape tape;
      tape.backward(net.loss(data_of(c.rank(), value)));
      optimizer.step();
    };
    pass(c.rank() == 1 ? std::numeric_limits<double>::quiet_NaN() : 1);
    EXPECT_EQ(optimizer.skipped(), 1) << "rank " << c.rank();
    EXPECT_EQ(weights_of(optimizer), before);
    pass(1);
    EXPECT_EQ(optimizer.steps(), 1);
    EXPECT_NE(weights_of(optimizer), before);
  });
}

TEST(DataParallel, DifferentModelsAreRefusedOnAllRanks) {
  comm::run_threads(2, [](comm::Communicator& c) {
    Rng rng(1);
    nn::Linear layer(3, c.rank() == 0 ? 4 : 5, rng, kCpu);
    optim::AdamW optimizer(nn::parameters(layer), {});
    expect_error([&] { DataParallel(optimizer, World(c, c)); },
                 {"rank 1 has 2 parameters", "rank 0 has 2 parameters", "the same model"});
  });
}

TEST(DataParallel, SharesAreEqualAndConsecutive) {
  EXPECT_EQ(share_of(8, 2, 4).first, 4);
  EXPECT_EQ(share_of(8, 2, 4).count, 2);
  expect_error([] { share_of(6, 0, 4); }, {"6 micro-batches on 4 ranks", "multiple"});
  expect_error([] { share_of(2, 0, 4); }, {"2 micro-batches on 4 ranks"});
}

}  // namespace
}  // namespace tessera::dist
