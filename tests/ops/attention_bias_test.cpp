#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "autograd/gradcheck.h"
#include "ops/attention/attention.h"
#include "ops/attention/attention_variants.h"
#include "ops/matmul/matmul.h"
#include "ops/pointwise/pointwise.h"
#include "ops/reduce/reduce.h"
#include "ops/shape/shape.h"
#include "ops/softmax/softmax.h"
#include "tests/errors.h"
#include "tests/ops/tensors.h"

/// A bias of attention: by hand, next to the composition that it replaces, how it broadcasts and lies in
/// memory, what it hides, its gradient, and messages. The generic cases compare it with the oracle.

namespace tessera::ops {
namespace {

struct Pass {
  Tensor o, lse, grads[4];  // of q, k, v and the bias
};

/// attention with gradients of q, k, v and the bias, and the gradient `dout` of o.
Pass run(const Tensor (&in)[3], const Tensor& bias, AttentionOptions options, const Tensor& dout) {
  Tensor leaves[] = {in[0].detach(), in[1].detach(), in[2].detach(), bias.detach()};
  for (Tensor& leaf : leaves) require_grad(leaf);
  options.bias = leaves[3];
  Tape tape;
  const AttentionResult result = attention_with_lse(leaves[0], leaves[1], leaves[2], options);
  tape.backward(std::vector{result.o}, std::vector{dout});
  Pass pass{result.o.detach(), result.lse, {}};
  for (int i = 0; i < 4; ++i) pass.grads[i] = grad(leaves[i]);
  return pass;
}

double difference_of(const Tensor& a, const Tensor& b) {
  EXPECT_EQ(a.shape(), b.shape());
  const auto x = a.to_vector<double>(), y = b.to_vector<double>();
  double largest = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    if (x[i] == y[i]) continue;  // infinities
    const double difference = std::abs(x[i] - y[i]);
    largest = std::isnan(difference) ? kInf : std::max(largest, difference);
  }
  return largest;
}

/// In f64 on the CPU.
Tensor wide(const Tensor& x) {
  return x.to(kCpu).to(DType::f64);
}

TEST(AttentionBias, WorkedByHand) {
  // Scores 0 and 0, biases 0 and ln 3: weights 1/4 and 3/4. dS = P (v - o) do = (3/4, -3/4).
  Tensor q = Tensor::zeros({1, 1, 1, 1}, DType::f64), bias = row({0, std::log(3.0)});
  const Tensor k = Tensor::from({5., 7.}, {1, 2, 1, 1}), v = Tensor::from({8., 4.}, {1, 2, 1, 1});
  require_grad(bias);
  Tape tape;
  const auto [o, lse] = attention_with_lse(q, k, v, {.scale = 1, .bias = bias});
  EXPECT_NEAR(o.item(), 5, 1e-14);
  EXPECT_NEAR(lse.item(), std::log(4.0), 1e-14);
  tape.backward(o);
  EXPECT_NEAR(grad(bias).to_vector<double>()[0], 0.75, 1e-14);
  EXPECT_NEAR(grad(bias).to_vector<double>()[1], -0.75, 1e-14);
}

TEST(AttentionBias, IsWhatTheCompositionComputes) {
  // softmax(scale q k^T + bias) v of recorded operators, in f64, with all gradients; grouped heads are
  // repeated.
  for (const int64_t group : {1, 2}) {
    const int64_t heads = 4, kv_heads = heads / group;
    const Tensor in[] = {normal({2, 9, heads, 8}, 1), normal({2, 7, kv_heads, 8}, 2),
                         normal({2, 7, kv_heads, 8}, 3)};
    const Tensor bias = normal({heads, 9, 7}, 4), dout = normal({2, 9, heads, 8}, 5);
    const Pass ours = run(in, bias, {.scale = 0.3}, dout);
    Tensor leaves[] = {in[0], in[1], in[2], bias};
    for (Tensor& leaf : leaves) require_grad(leaf);
    Tape tape;
    const auto rows = [&](const Tensor& x) {  // [B, H, L, D]
      const Tensor grouped = expand(reshape(x, {2, x.size(1), x.size(2), 1, 8}),
                                    {2, x.size(1), x.size(2), heads / x.size(2), 8});
      return permute(reshape(grouped, {2, x.size(1), heads, 8}), {0, 2, 1, 3});
    };
    const Tensor scores = scale(matmul(rows(leaves[0]), transpose(rows(leaves[1]), 2, 3)), 0.3);
    const Tensor o = permute(matmul(softmax(add(scores, leaves[3])), rows(leaves[2])), {0, 2, 1, 3});
    tape.backward(std::vector{o}, std::vector{dout});
    EXPECT_LE(difference_of(ours.o, o.detach()), 1e-13);
    for (int i = 0; i < 4; ++i) EXPECT_LE(difference_of(ours.grads[i], grad(leaves[i])), 1e-13) << i;
  }
}

/// Every way to broadcast, and views, next to the bias written out: in a loop (32 keys) and in BLAS.
void expect_broadcasts(Device device, const std::vector<DType>& dtypes) {
  for (const auto& [queries, keys] : {std::pair<int64_t, int64_t>{6, 8}, {70, 75}})
    for (const DType dtype : dtypes) {
      const Tensor in[] = {uniform({3, queries, 4, 40}, dtype, 1).to(device),
                           uniform({3, keys, 2, 40}, dtype, 2).to(device),
                           uniform({3, keys, 2, 40}, dtype, 3).to(device)};
      const Tensor dout = uniform({3, queries, 4, 40}, dtype, 4).to(device);
      const Tensor even = uniform({2, keys}, dtype, 6).to(device);
      const Tensor spaced = uniform({4, queries, 2 * keys}, dtype, 7).to(device);
      const std::vector<Tensor> biases = {uniform({3, 4, queries, keys}, dtype, 5).to(device),
                                          uniform({4, queries, keys}, dtype, 5).to(device),
                                          uniform({3, 1, queries, keys}, dtype, 5).to(device),
                                          uniform({queries, keys}, dtype, 5).to(device),
                                          uniform({3, 1, 1, keys}, dtype, 5).to(device),
                                          uniform({4, 1, keys}, dtype, 5).to(device),
                                          uniform({keys}, dtype, 5).to(device),
                                          even.slice(0, 1, 2),
                                          spaced.slice(2, 0, 2 * keys, 2),
                                          spaced.slice(2, 1, 1 + keys),
                                          uniform({4, keys, queries}, dtype, 5).to(device).transpose(1, 2)};
      for (const Tensor& bias : biases) {
        SCOPED_TRACE(testing::Message()
                     << dtype << " bias " << bias.shape() << " of " << queries << " x " << keys);
        const Tensor whole = bias.expand({3, 4, queries, keys}).clone();
        const Pass ours = run(in, bias, {.causal = true}, dout),
                   want = run(in, whole, {.causal = true}, dout);
        // The same kernels read the same values.
        expect_same(ours.o, want.o, "o");
        expect_same(ours.lse, want.lse, "lse");
        for (int i = 0; i < 3; ++i) expect_same(ours.grads[i], want.grads[i], "gradient");
        ASSERT_EQ(ours.grads[3].shape(), bias.shape());
        // Each of up to 12 x 70 gradients of the bias that is written out was rounded, the sum once.
        const Tensor sum = sum_to(wide(want.grads[3]), bias.shape());
        const double most = double(whole.count() / bias.count());
        EXPECT_LE(difference_of(wide(ours.grads[3]), sum), most * epsilon(dtype)) << "dbias";
      }
    }
}

TEST(AttentionBias, Broadcasts) {
  expect_broadcasts(kCpu, {DType::f64, DType::f32, DType::bf16, DType::f16});
}

TEST(AttentionBias, BroadcastsOnAGpu) {
  if (Device::cuda_count() == 0) GTEST_SKIP() << "skipped: no GPU";
  expect_broadcasts(Device::cuda(), {DType::f32, DType::bf16, DType::f16});
}

TEST(AttentionBias, OneValueForAllKeysHasNoGradient) {
  // It changes the log-sum-exp alone, and hides whole queries.
  const Tensor in[] = {uniform({2, 40, 2, 32}, DType::f32, 1), uniform({2, 50, 2, 32}, DType::f32, 2),
                       uniform({2, 50, 2, 32}, DType::f32, 3)};
  Tensor bias = uniform({40, 1}, DType::f32, 4);
  bias.slice(0, 3, 5).fill(-kInf);
  const Tensor dout = uniform({2, 40, 2, 32}, DType::f32, 5);
  const Pass ours = run(in, bias, {}, dout), none = run(in, Tensor::zeros({40, 1}), {}, dout);
  for (const double value : ours.grads[3].to_vector<double>()) EXPECT_EQ(value, 0);
  for (int64_t i = 0; i < 40; ++i) {
    const Tensor o = ours.o.select(1, i), lse = ours.lse.select(2, i);
    if (i == 3 || i == 4) {
      for (const double value : o.to_vector<double>()) EXPECT_EQ(value, 0);
      for (const double value : lse.to_vector<double>()) EXPECT_EQ(value, -kInf);
      for (const double value : ours.grads[0].select(1, i).to_vector<double>()) EXPECT_EQ(value, 0);
    } else {
      EXPECT_LE(difference_of(o, none.o.select(1, i)), 1e-6);
      const double shift = bias.at({i, 0}).item();
      EXPECT_NEAR(lse.at({1, 1}).item(), none.lse.at({1, 1, i}).item() + shift, 1e-6);
    }
  }
}

/// Hidden keys are as if they were not there, whatever they hold, and get no gradient.
void expect_hidden(Device device, const std::vector<DType>& dtypes) {
  for (const int64_t keys : {9, 90})
    for (const DType dtype : dtypes) {
      SCOPED_TRACE(testing::Message() << dtype << ", " << keys << " keys");
      const int64_t queries = keys - 2, seen = keys - 4;
      const Tensor in[] = {uniform({2, queries, 2, 32}, dtype, 1).to(device),
                           uniform({2, keys, 2, 32}, dtype, 2).to(device),
                           uniform({2, keys, 2, 32}, dtype, 3).to(device)};
      const Tensor dout = uniform({2, queries, 2, 32}, dtype, 4).to(device);
      std::vector<bool> kept(size_t(keys), true);
      for (int64_t j = seen; j < keys; ++j) kept[size_t(j)] = false;
      const Tensor mask = Tensor::from(kept, {keys}, device);
      const Tensor some[] = {in[0], in[1].slice(1, 0, seen), in[2].slice(1, 0, seen)};
      const Pass ours = run(in, mask_bias(mask, dtype), {}, dout),
                 want = run(some, Tensor::zeros({seen}, dtype, device), {}, dout);
      // The same products; sums may be in another order.
      const double off = 8 * epsilon(DType::f32) + 2 * epsilon(dtype);
      EXPECT_LE(difference_of(ours.o, want.o), off);
      EXPECT_LE(difference_of(ours.lse, want.lse), 8 * off);
      EXPECT_LE(difference_of(ours.grads[0], want.grads[0]), 4 * off);
      for (const int i : {1, 2}) {
        EXPECT_LE(difference_of(ours.grads[i].slice(1, 0, seen), want.grads[i]), 16 * off);
        for (const double value : ours.grads[i].slice(1, seen, keys).to_vector<double>()) EXPECT_EQ(value, 0);
      }
      const auto dbias = ours.grads[3].to_vector<double>();
      for (int64_t j = seen; j < keys; ++j) EXPECT_EQ(dbias[size_t(j)], 0);
      // All keys hidden.
      const Pass blind = run(in, Tensor::full({1, keys}, -kInf, dtype, device), {}, dout);
      for (const double value : blind.lse.to_vector<double>()) EXPECT_EQ(value, -kInf);
      for (const Tensor* zero :
           {&blind.o, &blind.grads[0], &blind.grads[1], &blind.grads[2], &blind.grads[3]})
        for (const double value : zero->to_vector<double>()) ASSERT_EQ(value, 0);
    }
}

TEST(AttentionBias, HidesKeys) {
  expect_hidden(kCpu, {DType::f64, DType::f32, DType::bf16, DType::f16});
}

TEST(AttentionBias, HidesKeysOnAGpu) {
  if (Device::cuda_count() == 0) GTEST_SKIP() << "skipped: no GPU";
  expect_hidden(Device::cuda(), {DType::f32, DType::bf16, DType::f16});
}

TEST(AttentionBias, GradientsWithHiddenPairs) {
  // Central differences through a mask that hides pairs, rows and keys.
  std::vector<bool> kept;
  for (int i = 0; i < 2 * 5 * 6; ++i) kept.push_back(i % 3 != 0 && i / 6 % 5 != 2);
  const Tensor mask = Tensor::from(kept, {2, 1, 5, 6});
  for (const bool causal : {false, true}) {
    const auto result = gradcheck(
        [&](const std::vector<Tensor>& in) {
          const Tensor bias = where(mask, in[3], mask_bias(mask, DType::f64));
          return std::vector{attention(in[0], in[1], in[2], {.causal = causal, .bias = bias})};
        },
        {normal({2, 5, 4, 3}, 1), normal({2, 6, 2, 3}, 2), normal({2, 6, 2, 3}, 3), normal({2, 4, 5, 6}, 4)});
    EXPECT_TRUE(result.ok) << result.message;
  }
}

TEST(AttentionBias, ItsGradientAloneOnAGpu) {
  // Whichever kernel sums it, it does not depend on which other gradients are wanted.
  if (Device::cuda_count() == 0) GTEST_SKIP() << "skipped: no GPU";
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const F32Math math : {F32Math::ieee, F32Math::tf32})
      for (const Shape& shape : {Shape{2, 4, 70, 75}, Shape{4, 1, 75}, Shape{70, 75}, Shape{2, 1, 70, 75}}) {
        SCOPED_TRACE(testing::Message() << dtype << " bias " << shape);
        const F32MathScope scope(math);
        const Device gpu = Device::cuda();
        const Tensor in[] = {uniform({2, 70, 4, 40}, dtype, 1).to(gpu),
                             uniform({2, 75, 2, 40}, dtype, 2).to(gpu),
                             uniform({2, 75, 2, 40}, dtype, 3).to(gpu)};
        const Tensor dout = uniform({2, 70, 4, 40}, dtype, 4).to(gpu);
        Tensor bias = uniform(shape, dtype, 5).to(gpu);
        const Pass all = run(in, bias, {.causal = true}, dout);
        require_grad(bias);
        Tape tape;
        const Tensor o = attention(in[0], in[1], in[2], {.causal = true, .bias = bias});
        tape.backward(std::vector{o}, std::vector{dout});
        expect_same(grad(bias), all.grads[3], "dbias");
      }
}

