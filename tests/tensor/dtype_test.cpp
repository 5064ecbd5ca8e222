#include "tensor/dtype.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "ops/random/random.h"
#include "tensor/convert.h"
#include "tensor/kernels.h"
#include "tensor/tensor.h"

/// The small floats against a reference that knows only their definition: every value a format has, by ldexp,
/// and rounding as a search for the nearest of them, ties to the even pattern.

namespace tessera {
namespace {

template <class T>
struct Format;
template <>
struct Format<bf16> {
  static constexpr int kExponent = 8, kMantissa = 7;
  static constexpr bool kInfinity = true;
};
template <>
struct Format<f16> {
  static constexpr int kExponent = 5, kMantissa = 10;
  static constexpr bool kInfinity = true;
};
template <>
struct Format<f8e4m3> {
  static constexpr int kExponent = 4, kMantissa = 3;
  static constexpr bool kInfinity = false;
};

template <class T>
constexpr uint32_t kPatterns = 1u << (1 + Format<T>::kExponent + Format<T>::kMantissa);

template <class T>
T from_bits(uint32_t bits) {
  T value;
  value.bits = decltype(value.bits)(bits);
  return value;
}

template <class T>
double decode(uint32_t bits) {
  constexpr int kMantissa = Format<T>::kMantissa, kExponent = Format<T>::kExponent;
  constexpr int kBias = (1 << (kExponent - 1)) - 1, kTop = (1 << kExponent) - 1;
  const int sign = bits >= kPatterns<T> / 2 ? -1 : 1;
  const int mantissa = int(bits & ((1u << kMantissa) - 1)), exponent = int(bits >> kMantissa) & kTop;
  if (exponent == kTop && Format<T>::kInfinity)
    return mantissa ? std::numeric_limits<double>::quiet_NaN()
                    : sign * std::numeric_limits<double>::infinity();
  if (exponent == kTop && mantissa == (1 << kMantissa) - 1) return std::numeric_limits<double>::quiet_NaN();
  const double magnitude = exponent == 0
                               ? std::ldexp(mantissa, 1 - kBias - kMantissa)
                               : std::ldexp(mantissa + (1 << kMantissa), exponent - kBias - kMantissa);
  return std::copysign(magnitude, sign);
}

/// All finite values that are not negative, ascending; the pattern is the index.
template <class T>
const std::vector<double>& ladder() {
  static const std::vector<double> values = [] {
    std::vector<double> list;
    for (uint32_t bits = 0; bits < kPatterns<T> / 2 && std::isfinite(decode<T>(bits)); ++bits)
      list.push_back(decode<T>(bits));
    return list;
  }();
  return values;
}

template <class T>
uint32_t encode(double value) {
  const auto& values = ladder<T>();
  const uint32_t sign = std::signbit(value) ? kPatterns<T> / 2 : 0;
  const double magnitude = std::abs(value);
  const uint32_t largest = uint32_t(values.size() - 1);
  const double step = values[largest] - values[largest - 1];
  if (magnitude >= values[largest] + step / 2)  // a tie goes to the even pattern, which would be the next one
    return sign | (Format<T>::kInfinity ? largest + 1 : largest);
  if (magnitude >= values[largest]) return sign | largest;
  const auto above = uint32_t(std::upper_bound(values.begin(), values.end(), magnitude) - values.begin());
  const uint32_t below = above - 1;
  const double down = magnitude - values[below], up = values[above] - magnitude;  // exact: few bits apart
  if (down != up) return sign | (down < up ? below : above);
  return sign | (below % 2 == 0 ? below : above);
}

template <class T>
class SmallFloat : public testing::Test {};
using SmallFloats = testing::Types<bf16, f16, f8e4m3>;
TYPED_TEST_SUITE(SmallFloat, SmallFloats);

TYPED_TEST(SmallFloat, EveryPatternHasItsValueAndRoundTrips) {
  for (uint32_t bits = 0; bits < kPatterns<TypeParam>; ++bits) {
    const double expected = decode<TypeParam>(bits);
    const auto got = float(from_bits<TypeParam>(bits));
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(got)) << bits;
      ASSERT_TRUE(std::isnan(decode<TypeParam>(TypeParam(got).bits))) << bits;
      continue;
    }
    ASSERT_EQ(double(got), expected) << bits;
    ASSERT_EQ(std::signbit(got), std::signbit(expected)) << bits;
    ASSERT_EQ(TypeParam(got).bits, from_bits<TypeParam>(bits).bits) << bits;
  }
}

