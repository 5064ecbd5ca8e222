#include "ops/embedding/embedding.h"

#include <gtest/gtest.h>

#include <cmath>

#include "ops/variant.h"
#include "tests/errors.h"
#include "tests/ops/expect.h"

namespace tessera::ops {
namespace {

Tensor table_of(int64_t rows, int64_t width, Device device) {
  std::vector<float> values(size_t(rows * width));
  for (size_t i = 0; i < values.size(); ++i) values[i] = float(i) + 0.5f;
  return Tensor::from(values, {rows, width}, device);
}

TEST(Embedding, CopiesRowsForIndicesOfAnyRankAndWidth) {
  for (const Device device : devices()) {
    const Tensor table = table_of(4, 2, device);
    const Tensor y = embedding(table, Tensor::from(std::vector<int32_t>{3, 0, 0, 2}, {2, 2}, device));
    EXPECT_EQ(y.shape(), (Shape{2, 2, 2}));
    EXPECT_EQ(y.to_vector<float>(), (std::vector<float>{6.5f, 7.5f, 0.5f, 1.5f, 0.5f, 1.5f, 4.5f, 5.5f}));
    const Tensor one = embedding(table, Tensor::from(std::vector<int64_t>{1}, {}, device));
    EXPECT_EQ(one.shape(), Shape{2});
    EXPECT_EQ(one.to_vector<float>(), (std::vector<float>{2.5f, 3.5f}));
  }
}

TEST(Embedding, GradientsOfRepeatedIndicesAddUpAndOthersAreZero) {
  for (const Device device : devices()) {
    const Tensor table = table_of(4, 3, device);
    const Tensor indices = Tensor::from(std::vector<int64_t>{2, 0, 2, 2}, {4}, device);
    const Tensor dy =
        Tensor::from(std::vector<float>{1, 2, 3, 10, 20, 30, 4, 5, 6, 100, 200, 300}, {4, 3}, device);
    const auto f = [&](const Tensor& in) { return embedding(in, indices); };
    const std::vector<float> expected{10, 20, 30, 0, 0, 0, 105, 207, 309, 0, 0, 0};
    EXPECT_EQ(gradient_of(table, dy, f).to_vector<float>(), expected);
    EXPECT_EQ(gradient_of(table, transposed_copy(dy), f).to_vector<float>(), expected);
  }
}

TEST(Embedding, AFrequentIndexIsSummedExactly) {
  // 0 + 1 + ... + 999 = 499500, below 2^24: exact in f32 in any order, unless a term is lost or counted
  // twice.
  for (const Device device : devices()) {
    std::vector<float> terms(1000);
    for (size_t i = 0; i < terms.size(); ++i) terms[i] = float(i);
    const Tensor dy = Tensor::from(terms, {1000, 1}, device).expand({1000, 5});
    const Tensor indices = Tensor::full({1000}, 1, DType::i64, device);
    const auto dtable = gradient_of(table_of(3, 5, device), dy, [&](const Tensor& in) {
                          return embedding(in, indices);
                        }).to_vector<float>();
    for (size_t i = 0; i < 15; ++i) EXPECT_EQ(dtable[i], i / 5 == 1 ? 499500.0f : 0.0f) << i;
  }
}

TEST(Embedding, TheGradientOfAHalfPrecisionTableIsSummedInF32) {
  // 300 ones: bf16 would stop at 256, where 1 is half of its last place.
  for (const Device device : devices()) {
    Tensor table = Tensor::zeros({2, 3}, DType::bf16, device);
    require_grad(table, DType::f32);
    Tape tape;
    const std::vector<Tensor> y{embedding(table, Tensor::zeros({300}, DType::i64, device))};
    const std::vector<Tensor> dy{Tensor::full({300, 3}, 1.0, DType::bf16, device)};
    tape.backward(y, dy);
    EXPECT_EQ(grad(table).to_vector<float>(), (std::vector<float>{300, 300, 300, 0, 0, 0}));
  }
}

TEST(Embedding, AddsToAGradientThatIsThere) {
  // A leaf's buffer from another use of the table, and from the pass before; frequent, seldom and absent
  // rows.
  for (const Device device : devices())
    for (const char* variant : {"one launch", "count", "sort"}) {
      const ForceVariant force("embedding", variant);
      Tensor table = table_of(5, 3, device);
      require_grad(table);
      std::vector<int64_t> many(200, 1);
      many[7] = 3;
      const Tensor first = Tensor::from(std::vector<int64_t>{0, 3}, {2}, device),
                   second = Tensor::from(many, {200}, device);
      for (int pass = 1; pass <= 2; ++pass) {
        Tape tape;
        const std::vector<Tensor> y{embedding(table, second), embedding(table, first)};
        const std::vector<Tensor> dy{Tensor::full({200, 3}, 1, DType::f32, device),
                                     Tensor::full({2, 3}, 10, DType::f32, device)};
        tape.backward(y, dy);
        const float p = float(pass);
        std::vector<float> expected;
        for (const float value : {10 * p, 199 * p, 0.0f, 11 * p, 0.0f})
          expected.insert(expected.end(), 3, value);
        EXPECT_EQ(grad(table).to_vector<float>(), expected) << variant;
      }
    }
}

TEST(Embedding, AnIndexOutOfRangeIsAnErrorOnTheCpu) {
  const Tensor table = table_of(4, 2, Device::cpu());
  EXPECT_EQ(message_of([&] {
              embedding(table, Tensor::from(std::vector<int64_t>{0, 3, 4}, {3}));
            }),
            "embedding: index 4 at position 2 of indices i64[3] on cpu is outside [0, 4), the rows of table "
            "f32[4, 2] on cpu");
  EXPECT_EQ(message_of([&] { embedding(table, Tensor::from(std::vector<int32_t>{-1}, {1})); }),
            "embedding: index -1 at position 0 of indices i32[1] on cpu is outside [0, 4), the rows of table "
            "f32[4, 2] on cpu");
}

TEST(Embedding, AnIndexOutOfRangeIsANaNRowOnAGpu) {
  if (Device::cuda_count() == 0) GTEST_SKIP() << "skipped: no GPU";
  const Device gpu = Device::cuda(0);
  const Tensor table = table_of(4, 2, gpu);
  const Tensor indices = Tensor::from(std::vector<int64_t>{3, 4, -1}, {3}, gpu);
  const auto y = embedding(table, indices).to_vector<float>();
  for (size_t i = 0; i < 6; ++i) EXPECT_EQ(std::isnan(y[i]), i >= 2) << i;
  const auto dtable = gradient_of(table, Tensor::full({3, 2}, 1.0, DType::f32, gpu), [&](const Tensor& in) {
                        return embedding(in, indices);
                      }).to_vector<float>();
  EXPECT_EQ(dtable, (std::vector<float>{0, 0, 0, 0, 0, 0, 1, 1}));
}

TEST(Embedding, ErrorsNameWhatIsWrong) {
  const Tensor table = table_of(4, 2, Device::cpu());
  const Tensor indices = Tensor::zeros({2}, DType::i64, Device::cpu());
  EXPECT_EQ(message_of([&] { embedding(table, Tensor()); }), "embedding: indices is undefined");
  EXPECT_EQ(message_of([&] { embedding(table.select(0, 0), indices); }),
            "embedding: table is f32[2] on cpu; expected [V, C]");
  EXPECT_EQ(message_of([&] { embedding(table, table); }),
            "embedding: indices is f32[4, 2] on cpu; expected i64 or i32");
}

TEST(Embedding, ARowOfManyIndicesIsSummedInDoubleOnTheCpu) {
  // Added in f32, a million equal terms that are no powers of two are off by more than 1e-4.
  constexpr int64_t kLength = 1'000'000;
  const Tensor indices = Tensor::full({kLength}, 1, DType::i64, Device::cpu());
  const Tensor table = Tensor::zeros({3, 1}, DType::f32, Device::cpu()),
               dy = Tensor::full({kLength, 1}, 0.1, DType::f32, Device::cpu());
  const auto dtable = gradient_of(table, dy, [&](const Tensor& rows) { return embedding(rows, indices); });
  EXPECT_EQ(dtable.to_vector<float>(), (std::vector<float>{0, float(kLength * double(0.1f)), 0}));
}

}  // namespace
}  // namespace tessera::ops
