#include <gtest/gtest.h>

#include <vector>

#include "gradients.h"
#include "nn/mlp.h"
#include "ops/pointwise/pointwise.h"
#include "ops/random/random.h"
#include "ops/reduce/reduce.h"
#include "optim/adamw.h"
#include "runtime/capture.h"

/// A model whose gradients come from the library's own kernels, which choose other tiles when they add to a
/// gradient than when they overwrite it.

namespace tessera::optim {
namespace {

std::vector<float> train_mlp(Device device, DType dtype, int micro_batches, bool captured) {
  Rng rng(3);
  const nn::Mlp model(136, 520, rng, device, {.out = 136, .dtype = dtype});
  AdamW optimizer(nn::parameters(model), {.lr = 1e-3});
  const Tensor x = Tensor::empty({300, 136}, dtype, device);
  Tensor loss;
  const auto micro_step = [&] {
    ops::fill_normal(x, 0, 1, rng);
    Tape tape;
    const Tensor y = model(model(x));  // each weight is used twice
    loss = ops::mean(ops::mul(y, y));
    tape.backward(ops::scale(loss, 1.0 / micro_batches));
  };
  Captured step(device, micro_step);
  std::vector<float> trace;
  for (int t = 0; t < 8; ++t) {
    for (int micro = 0; micro < micro_batches; ++micro) {
      captured ? step() : micro_step();
      trace.push_back(loss.item<float>());
    }
    optimizer.step();
    trace.push_back(float(optimizer.grad_norm()));
    EXPECT_GT(trace.back(), 0);
    optimizer.zero_grad();
  }
  for (const nn::NamedParameter& parameter : optimizer.parameters()) {
    const auto values = parameter.tensor.detach().to_vector<float>();
    trace.insert(trace.end(), values.begin(), values.end());
  }
  if (captured && device.is_cuda()) EXPECT_EQ(step.graphs(), micro_batches == 1 ? 1u : 2u);
  return trace;
}

class CapturedModelOn : public OnDevice {};

TEST_P(CapturedModelOn, TrainsAsEagerDoesToTheBit) {
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const int micro_batches : {1, 3})
      EXPECT_EQ(train_mlp(device(), dtype, micro_batches, true),
                train_mlp(device(), dtype, micro_batches, false))
          << dtype << ", " << micro_batches;
}

INSTANTIATE_TEST_SUITE_P(Device, CapturedModelOn, testing::Values("cpu", "cuda"));

}  // namespace
}  // namespace tessera::optim
