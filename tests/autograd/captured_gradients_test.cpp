#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "autograd/tape.h"
#include "runtime/capture.h"
#include "runtime/capture_internal.h"
#include "tests/autograd/leaves.h"
#include "tests/errors.h"

/// Gradients of leaves follow the replays of graphs, on a made-up device: work issued to its stream is a
/// function that runs at once, or is recorded. What CUDA does is tested in tests/optim/captured_test.cpp.

namespace tessera {
namespace {

using Work = std::vector<std::function<void()>>;

struct Stream {
  std::shared_ptr<Work> recording;
  void issue(std::function<void()> work) { recording ? recording->push_back(std::move(work)) : work(); }
};

class Recorder : public GraphRecorder {
 public:
  explicit Recorder(Stream& stream) : stream_(stream) {}
  void begin() override { stream_.recording = std::make_shared<Work>(); }
  std::unique_ptr<Graph> end() override { return std::make_unique<Recorded>(std::move(stream_.recording)); }
  void abandon() noexcept override { stream_.recording.reset(); }
  void copy(void* to, const void* from, size_t bytes) override { std::memcpy(to, from, bytes); }

 private:
  struct Recorded : Graph {
    explicit Recorded(std::shared_ptr<Work> work) : work(std::move(work)) {}
    void launch() override {
      for (const auto& one : *work) one();
    }
    size_t nodes() const override { return work->size(); }
    std::shared_ptr<Work> work;
  };
  Stream& stream_;
};

Tensor new_leaf(std::vector<double> values) {
  Tensor leaf = Tensor::from(values, {int64_t(values.size())});
  require_grad(leaf);
  set_grad_buffer(leaf, Tensor::zeros(leaf.shape(), DType::f64, kCpu));
  return leaf;
}

/// sum(w x), issued to the stream, whose backward pass writes where the tape says. The loss's gradient is
/// taken to be one.
Tensor product(Stream& stream, const Tensor& w, const Tensor& x) {
  Tensor y = Tensor::empty({1}, DType::f64, kCpu);
  const int64_t n = w.count();
  stream.issue([=, y = y.data<double>(), w = w.data<double>(), x = x.data<double>()] {
    *y = 0;
    for (int64_t i = 0; i < n; ++i) *y += w[i] * x[i];
  });
  if (Tape* const tape = Tape::recording(w))
    tape->record("product", {&w}, {&y}, [=, &stream](Backward& b) {
      const GradTarget target = b.target(0);
      ASSERT_TRUE(target.grad.defined());
      stream.issue([=, adds = target.accumulate, g = target.grad.data<double>(), x = x.data<double>()] {
        for (int64_t i = 0; i < n; ++i) g[i] = (adds ? g[i] : 0) + x[i];
      });
      b.written(0, target);
    });
  return y;
}

/// A model of leaves on a device of its own: a micro-step uses the first leaf twice, and the last not at all.
struct World {
  Stream stream;
  std::vector<Tensor> leaves{new_leaf({1, 2}), new_leaf({3}), new_leaf({5, 6, 7}), new_leaf({8})};
  Tensor x = Tensor::from(std::vector<double>{1, 2, 3}, {3});
  Tensor loss, other;  // left by the body
  bool fail = false;   // at the end of the body

