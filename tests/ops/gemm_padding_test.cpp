#include "ops/gemm/gemm_padding.h"

#include <gtest/gtest.h>

#include <cmath>

#include <functional>
#include <limits>
#include <optional>
#include "autograd/tape.h"

#include "ops/grouped_linear/grouped_linear.h"
#include "ops/linear/linear.h"
#include "ops/mlp/mlp.h"
#include "runtime/capture.h"
#include "tests/ops/guarded.h"

/// 16-bit products with odd extents. Everything is made of small integers, so that sums are exact in f32 and
/// the f32 product of the CPU, rounded to the result's dtype, is the only right answer. Fresh blocks are
/// poisoned with NaN: a pad that is summed shows.

namespace tessera::ops {
namespace {

constexpr int kAsItLies = 0, kRounded = 1;  // of gemm_variants()

Tensor small_integers(const Shape& shape, int64_t seed) {
  std::vector<float> values(size_t(shape.count()));
  for (size_t i = 0; i < values.size(); ++i) values[i] = float((int64_t(i) * 7 + seed) % 11 - 5);
  return Tensor::from(values, shape);
}

TEST(GemmPadding, RoundsInPlaceWhereThatTakesNoCopyAndNoZeros) {
  const Device cpu = Device::cpu();
  const auto rounds = [&](const Tensor& d, const Tensor& a, const Tensor& b, const MultiplyOptions& options,
                          bool transpose_a, bool transpose_b) {
    return rounds_in_place({d, a, b, options, transpose_a, transpose_b, false});
  };
  const auto make = [&](int64_t rows, int64_t columns) {
    return Tensor::empty({rows, columns}, DType::bf16, cpu);
  };
  const Tensor a = make(40, 16), b = make(16, 27), d = make(40, 27);
  EXPECT_TRUE(rounds(d, a, b, {}, false, false)) << "odd columns that end in row padding";
  EXPECT_FALSE(rounds(make(40, 32), a, make(16, 32), {}, false, false)) << "nothing is odd";
  EXPECT_FALSE(rounds(make(40, 64).slice(1, 0, 27), a, b, {}, false, false)) << "other elements follow";
  EXPECT_FALSE(rounds(d, a, b, {.bias = Tensor::empty({27}, DType::bf16, cpu)}, false, false))
      << "the bias is copied";
  EXPECT_FALSE(rounds(d, make(40, 15), make(15, 27), {}, false, false)) << "k would need zeros";
  EXPECT_FALSE(rounds(d, a, make(27, 16).transpose(0, 1), {}, false, true))
      << "rows of b would be read past its end";
  const Tensor x = make(50, 27);
  EXPECT_TRUE(rounds(make(40, 27), make(50, 40).transpose(0, 1), x, {}, true, false)) << "a gradient";
  EXPECT_FALSE(rounds(make(41, 27), make(50, 41).transpose(0, 1), x, {}, true, false))
      << "its rows have no padding";
}

TEST(GemmPadding, StoragesKnowTheirPads) {
  const Device cpu = Device::cpu();
  const Tensor pitched = Tensor::empty({2, 3, 9}, DType::bf16, cpu);
  EXPECT_EQ(pitched.storage()->row_bytes, 18);
  EXPECT_EQ(pitched.storage()->pitch_bytes, 32);
  EXPECT_EQ(pitched.storage()->bytes, 6u * 32u) << "the last row's pads are inside";
  for (const Tensor& none :
       {Tensor::empty({3, 16}, DType::bf16, cpu), Tensor::empty({3, 7}, DType::bf16, cpu),
        Tensor::empty({9}, DType::bf16, cpu), Tensor::empty_packed({3, 9}, DType::bf16, cpu)})
    EXPECT_EQ(none.storage()->pitch_bytes, 0) << none.shape();
}

class GemmPaddingCuda : public GuardedCuda<0> {
 protected:
  enum class Place { own_row_padding, packed, neighbours };