TYPED_TEST(SmallFloat, RoundsTiesAndTheirNeighboursAsTheReference) {
  const auto& values = ladder<TypeParam>();
  const auto test = [](double value) {
    for (const double x : {value, -value}) {
      if (double(float(x)) == x) {
        ASSERT_EQ(TypeParam(float(x)).bits, encode<TypeParam>(x)) << "f32 " << x;
      }
      ASSERT_EQ(convert<TypeParam>(x).bits, encode<TypeParam>(x)) << "f64 " << x;
    }
  };
  for (size_t i = 0; i < values.size(); ++i) {
    const double low = values[i], high = i + 1 < values.size() ? values[i + 1] : 2 * low - values[i - 1];
    const double tie = (low + high) / 2;
    const auto near = float(tie);
    for (const double x :
         {low, tie, double(std::nextafter(near, 0.0f)), double(std::nextafter(near, INFINITY)),
          std::nextafter(tie, 0.0), std::nextafter(tie, 1e300), (low + tie) / 2, (tie + high) / 2})
      test(x);
  }
  for (const double x : {1e300, 1e-300, 5e-324, 3.5e38, 1e10, 448.0, 464.0, 480.0, 65519.99, 65520.0})
    test(x);
}

TYPED_TEST(SmallFloat, RandomFloatsRoundAsTheReference) {
  std::mt19937 random(11);
  for (int i = 0; i < 1'000'000; ++i) {
    const float value = std::bit_cast<float>(uint32_t(random()));
    if (std::isnan(value)) {
      ASSERT_TRUE(std::isnan(float(TypeParam(value))));
    } else {
      ASSERT_EQ(TypeParam(value).bits, encode<TypeParam>(value)) << value;
    }
  }
}

TYPED_TEST(SmallFloat, SpecialValues) {
  const float inf = std::numeric_limits<float>::infinity();
  if (Format<TypeParam>::kInfinity) {
    EXPECT_EQ(float(TypeParam(inf)), inf);
    EXPECT_EQ(float(TypeParam(-inf)), -inf);
    EXPECT_EQ(float(convert<TypeParam>(-1e300)), -inf);
  } else {
    EXPECT_EQ(float(TypeParam(inf)), 448.0f);
    EXPECT_EQ(float(TypeParam(-inf)), -448.0f);
    EXPECT_EQ(float(convert<TypeParam>(1e300)), 448.0f);
  }
  EXPECT_TRUE(std::isnan(float(TypeParam(std::nanf("")))));
  EXPECT_TRUE(std::isnan(float(TypeParam(-std::nanf("")))));
  // A NaN whose payload lies in the bits that are cut must not become infinity.
  EXPECT_TRUE(std::isnan(float(TypeParam(std::bit_cast<float>(0x7F800001u)))));
  EXPECT_TRUE(std::isnan(float(convert<TypeParam>(std::numeric_limits<double>::quiet_NaN()))));
}

TEST(Convert, DoubleToFloatToSmallIsRoundedOnce) {
  // 1 + 2^-8 is a tie of bf16; a little more than it goes up, though it is the tie in f32.
  EXPECT_EQ(float(convert<bf16>(1 + 0x1p-8)), 1.0f);
  EXPECT_EQ(float(convert<bf16>(1 + 0x1p-8 + 0x1p-40)), 1.0f + 0x1p-7f);
  EXPECT_EQ(float(convert<bf16>(-1 - 0x1p-8 - 0x1p-40)), -1.0f - 0x1p-7f);
}