  void micro_step() {
    Tape tape;
    const std::vector<Tensor> results{
        product(stream, leaves[0], x.slice(0, 0, 2)), product(stream, leaves[1], x.slice(0, 2, 3)),
        product(stream, leaves[2], x), product(stream, leaves[0], x.slice(0, 1, 3))};
    std::vector<Tensor> ones;
    for (const Tensor& result : results) ones.push_back(Tensor::full({1}, 1, result.dtype(), kCpu));
    tape.backward(results, ones);
    loss = results[0].detach();
    other = results[2].detach();
    check(!fail, "planted in the body");
  }
  /// Gradients that did not arrive count as zero.
  void update() {
    for (const Tensor& leaf : leaves) {
      const Tensor gradient = grad(leaf);
      if (!gradient.defined()) continue;
      stream.issue([n = leaf.count(), w = leaf.data<double>(), g = gradient.data<double>()] {
        for (int64_t i = 0; i < n; ++i) w[i] -= 0.125 * g[i];
      });
    }
  }
  std::vector<std::vector<double>> seen() const {
    std::vector<std::vector<double>> all{values_if_defined(loss), values_if_defined(other)};
    for (const Tensor& leaf : leaves)
      all.push_back(values_if_defined(leaf)), all.push_back(values_if_defined(grad(leaf)));
    return all;
  }
};

struct CapturedWorld : World {
  Captured step{kCpu, [this] { micro_step(); }, std::make_unique<Recorder>(stream)};
};

TEST(CapturedGradients, OptimizerOutsideTheGraphSeesThem) {
  World eager;
  CapturedWorld captured;
  for (int t = 0; t < 6; ++t) {
    for (World* world : {&eager, static_cast<World*>(&captured)}) {
      world->x.fill(t + 1);
      world == &eager ? world->micro_step() : captured.step();
      world->update();
      for (const Tensor& leaf : world->leaves) zero_grad(leaf);
    }
    ASSERT_EQ(captured.seen(), eager.seen()) << t;
    EXPECT_EQ(captured.step.is_graph(), t > 0);
  }
  EXPECT_EQ(captured.step.graphs(), 1u);
}

TEST(CapturedGradients, AnEagerScopeBetweenReplaysChangesNothing) {
  World eager;
  CapturedWorld captured;
  for (int t = 0; t < 9; ++t) {
    const bool in_scope = t == 3 || t == 4;
    for (World* world : {&eager, static_cast<World*>(&captured)}) {
      world->x.fill(t + 1);
      std::optional<EagerScope> scope;
      if (in_scope) scope.emplace();
      EXPECT_EQ(EagerScope::active(), in_scope);
      world == &eager ? world->micro_step() : captured.step();
      if (t % 2) continue;
      world->update();
      for (const Tensor& leaf : world->leaves) zero_grad(leaf);
    }
    ASSERT_EQ(captured.seen(), eager.seen()) << t;  // losses in handles outside included
    EXPECT_EQ(captured.step.is_graph(), t > 0 && !in_scope) << t;
  }
}

TEST(CapturedGradients, ReplaysAddUpUntilZeroGrad) {
  World eager;
  CapturedWorld captured;
  for (int t = 0; t < 5; ++t)
    for (World* world : {&eager, static_cast<World*>(&captured)}) {
      for (int micro = 0; micro < 3; ++micro) {
        world->x.fill(t + micro);
        world == &eager ? world->micro_step() : captured.step();
      }
      EXPECT_EQ(values_if_defined(grad(world->leaves[1])), (std::vector<double>{t + 0. + t + 1 + t + 2}));
      EXPECT_FALSE(grad(world->leaves[3]).defined());
      world->update();
      for (const Tensor& leaf : world->leaves) zero_grad(leaf);
    }
  EXPECT_EQ(captured.seen(), eager.seen());
  EXPECT_EQ(captured.step.graphs(), 2u) << "one that overwrites and one that adds";
}

TEST(CapturedGradients, AWholeStepIsOneGraphWithoutMoreWork) {
  World eager;
  CapturedWorld captured;
  const auto whole = [](World& world) {
    world.micro_step();
    world.update();
    for (const Tensor& leaf : world.leaves) zero_grad(leaf);
  };
  Captured step(
      kCpu, [&] { whole(captured); }, std::make_unique<Recorder>(captured.stream));
  for (int t = 0; t < 5; ++t) {
    whole(eager);
    step();
    ASSERT_EQ(captured.seen(), eager.seen()) << t;
  }
  EXPECT_EQ(step.graphs(), 1u);
  EXPECT_EQ(step.nodes(), 4u + 4 + 3) << "products, their gradients, updates";
}

TEST(CapturedGradients, AnUpdateCapturedAloneFollowsThem) {
  World eager;
  CapturedWorld captured;
  Captured update(
      kCpu, [&] { captured.update(); }, std::make_unique<Recorder>(captured.stream));
  for (int t = 0; t < 8; ++t) {
    eager.micro_step(), captured.step();
    if (t % 3 == 2) zero_grad(eager.leaves[0]), zero_grad(captured.leaves[0]);
    eager.update(), update();
    for (size_t i = 0; i < 4; ++i)
      if (t % 2) zero_grad(eager.leaves[i]), zero_grad(captured.leaves[i]);
    ASSERT_EQ(captured.seen(), eager.seen()) << t;
  }
}

TEST(CapturedGradients, ACaptureThatThrowsLeavesThemAsTheyWere) {
  for (const bool adds : {false, true}) {
    CapturedWorld world;
    world.step();
    if (!adds)
      for (const Tensor& leaf : world.leaves) zero_grad(leaf);
    const auto before = world.seen();
    const std::vector<double> loss = before[0];
    world.fail = true;
    EXPECT_EQ(message_of([&] { world.step(); }), "planted in the body");
    EXPECT_FALSE(world.step.is_graph());
    EXPECT_FALSE(kCpu.capturing());
    EXPECT_EQ(CaptureSession::current(), nullptr);
    auto after = world.seen();
    after[0] = before[0], after[1] = before[1];  // handles that the body replaced
    EXPECT_EQ(after, before);
    world.fail = false;
    world.micro_step();  // eager: 4 where the failed capture had counted would be wrong
    EXPECT_EQ(values_if_defined(grad(world.leaves[1])), std::vector<double>{adds ? 6. : 3.});
    world.step();
    EXPECT_EQ(values_if_defined(grad(world.leaves[1])), std::vector<double>{adds ? 9. : 6.});
  }
}

/// Anything may happen between calls; the captured world must stay equal to the eager one.
TEST(CapturedGradients, EqualEagerOnesWhateverHappensInBetween) {
  for (const unsigned seed : {1u, 2u, 3u}) {
    std::mt19937 random(seed);
    World eager;
    CapturedWorld captured;
    const auto both = [&](auto&& act) { act(eager), act(static_cast<World&>(captured)); };
    eager.micro_step(), captured.step();
    size_t most_graphs = 0;
    for (int t = 0; t < 1500; ++t) {
      const unsigned action = random() % 8, which = unsigned(random());
      const double value = double(random() % 16);
      both([&](World& world) { world.x.fill(value); });
      if (action < 3) {
        eager.micro_step(), captured.step();
      } else if (action == 3) {
        both([&](World& world) {
          for (size_t i = 0; i < 4; ++i)
            if (which >> i & 1) zero_grad(world.leaves[i]);
        });
      } else if (action == 4) {
        both([](World& world) {
          world.update();
          for (const Tensor& leaf : world.leaves) zero_grad(leaf);
        });
      } else if (action == 5) {
        both([](World& world) {  // not the graph's: its results go elsewhere
          const Tensor loss = world.loss, other = world.other;
          world.micro_step();
          world.loss = loss, world.other = other;
        });
      } else if (action == 6 && which % 4 == 0) {
        both([&](World& world) {
          const Tensor& leaf = world.leaves[which / 4 % 4];
          set_grad_buffer(leaf, Tensor::full(leaf.shape(), 99, DType::f64, kCpu));
        });
      } else if (action == 7) {
        captured.fail = true;  // only a body that runs can fail
        const Tensor loss = captured.loss, other = captured.other;
        if (message_of([&] { captured.step(); }).empty()) {
          eager.micro_step();
        } else {
          captured.loss = loss, captured.other = other;
        }
        captured.fail = false;
      }
      ASSERT_EQ(captured.seen(), eager.seen()) << "seed " << seed << ", step " << t << ", action " << action;
      most_graphs = std::max(most_graphs, captured.step.graphs());
    }
    EXPECT_GT(most_graphs, 2u);
    EXPECT_LE(most_graphs, 8u);
  }
}

TEST(CapturedGradients, ALeafWithoutABufferGetsOneThatReplaysKeep) {
  Stream stream;
  Tensor leaf = Tensor::from(std::vector<double>{1, 2}, {2}),
         x = Tensor::from(std::vector<double>{3, 4}, {2});
  require_grad(leaf);
  // The body's first call does nothing, so that the first gradient arrives during a capture.
  bool first = true;
  Captured step(
      kCpu,
      [&] {
        if (std::exchange(first, false)) return;
        Tape tape;
        Tensor y = leaf.detach().clone(), made = Tensor::empty({2}, DType::f64, kCpu);
        stream.issue([to = made.data<double>(), from = x.data<double>()] { std::copy(from, from + 2, to); });
        tape.record("given", {&leaf}, {&y}, [&](Backward& b) {
          const GradTarget target = b.target(0);
          Tensor to = target.grad.defined() ? target.grad : std::exchange(made, Tensor());
          stream.issue([adds = target.accumulate, to = to.data<double>(), from = x.data<double>()] {
            for (int i = 0; i < 2; ++i) to[i] = (adds ? to[i] : 0) + from[i];
          });
          if (target.grad.defined()) {
            b.written(0, target);
          } else {
            b.give(0, std::move(to));
          }
        });
        tape.backward(std::vector{y}, std::vector{Tensor::full({2}, 1, DType::f64, kCpu)});
      },
      std::make_unique<Recorder>(stream));
  step();
  for (int t = 1; t <= 6; ++t) {
    step();
    ASSERT_TRUE(grad(leaf).defined());
    EXPECT_EQ(values_if_defined(grad(leaf)), (std::vector<double>{3, 4})) << t;
    zero_grad(leaf);
    EXPECT_FALSE(grad(leaf).defined());
  }
}

TEST(CapturedResults, HandlesHoldTheLastCallsWhicheverGraphRan) {
  CapturedWorld world;
  std::vector<double> losses;
  for (int t = 0; t < 12; ++t) {
    if (t % 3 == 0)
      for (const Tensor& leaf : world.leaves) zero_grad(leaf);
    world.x.fill(t);
    world.step();
    EXPECT_EQ(values_if_defined(world.loss), std::vector<double>{3. * t}) << t;
    EXPECT_EQ(values_if_defined(world.other), std::vector<double>{18. * t}) << t;
  }
  EXPECT_EQ(world.step.graphs(), 2u);
}

TEST(CapturedResults, CopiesOfAHandleDoNotConfuseThem) {
  CapturedWorld world;
  std::vector<Tensor> copies;  // as of a caller that gathers losses
  for (int t = 0; t < 12; ++t) {
    if (t % 3 == 0)
      for (const Tensor& leaf : world.leaves) zero_grad(leaf);
    world.x.fill(t);
    world.step();
    copies.push_back(world.loss);
    EXPECT_EQ(values_if_defined(world.loss), std::vector<double>{3. * t}) << t;
  }
}

TEST(CapturedResults, ThatDifferBetweenGraphsAreRefused) {
  Stream stream;
  const Tensor leaf = new_leaf({1, 2}), x = Tensor::from(std::vector<double>{3, 4}, {2});
  std::vector<Tensor> left;
  Captured step(
      kCpu,
      [&] {
        const bool first = !grad(leaf).defined();
        left.clear();
        Tape tape;
        const Tensor y = product(stream, leaf, x);
        tape.backward(y);
        left.push_back(y.detach());
        if (first) left.push_back(Tensor::empty({1000}, DType::f64, kCpu));
      },
      std::make_unique<Recorder>(stream));
  step();
  step();
  zero_grad(leaf);
  expect_parts(message_of([&] { step(); }), {"leaves 2 tensors in handles", "left 1", "copy_from"});
  EXPECT_FALSE(grad(leaf).defined());
  EXPECT_EQ(step.graphs(), 1u);
}

TEST(CapturedThings, LiveAsLongAsTheGraph) {
  Stream stream;
  auto thing = std::make_shared<int>(7);
  const std::weak_ptr<int> seen = thing;
  {
    Captured step(
        kCpu,
        [&] {
          if (CaptureSession* const session = CaptureSession::current()) session->keep(thing);
        },
        std::make_unique<Recorder>(stream));
    step();
    step();
    thing.reset();
    EXPECT_FALSE(seen.expired());
    step();
    EXPECT_FALSE(seen.expired());
  }
  EXPECT_TRUE(seen.expired());
}

TEST(CapturedThreads, OthersAllocateButIssueNothing) {
  Stream stream;
  Tensor inside, outside;
  std::string refused, nested;
  bool second = false;
  const auto pool_bytes = [] { return kCpu.allocator().stats().reserved; };
  kCpu.allocator().release_cached();
  const size_t before = pool_bytes();
  {
    Captured step(
        kCpu,
        [&] {
          if (!std::exchange(second, true)) return;
          inside = Tensor::empty({1 << 20}, DType::f64, kCpu);
          std::thread([&] {
            outside = Tensor::empty({1 << 20}, DType::f64, kCpu);
            refused = message_of([] { kCpu.stream(); });
            nested = message_of([] { CaptureSession session(kCpu); });
          }).join();
        },
        std::make_unique<Recorder>(stream));
    step();
    step();
    EXPECT_NO_THROW(kCpu.stream());
  }
  expect_parts(refused, {"another thread is capturing"});
  expect_parts(nested, {"another thread is capturing"});
  EXPECT_EQ(CaptureSession::current(), nullptr);
  inside = Tensor();  // the graph's pool goes with its last block,
  EXPECT_LE(pool_bytes(), before + (8 << 20));
  outside = Tensor();  // and the other thread's block is of the common pool: cached until it is released
  EXPECT_GE(pool_bytes(), before + (8 << 20));
  kCpu.allocator().release_cached();
  EXPECT_EQ(pool_bytes(), before);
}

}  // namespace
}  // namespace tessera