  /// `x` on the GPU, lying as `place` says; a frame's other elements are `around`.
  static Tensor placed(const Tensor& x, DType dtype, Place place, double around, Tensor* frame = nullptr) {
    Tensor y;
    if (place == Place::own_row_padding) {
      y = Tensor::empty(x.shape(), dtype, gpu());
    } else if (place == Place::packed) {
      y = Tensor::empty_packed(x.shape(), dtype, gpu());
    } else {
      // On a 16-byte boundary, with the neighbour's elements where pads would be.
      const int64_t columns = x.size(-1);
      const Tensor wide = Tensor::full(x.shape().with(-1, (columns + 7) / 8 * 8 + 16), around, dtype, gpu());
      if (frame) *frame = wide;
      y = wide.slice(-1, 8, 8 + columns);
    }
    y.copy_from(x);
    return y;
  }
};

TEST_F(GemmPaddingCuda, EveryOrientationAndPlaceIsExact) {
  for (const int row : {-1, kRounded})
    for (const DType dtype : {DType::bf16, DType::f16})
      for (const auto& [m, n, k] : {std::array<int64_t, 3>{33, 65, 129},
                                    {7, 171, 40},
                                    {64, 9, 13},
                                    {5, 3, 17},
                                    {1, 11, 9},
                                    {130, 24, 85},
                                    {12, 12, 12}})
        for (const int flags : {0, 1, 2, 3, 4, 5, 6, 7})
          for (const DType out : {dtype, DType::f32})
            for (const Place place : {Place::own_row_padding, Place::packed, Place::neighbours}) {
              const bool ta = flags & 1, tb = flags & 2, accumulate = flags & 4;
              std::optional<ForceVariant> force;
              if (row >= 0) force.emplace("gemm", gemm_variants()[size_t(row)]);
              const Tensor a = small_integers(ta ? Shape{k, m} : Shape{m, k}, 1),
                           b = small_integers(tb ? Shape{n, k} : Shape{k, n}, 2),
                           d = small_integers({m, n}, 3);
              const auto oriented = [](const Tensor& x, bool t) { return t ? x.transpose(0, 1) : x; };
              const double nan = std::numeric_limits<double>::quiet_NaN();
              const Tensor left = placed(a, dtype, place, nan), right = placed(b, dtype, place, nan);
              Tensor frame;
              const Tensor result = placed(d, out, place, 77, &frame);
              const MultiplyOptions options{.alpha = -0.5, .accumulate = accumulate};
              multiply(d, oriented(a, ta), oriented(b, tb), options);
              multiply(result, oriented(left, ta), oriented(right, tb), options);
              // Added to 16-bit numbers in place, cuBLASLt may round the product before the sum: one ulp.
              const double ulp = accumulate && out == dtype ? epsilon(out) : 0;
              const auto got = result.to_vector<double>(), want = d.to(out).to_vector<double>();
              for (size_t i = 0; i < want.size(); ++i)
                ASSERT_LE(std::abs(got[i] - want[i]), ulp * std::abs(want[i]))
                    << dtype << " to " << out << " " << m << " " << n << " " << k << " flags " << flags
                    << " place " << int(place) << " row " << row << " element " << i;
              EXPECT_EQ(left.to_vector<double>(), a.to_vector<double>());
              EXPECT_EQ(right.to_vector<double>(), b.to_vector<double>());
              if (!frame.defined()) continue;
              const auto values = frame.to_vector<double>();
              const int64_t width = frame.size(1);
              for (int64_t i = 0; i < int64_t(values.size()); ++i)
                if (i % width < 8 || i % width >= 8 + n)
                  ASSERT_EQ(values[size_t(i)], 77) << "a neighbour of d was overwritten: " << i;
            }
}

TEST_F(GemmPaddingCuda, NeighboursOfOperandsSurvive) {
  const ForceVariant force("gemm", "cublas padded");
  for (const bool tb : {false, true}) {
    Tensor frame_a, frame_b;
    const Tensor a = placed(small_integers({40, 13}, 1), DType::bf16, Place::neighbours, 77, &frame_a);
    const Tensor b = placed(small_integers(tb ? Shape{9, 13} : Shape{13, 9}, 2), DType::bf16,
                            Place::neighbours, 77, &frame_b);
    const auto before_a = frame_a.to_vector<double>(), before_b = frame_b.to_vector<double>();
    multiply(Tensor::empty({40, 9}, DType::bf16, gpu()), a, tb ? b.transpose(0, 1) : b);
    EXPECT_EQ(frame_a.to_vector<double>(), before_a);
    EXPECT_EQ(frame_b.to_vector<double>(), before_b);
  }
}

TEST_F(GemmPaddingCuda, ReadingDoesNotCountAsWriting) {
  const ForceVariant force("gemm", "cublas padded");
  const Tensor a = small_integers({40, 13}, 1).to(DType::bf16).to(gpu()),
               b = small_integers({9, 13}, 2).to(DType::bf16).to(gpu());
  const uint64_t version_a = a.version(), version_b = b.version();
  multiply(Tensor::empty({40, 9}, DType::bf16, gpu()), a, b.transpose(0, 1));
  EXPECT_EQ(a.version(), version_a);
  EXPECT_EQ(b.version(), version_b);
}

TEST_F(GemmPaddingCuda, BiasesAndBatchesAreExact) {
  for (const int row : {-1, kAsItLies, kRounded}) {
    std::optional<ForceVariant> force;
    if (row >= 0) force.emplace("gemm", gemm_variants()[size_t(row)]);
    for (const bool grouped : {false, true})
      for (const Place place : {Place::own_row_padding, Place::neighbours}) {
        const Tensor a = small_integers({3, 10, 13}, 1), b = small_integers({3, 19, 13}, 2),
                     bias = small_integers(grouped ? Shape{3, 1, 19} : Shape{19}, 3);
        const Tensor d = Tensor::empty({3, 10, 19}, DType::f32, Device::cpu());
        multiply(d, a, b.transpose(1, 2), {.bias = bias});
        const Tensor result = placed(d, DType::bf16, place, 77);
        result.fill(std::numeric_limits<double>::quiet_NaN());
        multiply(result, placed(a, DType::bf16, place, 77), placed(b, DType::bf16, place, 77).transpose(1, 2),
                 {.bias = bias.to(DType::bf16).to(gpu())});
        // A bias that d starts as is added in f32 as well: one rounding either way.
        EXPECT_EQ(result.to_vector<double>(), d.to(DType::bf16).to_vector<double>())
            << "row " << row << " grouped " << grouped << " place " << int(place);
      }
  }
}

TEST_F(GemmPaddingCuda, OneMatrixForAWholeBatchIsCopiedOnce) {
  const ForceVariant force("gemm", "cublas padded");
  const Tensor a = small_integers({13, 10}, 1), b = small_integers({2, 3, 9, 13}, 2);
  const Tensor d = Tensor::empty({2, 3, 10, 9}, DType::f32, Device::cpu());
  multiply(d, a.transpose(0, 1), b.transpose(2, 3));
  const Tensor result = Tensor::empty(d.shape(), DType::f16, gpu());
  multiply(result, a.to(DType::f16).to(gpu()).transpose(0, 1), b.to(DType::f16).to(gpu()).transpose(2, 3));
  EXPECT_EQ(result.to_vector<double>(), d.to(DType::f16).to_vector<double>());
}

TEST_F(GemmPaddingCuda, SumsOverGroupsTakePadsAsColumns) {
  const Tensor dy = small_integers({10, 3, 13}, 1), weight = small_integers({3, 13, 9}, 2);
  const Tensor by_group = dy.transpose(0, 1);
  for (const bool accumulate : {false, true}) {
    const Tensor dx = small_integers({10, 9}, 4), result = dx.to(DType::bf16).to(gpu());
    const Tensor left = dy.to(DType::bf16).to(gpu()).transpose(0, 1),
                 right = weight.to(DType::bf16).to(gpu());
    EXPECT_TRUE(sum_is_one_gemm(result, left, right));
    EXPECT_FALSE(sum_is_one_gemm(
        result, dy.to(DType::bf16).packed().to(gpu()).slice(2, 0, 11).transpose(0, 1), right.slice(1, 0, 11)))
        << "elements lie where pads would";
    multiply_sum(dx, by_group, weight, accumulate);
    multiply_sum(result, left, right, accumulate);
    EXPECT_EQ(result.to_vector<double>(), dx.to(DType::bf16).to_vector<double>()) << accumulate;
  }
}

/// Every gradient, and the output, of an operator on integers. Gradients arrive twice: the second pass adds.
std::vector<std::vector<double>> results_of(std::vector<Tensor> inputs, DType dtype, Device device,
                                            const std::function<Tensor(const std::vector<Tensor>&)>& run) {
  std::vector<std::vector<double>> results;
  for (Tensor& input : inputs) {
    input = input.to(dtype).to(device);
    require_grad(input, DType::f32);
  }
  for (int pass = 0; pass < 2; ++pass) {
    Tape tape;
    const Tensor y = run(inputs);
    const Tensor dy = small_integers(y.shape(), 6).to(y.dtype()).to(device);
    if (pass == 0) results.push_back(y.detach().to_vector<double>());
    tape.backward(std::vector{y}, std::vector{dy});
  }
  for (const Tensor& input : inputs) results.push_back(grad(input).to_vector<double>());
  return results;
}

TEST_F(GemmPaddingCuda, LayersAgreeWithTheCpu) {
  // Few enough rows and values that outputs, too, are integers below 256: exact in bf16, so that nothing
  // depends on where it is rounded.
  const auto small = [](const Shape& shape, int64_t seed) {
    std::vector<float> values(size_t(shape.count()));
    for (size_t i = 0; i < values.size(); ++i)
      values[i] = (int64_t(i) * 5 + seed) % 7 == 0 ? 1.0f : (int64_t(i) * 3 + seed) % 11 == 0 ? -1.0f : 0.0f;
    return Tensor::from(values, shape);
  };
  struct Layer {
    const char* name;
    std::vector<Tensor> inputs;
    std::function<Tensor(const std::vector<Tensor>&)> run;
  };
  const std::vector<Layer> layers = {
      {"linear",
       {small({21, 33}, 1), small({19, 33}, 2), small({19}, 3)},
       [](const std::vector<Tensor>& in) { return linear(in[0], in[1], in[2]); }},
      {"mlp",
       {small({21, 16}, 1), small({43, 16}, 2), small({11, 43}, 3), small({43}, 4)},
       [](const std::vector<Tensor>& in) { return mlp(in[0], in[1], in[2], Activation::relu, in[3]); }},
      {"grouped_linear, shared",
       {small({21, 16}, 1), small({3, 19, 16}, 2), small({3, 19}, 3)},
       [](const std::vector<Tensor>& in) { return grouped_linear(in[0], in[1], in[2], true); }},
      {"grouped_linear",
       {small({21, 3, 19}, 1), small({3, 5, 19}, 2), small({3, 5}, 3)},
       [](const std::vector<Tensor>& in) { return grouped_linear(in[0], in[1], in[2], false); }}};
  for (const Layer& layer : layers) {
    const auto want = results_of(layer.inputs, DType::f32, Device::cpu(), layer.run);
    for (const int row : {-1, kAsItLies, kRounded}) {
      std::optional<ForceVariant> force;
      if (row >= 0) force.emplace("gemm", gemm_variants()[size_t(row)]);
      EXPECT_EQ(results_of(layer.inputs, DType::bf16, gpu(), layer.run), want)
          << layer.name << " row " << row;
    }
  }
}

TEST_F(GemmPaddingCuda, GradientsInAnArenaKeepToTheirPlaces) {
  const ForceVariant force("gemm", "cublas padded");
  Tensor weight = small_integers({19, 13}, 1).to(DType::bf16).to(gpu());
  require_grad(weight, DType::f32);
  const Tensor arena = Tensor::full({19 * 16 + 64}, 77, DType::f32, gpu());
  Layout place = Layout::pitched({19, 13}, 16);
  place.offset = 32;
  set_grad_buffer(weight, Tensor::view_of(arena.storage(), place, DType::f32));
  const Tensor x = small_integers({40, 13}, 2), dy = small_integers({40, 19}, 3);
  const Tensor want = Tensor::empty({19, 13}, DType::f32, Device::cpu());
  multiply(want, dy.transpose(0, 1), x);
  for (int pass = 1; pass <= 2; ++pass) {
    Tape tape;
    const Tensor y = linear(x.to(DType::bf16).to(gpu()), weight, {});
    tape.backward(std::vector{y}, std::vector{dy.to(DType::bf16).to(gpu())});
    const auto values = arena.to_vector<double>(), sums = want.to_vector<double>();
    for (int64_t i = 0; i < int64_t(values.size()); ++i) {
      const int64_t row = (i - 32) / 16, column = (i - 32) % 16;
      const bool inside = i >= 32 && row < 19 && column < 13;
      ASSERT_EQ(values[size_t(i)], inside ? pass * sums[size_t(row * 13 + column)] : 77) << i;
    }
  }
}

TEST_F(GemmPaddingCuda, LargeProductsAreRoundedAndCaptured) {
  const ForceVariant force("gemm", "cublas padded");
  const Tensor x = small_integers({4096, 512}, 1).to(gpu()),
               weight = small_integers({1365, 512}, 2).to(gpu()),
               dy = small_integers({4096, 1365}, 3).to(gpu());
  struct Product {
    Tensor a, b;
  };
  for (const Product& p : {Product{x, weight.transpose(0, 1)}, {dy, weight}, {dy.transpose(0, 1), x}}) {
    const Tensor want = Tensor::empty({p.a.size(0), p.b.size(1)}, DType::f32, gpu());
    multiply(want, p.a, p.b);
    // Tensor::to would change the layout of a transposed view.
    const auto half = [](const Tensor& t) {
      const bool turned = t.layout().stride(1) != 1;
      const Tensor y = (turned ? t.transpose(0, 1) : t).to(DType::bf16);
      return turned ? y.transpose(0, 1) : y;
    };
    const Tensor a = half(p.a), b = half(p.b), y = Tensor::empty(want.shape(), DType::f32, gpu());
    gpu().allocator().set_guard(0);  // guards are checked on the host, which a capture forbids
    Captured step(gpu(), [&] { multiply(y, a, b); });
    for (int call = 0; call < 3; ++call) {
      y.fill(std::numeric_limits<double>::quiet_NaN());
      step();
      EXPECT_EQ(y.to_vector<double>(), want.to_vector<double>()) << want.shape() << " call " << call;
    }
    EXPECT_TRUE(step.is_graph());
    EXPECT_GT(step.nodes(), 1u) << "it was not rounded";
    gpu().allocator().set_guard(4096);
  }
}

}  // namespace
}  // namespace tessera::ops