TEST(Convert, FloatsOutsideAnIntegersRangeSaturateAndNaNIsZero) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(convert<int32_t>(0x1p31f), std::numeric_limits<int32_t>::max());
  EXPECT_EQ(convert<int32_t>(2147483647.5), std::numeric_limits<int32_t>::max());
  EXPECT_EQ(convert<int32_t>(-3e9), std::numeric_limits<int32_t>::min());
  EXPECT_EQ(convert<int64_t>(0x1p63f), std::numeric_limits<int64_t>::max());
  EXPECT_EQ(convert<int64_t>(bf16(-inf)), std::numeric_limits<int64_t>::min());
  EXPECT_EQ(convert<uint8_t>(f16(256.0f)), 255);
  EXPECT_EQ(convert<uint8_t>(255.5), 255);
  EXPECT_EQ(convert<uint8_t>(-0.5f), 0);
  EXPECT_EQ(convert<uint8_t>(f8e4m3(-448.0f)), 0);
  EXPECT_EQ(convert<int64_t>(nan), 0);
  EXPECT_EQ(convert<uint8_t>(double(nan)), 0);
}

TEST(Convert, FloatsToIntegersTruncateAndToBoolTest) {
  EXPECT_EQ(convert<int64_t>(2.7), 2);
  EXPECT_EQ(convert<int32_t>(-2.7f), -2);
  EXPECT_EQ(convert<int64_t>(bf16(-3.5f)), -3);
  EXPECT_EQ(convert<uint8_t>(f16(200.5f)), 200);
  EXPECT_EQ(convert<int32_t>(2147483520.0f), 2147483520);
  EXPECT_EQ(convert<int64_t>(-0x1p63), std::numeric_limits<int64_t>::min());
  EXPECT_EQ(convert<bool>(0.25f), true);
  EXPECT_EQ(convert<bool>(-0.0f), false);
  EXPECT_EQ(convert<bool>(f8e4m3(0.0f)), false);
  EXPECT_EQ(convert<bool>(int64_t{256}), true);
  EXPECT_EQ(float(convert<f16>(true)), 1.0f);
  EXPECT_EQ(convert<double>((int64_t{1} << 53) - 1), 9007199254740991.0);
}

TEST(DType, NamesSizesAndErrors) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16, DType::f8e4m3, DType::i64,
                            DType::i32, DType::u8, DType::boolean}) {
    EXPECT_EQ(parse_dtype(name_of(dtype)), dtype);
    dispatch_any(dtype, [&]<class T>() {
      EXPECT_EQ(sizeof(T), size_of(dtype));
      EXPECT_EQ(dtype_of<T>, dtype);
    });
    if (is_floating(dtype)) {
      // epsilon: the least step above 1 that the format has
      const double step = epsilon(dtype);
      dispatch_any(dtype, [&]<class T>() {
        EXPECT_EQ(double(convert<T>(1 + step)), 1 + step);
        EXPECT_EQ(double(convert<T>(1 + step / 2)), 1.0);
      });
    } else {
      EXPECT_THROW(epsilon(dtype), Error);
    }
  }
  EXPECT_THROW(parse_dtype("float"), Error);
  EXPECT_THROW(dispatch_floating(DType::i64, "test", [&]<class T>() {}), Error);
  EXPECT_THROW(dispatch_floating_cuda(DType::f64, "test", [&]<class T>() {}), Error);
  EXPECT_THROW(dispatch_index(DType::f32, "test", [&]<class T>() {}), Error);
}