TEST(AttentionBias, LongBroadcastGradientsAreSummedInPiecesOnAGpu) {
  // More addends than pieces, and so many tiles that there is one piece: in f32, next to the bias written
  // out.
  if (Device::cuda_count() == 0) GTEST_SKIP() << "skipped: no GPU";
  struct Sizes {
    int64_t batch, queries, keys, heads;
    Shape bias;
  };
  for (const Sizes& c : {Sizes{40, 20, 18, 12, {20, 18}},
                         {40, 70, 18, 12, {18}},
                         {3, 512, 500, 8, {8, 512, 500}},
                         {3, 512, 500, 8, {8, 1, 500}}})
    for (const auto& [dtype, math] :
         {std::pair{DType::f32, F32Math::ieee}, {DType::f32, F32Math::tf32}, {DType::bf16, F32Math::ieee}})
      for (const bool causal : {false, true}) {
        SCOPED_TRACE(testing::Message() << dtype << (math == F32Math::tf32 ? " in TF32" : "") << " bias "
                                        << c.bias << " causal " << causal);
        const F32MathScope scope(math);
        const Device gpu = Device::cuda();
        const Tensor in[] = {uniform({c.batch, c.queries, c.heads, 64}, dtype, 1).to(gpu),
                             uniform({c.batch, c.keys, c.heads, 64}, dtype, 2).to(gpu),
                             uniform({c.batch, c.keys, c.heads, 64}, dtype, 3).to(gpu)};
        const Tensor bias = uniform(c.bias, dtype, 4).to(gpu),
                     dout = uniform(in[0].shape(), dtype, 5).to(gpu);
        const Shape scores{c.batch, c.heads, c.queries, c.keys};
        const Pass ours = run(in, bias, {.causal = causal}, dout),
                   want = run(in, bias.expand(scores).clone(), {.causal = causal}, dout);
        const Tensor sum = sum_to(wide(want.grads[3]), c.bias);
        double largest = 0;
        for (const double value : sum.to_vector<double>()) largest = std::max(largest, std::abs(value));
        ASSERT_GT(largest, 0.01);
        // Roundings of many addends average out; a lost or doubled addend of a few hundred shows.
        EXPECT_LE(difference_of(wide(ours.grads[3]), sum),
                  (dtype == DType::f32 ? 64 : 4) * epsilon(dtype) * largest);
        // The same bits again.
        expect_same(run(in, bias, {.causal = causal}, dout).grads[3], ours.grads[3], "dbias");
      }
}

