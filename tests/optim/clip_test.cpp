#include "optim/clip.h"

#include <cmath>

#include "gradients.h"
#include "optim/sgd.h"
#include "tests/errors.h"
#include "tests/tensors.h"

namespace tessera::optim {
namespace {

class ClipOn : public OnDevice {};
INSTANTIATE_TEST_SUITE_P(Device, ClipOn, testing::Values("cpu", "cuda"));

/// Rank 0 and 1, padded rows, several norm blocks, nothing.
const std::vector<Shape> kShapes{{}, {5}, {3, 5}, {6, 1365}, {70000}, {0, 7}};

std::vector<nn::NamedParameter> shaped_parameters(Device device, DType dtype) {
  std::vector<nn::NamedParameter> list;
  for (size_t i = 0; i < kShapes.size(); ++i)
    list.push_back({"p" + std::to_string(i), new_parameter(i, kShapes[i], dtype, device)});
  return list;
}

/// A gradient for all of them but one.
void arrive_at(const std::vector<nn::NamedParameter>& list) {
  for (size_t i = 0; i < list.size(); ++i)
    if (i != 1) arrive(list[i].tensor, gradient_of(i, 0, kShapes[i]));
}

TEST_P(ClipOn, EqualsThatOfAnOptimizerBitForBit) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const std::vector<nn::NamedParameter> own = shaped_parameters(device(), dtype),
                                          other = shaped_parameters(device(), dtype);
    Sgd plain(own, {.lr = 1}), clips(other, {.lr = 1, .max_grad_norm = 0.5});
    arrive_at(own), arrive_at(other);
    const double norm = clip_grad_norm(own, 0.5).item();
    plain.step(), clips.step();
    EXPECT_EQ(norm, clips.grad_norm());
    EXPECT_NEAR(plain.grad_norm(), 0.5, 1e-6);
    for (size_t i = 0; i < own.size(); ++i)
      EXPECT_TRUE(same_bits(own[i].tensor.detach().to(kCpu), other[i].tensor.detach().to(kCpu)))
          << own[i].name;
  }
}

TEST_P(ClipOn, GradientsBelowTheNormKeepTheirBits) {
  const std::vector<nn::NamedParameter> list = shaped_parameters(device(), DType::f32);
  arrive_at(list);
  std::vector<Tensor> before;
  for (const auto& [name, tensor] : list)
    before.push_back(grad(tensor).defined() ? grad(tensor).clone().to(kCpu) : Tensor());
  clip_grad_norm(list, 1e6);
  for (size_t i = 0; i < list.size(); ++i) {
    const Tensor gradient = grad(list[i].tensor);
    ASSERT_EQ(gradient.defined(), before[i].defined());
    if (gradient.defined()) EXPECT_TRUE(same_bits(gradient.to(kCpu), before[i])) << list[i].name;
  }
}

TEST(Clip, WithoutGradientsTheNormIsZero) {
  const std::vector<nn::NamedParameter> list{{"p", new_parameter(1, {3}, DType::f32, kCpu)}};
  EXPECT_EQ(clip_grad_norm(list, 1).item(), 0);
  EXPECT_FALSE(grad(list[0].tensor).defined());
}

TEST(Clip, AGradientThatIsNotFiniteMakesAnOptimizerSkip) {
  for (const double bad : {double(INFINITY), double(NAN)}) {
    const Tensor weight = new_parameter(1, {3}, DType::f32, kCpu);
    const std::vector<double> before = values(weight.detach());
    Sgd sgd({{"p", weight}}, {.lr = 1});
    arrive(weight, Tensor::from({1.0, bad, 2.0}, {3}));
    EXPECT_FALSE(std::isfinite(clip_grad_norm(sgd.parameters(), 1).item()));
    sgd.step();
    EXPECT_EQ(sgd.skipped(), 1);
    EXPECT_EQ(values(weight.detach()), before);
  }
}

TEST(Clip, RefusesWhatHasNoNorm) {
  const Tensor weight = new_parameter(1, {3}, DType::f32, kCpu);
  expect_parts(message_of([&] {
                 clip_grad_norm({{"p", weight}}, 0);
               }),
               {"max_grad_norm = 0 must be positive"});
  expect_parts(message_of([&] { clip_grad_norm({}, 1); }), {"there is no parameter"});
  expect_parts(message_of([&] {
                 clip_grad_norm({{"p", weight.detach()}}, 1);
               }),
               {"p f32[3]", "requires no gradient"});
}

}  // namespace
}  // namespace tessera::optim
