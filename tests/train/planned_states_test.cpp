#include <gtest/gtest.h>

#include "nn/module.h"
#include "plan/plan.h"
#include "train/training_settings.h"

namespace tessera::train {
namespace {

TEST(PlannedStates, AreWhatTheOptimizerTakes) {
  constexpr double kCount = 1 << 16;
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const char* const optimizer : {"adamw", "sgd"})
      for (const double momentum : {0.0, 0.9})
        for (const char* const states : {"f32", "bf16"}) {
          Tensor weight = Tensor::zeros({256, 256}, dtype, Device::cpu());
          nn::make_parameter(weight);
          TrainingSettings settings;
          settings.optimizer = optimizer, settings.momentum = momentum, settings.optimizer_states = states;
          const optim::Optimizer made = settings.make_optimizer({{"weight", weight}}, dtype);
          const plan::Memory of_adamw{.gradients = 4 * kCount,
                                      .optimizer = (dtype == DType::f32 ? 8 : 12) * kCount};
          const plan::Memory planned = settings.planned(of_adamw);
          EXPECT_EQ(double(made.bytes()), planned.gradients + planned.optimizer)
              << optimizer << ", momentum " << momentum << ", " << dtype << ", states " << states;
        }
}

}  // namespace
}  // namespace tessera::train
