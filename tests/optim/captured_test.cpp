#include <gtest/gtest.h>

#include <cstddef>
#include <vector>

#include "gradients.h"
#include "optim/adamw.h"
#include "optim/sgd.h"
#include "runtime/capture.h"
#include "tensor/kernels.h"
#include "tests/errors.h"

/// Training loops around graphs give what eager loops give, bit for bit, wherever the graph ends. On the CPU
/// every call of Captured runs its body; the host's side without a GPU is tested in
/// tests/autograd/captured_gradients_test.cpp.

namespace tessera::optim {
namespace {

/// Leaves whose gradient is weight + batch: one arrives twice, one in place, one in f32 at a bf16 weight, and
/// one not at all.
struct Model {
  explicit Model(Device device) {
    uint64_t stream = 0;
    const auto add = [&](const char* name, const Shape& shape, DType dtype) {
      parameters.push_back({name, new_parameter(stream++, shape, dtype, device)});
      batch.push_back(Tensor::zeros(shape, DType::f32, device));
    };
    add("twice", {5, 33}, DType::f32);
    add("in_place", {128, 65}, DType::f32);
    add("half", {700}, DType::bf16);
    add("unused", {3, 4}, DType::f32);
  }

  void load(uint64_t number) {
    for (size_t i = 0; i < batch.size(); ++i)
      batch[i].copy_from(
          Tensor::from(numbers(100 + 10 * number + i, batch[i].count()), batch[i].shape()).to(DType::f32));
  }

  Tensor recorded(size_t i, bool in_place) {
    const Tensor& w = parameters[i].tensor;
    Tensor y = w.detach().clone();
    Tape::recording(w)->record("made up", {&w}, {&y}, [this, i, in_place](Backward& b) {
      const Tensor gradient = Tensor::empty(batch[i].shape(), DType::f32, batch[i].device());
      gradient.copy_from(parameters[i].tensor.detach());
      accumulate(gradient, batch[i]);
      const GradTarget target = in_place ? b.target(0) : GradTarget();
      if (!target.grad.defined()) return b.accumulate(0, gradient);
      if (target.accumulate) {
        accumulate(target.grad, gradient);
      } else {
        target.grad.copy_from(gradient);
      }
      b.written(0, target);
    });
    return y;
  }

  void micro_step() {
    Tape tape;
    const std::vector<Tensor> results{recorded(0, false), recorded(1, true), recorded(2, false),
                                      recorded(0, true)};
    std::vector<Tensor> ones;
    for (const Tensor& result : results)
      ones.push_back(Tensor::full(result.shape(), 1, result.dtype(), result.device()));
    tape.backward(results, ones);
    kept = results[1].detach();
    check(!fail, "planted in the body");
  }