TEST(AttentionBias, MaskBias) {
  const Tensor mask = Tensor::from(std::vector<bool>{true, false}, {2, 1});
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    const Tensor bias = mask_bias(mask, dtype);
    EXPECT_EQ(bias.dtype(), dtype);
    EXPECT_EQ(bias.shape(), mask.shape());
    EXPECT_EQ(bias.to_vector<double>(), (std::vector<double>{0, -kInf}));
  }
  EXPECT_NE(
      message_of([&] { mask_bias(Tensor::ones({2}), DType::f32); }).find("the mask is f32; expected bool"),
      std::string::npos);
  EXPECT_NE(message_of([&] { mask_bias(mask, DType::i32); }).find("dtype i32"), std::string::npos);
}

TEST(AttentionBias, Messages) {
  const Tensor q = uniform({2, 3, 2, 4}, DType::f32, 1), k = uniform({2, 5, 2, 4}, DType::f32, 2);
  const auto expect = [&](const Tensor& bias, const char* part) {
    const std::string text = message_of([&] { attention(q, k, k, {.bias = bias}); });
    EXPECT_NE(text.find(part), std::string::npos) << "\"" << text << "\" lacks \"" << part << "\"";
  };
  expect(Tensor::zeros({2, 2, 5, 3}),
         "bias is f32[2, 2, 5, 3] on cpu; expected one that broadcasts to [2, 2, 3, 5]");
  expect(Tensor::zeros({1, 2, 2, 3, 5}), "expected one that broadcasts to [2, 2, 3, 5]");
  expect(Tensor::zeros({3, 5}, DType::f64), "bias is f64[3, 5] on cpu; expected f32 on cpu, as q (see cast)");
  expect(Tensor::zeros({3, 5}, DType::boolean), "expected f32 on cpu, as q (mask_bias makes one of a mask)");
  const Tensor rows = uniform({6, 2, 4}, DType::f32, 3), starts = Tensor::from({0, 2, 6}, {3});
  EXPECT_NE(message_of([&] {
              attention(rows, rows, rows, AttentionSequences{starts}, {.bias = Tensor::zeros({6})});
            }).find("a bias cannot be combined with packed sequences; pad them"),
            std::string::npos);
}

TEST(AttentionBias, RunsOnTheVariantThatTakesIt) {
  AttentionProblem problem;
  DeviceInfo info;
  info.name = "NVIDIA H200";
  info.major = 9, info.minor = 0;
  const Gpu gpu(info, 132);
  const Tensor x = Tensor::empty({1, 256, 4, 64}, DType::bf16);
  for (const bool forward : {true, false}) {
    problem.bias = {};
    EXPECT_EQ(attention_variant(forward, {&x, &x, &x, &x}, problem, gpu), "wgmma");
    problem.bias = Tensor::zeros({1}, DType::bf16).reshape({1, 1, 1, 1}).expand({1, 4, 256, 256});
    EXPECT_EQ(attention_variant(forward, {&x, &x, &x, &x}, problem, gpu), "mma");
    const ForceVariant force("attention", "wgmma");
    EXPECT_NE(message_of([&] {
                attention_variant(forward, {&x, &x, &x, &x}, problem, gpu);
              }).find("no bias"),
              std::string::npos);
  }
}

}  // namespace
}  // namespace tessera::ops