// Rows may be converted by instructions of the CPU, which treat NaN otherwise. Lengths that are no multiple
// of their lanes, and places that are not aligned.
TEST(ConvertedRows, OfF16HaveTheBitsOfEachElement) {
  constexpr int64_t kCount = 1 << 16;
  std::vector<f16> all(kCount);
  for (int64_t i = 0; i < kCount; ++i) all[size_t(i)].bits = uint16_t(i);
  for (const int64_t n : {kCount, kCount - 3}) {
    std::vector<float> wide(kCount, -1);
    widen(wide.data(), all.data() + (kCount - n), n);
    for (int64_t i = 0; i < n; ++i)
      ASSERT_EQ(std::bit_cast<uint32_t>(wide[size_t(i)]),
                std::bit_cast<uint32_t>(float(all[size_t(i + kCount - n)])))
          << i;
  }
  const Tensor cast = Tensor::from(all, {kCount}).to(DType::f32);
  EXPECT_EQ(std::bit_cast<uint32_t>(cast.data<float>()[0x7C01]), 0x7F802000u);  // a signalling NaN

  std::vector<float> values;
  for (uint64_t bits = 0; bits < uint64_t{1} << 32; bits += 4099)
    values.push_back(std::bit_cast<float>(uint32_t(bits)));
  for (uint32_t top = 0; top < 1u << 16; ++top)  // ties of f16, infinity and numbers that become it
    for (const uint32_t low : {0u, 0x1000u, 0xFFFu, 0xF000u})
      values.push_back(std::bit_cast<float>((top << 16) + low));
  const auto count = int64_t(values.size());
  std::vector<f16> rounded(values.size());
  narrow(rounded.data(), values.data() + 1, count - 1);
  for (int64_t i = 1; i < count; ++i)
    ASSERT_EQ(rounded[size_t(i - 1)].bits, f16(values[size_t(i)]).bits) << values[size_t(i)];
  std::vector<f16> apart(rounded.size());
  narrow(apart.data(), values.data(), count / 3, 3);
  for (int64_t i = 0; i < count; ++i)
    ASSERT_EQ(apart[size_t(i)].bits, i % 3 == 0 && i / 3 < count / 3 ? f16(values[size_t(i / 3)]).bits : 0)
        << i;
  constexpr int64_t kThird = kCount / 3;
  std::vector<float> wide(kThird);
  widen(wide.data(), all.data(), kThird, 3);
  for (int64_t i = 0; i < kThird; ++i)
    ASSERT_EQ(std::bit_cast<uint32_t>(wide[size_t(i)]), std::bit_cast<uint32_t>(float(all[size_t(3 * i)])));
  widen(values.data(), all.data() + 0x3C00, 3, 0);
  EXPECT_EQ(values[2], 1);
}

// Sums with f16 go through blocks in f32; rows of more than one block, and strides.
TEST(ConvertedRows, AreAddedWithTheBitsOfEachElement) {
  Rng rng(3);
  const auto drawn = [&](const Shape& shape, DType dtype) {
    const Tensor x = Tensor::empty(shape, dtype, Device::cpu());
    ops::fill_uniform(x, -4, 4, rng);
    return x;
  };
  const auto rounded = [](std::vector<float> values, DType dtype) {
    for (float& value : values) {
      if (dtype == DType::f16) value = float(f16(value));
      if (dtype == DType::bf16) value = float(bf16(value));
    }
    return values;
  };
  for (const DType to : {DType::f16, DType::bf16, DType::f32})
    for (const DType from : {DType::f16, DType::bf16, DType::f32})
      for (const bool transposed : {false, true}) {
        const Tensor y = drawn({3, 1100}, to), x = drawn({1100, 3}, from).transpose(0, 1);
        const Tensor term = transposed ? x : x.clone();
        std::vector<float> a = y.to_vector<float>();
        const std::vector<float> b = term.to_vector<float>();
        accumulate(y, term);
        for (size_t i = 0; i < a.size(); ++i) a[i] += b[i];
        EXPECT_EQ(y.to_vector<float>(), rounded(a, to)) << name_of(to) << " += " << name_of(from);
        EXPECT_EQ(term.to(to).to_vector<float>(), rounded(b, to));
      }
}

}  // namespace
}  // namespace tessera