  std::vector<nn::NamedParameter> parameters;
  std::vector<Tensor> batch;
  Tensor kept;  // a result that the body leaves in a handle
  bool fail = false;
};

using Trace = std::vector<std::vector<float>>;

void note(Trace& trace, const Model& model) {
  trace.push_back(model.kept.to_vector<float>());
  for (const auto& [name, tensor] : model.parameters) {
    trace.push_back(tensor.detach().to_vector<float>());
    if (const Tensor gradient = grad(tensor); gradient.defined())
      trace.push_back(gradient.to_vector<float>());
  }
}

enum class Around { eager, micro_step, micro_step_and_update, whole };

/// Steps of `micro_steps` batches each. Clears one leaf between micro-steps now and then: a mixture that no
/// graph has seen.
template <class Optimizer>
Trace train(Device device, auto options, Around around, int micro_steps) {
  Model model(device);
  Optimizer optimizer(model.parameters, options);
  const auto whole = [&] {
    model.micro_step();
    optimizer.step();
    optimizer.zero_grad();
  };
  Captured micro_step(device, [&] { model.micro_step(); }), update(device, [&] { optimizer.step(); }),
      whole_step(device, whole);
  Trace trace;
  for (int t = 0; t < 12; ++t) {
    optimizer.set_lr(0.1 / (t + 1));
    for (int micro = 0; micro < micro_steps; ++micro) {
      model.load(uint64_t(10 * t + micro));
      if (around == Around::whole) {
        whole_step();
      } else if (around == Around::eager) {
        model.micro_step();
      } else {
        micro_step();
      }
      if (t % 4 == 3 && micro == 0 && micro_steps > 1) zero_grad(model.parameters[1].tensor);
      if (around != Around::whole) note(trace, model);
    }
    if (around == Around::whole) continue;
    around == Around::micro_step_and_update ? update() : optimizer.step();
    trace.push_back({float(optimizer.grad_norm())});
    optimizer.zero_grad();
  }
  if (device.is_cuda() && around == Around::whole) {
    EXPECT_EQ(whole_step.graphs(), 1u);
  } else if (device.is_cuda() && around != Around::eager) {
    EXPECT_EQ(micro_step.graphs(), micro_steps == 1 ? 1u : 3u);
  }
  note(trace, model);
  trace.push_back({float(optimizer.grad_norm())});
  return trace;
}

class CapturedTraining : public OnDevice {};

template <class Optimizer>
void equals_eager(Device device, auto options) {
  for (const int micro_steps : {1, 3}) {
    const Trace eager = train<Optimizer>(device, options, Around::eager, micro_steps);
    for (const Around around : {Around::micro_step, Around::micro_step_and_update})
      EXPECT_EQ(train<Optimizer>(device, options, around, micro_steps), eager) << micro_steps;
    EXPECT_GT(eager.back()[0], 0);
  }
  const Trace eager = train<Optimizer>(device, options, Around::eager, 1),
              whole = train<Optimizer>(device, options, Around::whole, 1);
  // A whole step is seen at its end only.
  EXPECT_EQ(whole, Trace(eager.end() - std::ptrdiff_t(whole.size()), eager.end()));
}

TEST_P(CapturedTraining, WithSgdEqualsEager) {
  equals_eager<Sgd>(device(), SgdOptions{.weight_decay = 0.1});
}

TEST_P(CapturedTraining, WithMomentumEqualsEager) {
  equals_eager<Sgd>(device(), SgdOptions{.momentum = 0.9, .nesterov = true, .max_grad_norm = 3});
}

TEST_P(CapturedTraining, WithAdamWEqualsEager) {
  equals_eager<AdamW>(device(), AdamWOptions{.max_grad_norm = 5});
}

TEST_P(CapturedTraining, ACaptureThatThrowsLeavesGradientsAsTheyWere) {
  if (device().is_cpu()) GTEST_SKIP() << "nothing is captured on the CPU";
  for (const bool adds : {false, true}) {
    Model model(device());
    Sgd optimizer(model.parameters);
    Captured step(device(), [&] { model.micro_step(); });
    model.load(1);
    step();
    if (!adds) optimizer.zero_grad();
    Trace before, after;
    note(before, model);
    const Tensor kept = model.kept;
    model.fail = true;
    EXPECT_EQ(message_of([&] { step(); }), "planted in the body");
    model.kept = kept;
    note(after, model);
    EXPECT_EQ(after, before);
    model.fail = false;
    Model expected(device());
    expected.load(1);
    if (adds) expected.micro_step();
    for (int t = 2; t < 6; ++t) {
      model.load(uint64_t(t)), expected.load(uint64_t(t));
      step(), expected.micro_step();
      Trace one, other;
      note(one, model), note(other, expected);
      EXPECT_EQ(one, other) << t;
    }
    EXPECT_TRUE(step.is_graph());
  }
}

TEST_P(CapturedTraining, ABackwardPassThatThrowsRestoresGradients) {
  for (const bool adds : {false, true}) {
    Model model(device());
    Sgd optimizer(model.parameters);
    model.load(1);
    model.micro_step();
    if (!adds) optimizer.zero_grad();
    Trace before, after;
    note(before, model);
    {
      Tape tape;
      const Tensor& w = model.parameters[1].tensor;
      Tensor bad = w.detach().clone();
      tape.record("bad", {&w}, {&bad}, [](Backward&) { check(false, "planted in backward"); });
      const std::vector<Tensor> results{bad, model.recorded(1, true), model.recorded(0, false)};
      std::vector<Tensor> ones;
      for (const Tensor& result : results)
        ones.push_back(Tensor::full(result.shape(), 1, result.dtype(), result.device()));
      EXPECT_EQ(message_of([&] { tape.backward(results, ones); }), "planted in backward");
    }
    note(after, model);
    EXPECT_EQ(after, before);
  }
}

TEST_P(CapturedTraining, AnOptimizerMadeAfterTheGraphMovesTheGradients) {
  Model model(device()), expected(device());
  Captured step(device(), [&] { model.micro_step(); });
  model.load(1), expected.load(1);
  for (int i = 0; i < 4; ++i) step(), expected.micro_step();
  Sgd optimizer(model.parameters), other(expected.parameters);  // the gradients move to their arenas
  for (int t = 0; t < 4; ++t) {
    step(), expected.micro_step();
    optimizer.step(), other.step();
    Trace one, two;
    note(one, model), note(two, expected);
    EXPECT_EQ(one, two) << t;
    optimizer.zero_grad(), other.zero_grad();
  }
}

INSTANTIATE_TEST_SUITE_P(Device, CapturedTraining, testing::Values("cpu", "cuda"));

}  // namespace
}  // namespace tessera::optim
