#include "tensor/tensor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

#include "runtime/text.h"
#include "tensor/equal.h"
#include "tensor/finite.h"
#include "tensor/kernels.h"
#include "tensor/print.h"
#include "tests/comma_locale.h"
#include "tests/errors.h"
#include "tests/tensors.h"

namespace tessera {
namespace {

const DType kAll[] = {DType::f64, DType::f32, DType::bf16, DType::f16,    DType::f8e4m3,
                      DType::i64, DType::i32, DType::u8,   DType::boolean};

Tensor counting(const Shape& shape, double first = 0) {
  std::vector<double> values(size_t(shape.count()));
  std::iota(values.begin(), values.end(), first);
  return Tensor::from(values, shape);
}

// ---- construction ----

TEST(Tensor, RowsStartOn16ByteBoundariesAndLongOnesOnLines) {
  for (const DType dtype : kAll)
    for (const int64_t width :
         {0,  1,  2,  3,  4,  5,  7,   8,   9,   15,  16,  17,  31,   33,   51,   52,
          61, 63, 64, 65, 96, 97, 103, 119, 129, 207, 257, 512, 1365, 2047, 2048, 2049}) {
      const auto size = int64_t(size_of(dtype));
      const int64_t pitch = row_pitch(width, dtype);
      if (width * size < 16) {
        EXPECT_EQ(pitch, width);
      } else {
        const int64_t bytes = width * size, lines = (bytes + 127) / 128 * 128;
        const int64_t unit = 4 * (lines - bytes) > bytes ? 16 : 128;
        EXPECT_EQ(pitch * size % unit, 0);
        EXPECT_TRUE(width <= pitch && pitch * size < width * size + unit) << dtype << " " << width;
      }
      const Tensor tensor = Tensor::empty({2, 3, width}, dtype, kCpu);
      EXPECT_TRUE(tensor.has_rows());
      if (width > 0) {
        EXPECT_EQ(tensor.row_stride(), pitch) << dtype << " " << width;
      }
      EXPECT_TRUE(Tensor::empty_packed({2, 3, width}, dtype, kCpu).layout().is_packed());
      EXPECT_TRUE(Tensor::empty_pinned({2, 3, width}, dtype).layout().is_packed());
      EXPECT_TRUE(Tensor::empty({width}, dtype, kCpu).layout().is_packed()) << "one row needs no pitch";
    }
}

TEST(Tensor, SizesThatOverflowAreRefusedBeforeAnythingElse) {
  const int64_t huge = int64_t{1} << 61;
  for (const Shape& shape :
       {Shape{huge}, Shape{huge, 1}, Shape{3, huge / 2}, Shape{huge / 8, 5}, Shape{0, huge}})
    for (const DType dtype : {DType::f64, DType::f32})
      expect_parts(message_of([&] { Tensor::empty(shape, dtype, kCpu); }), {"bytes overflows"});
  // Fits 63 bits of elements, and as a view nothing is allocated; exchanged dimensions are no new size.
  const int64_t half = int64_t{1} << 40;
  const Tensor wide = Tensor::zeros({1}, DType::u8, kCpu).expand({1, half, 1});
  EXPECT_EQ(wide.transpose(0, 1).shape(), (Shape{half, 1, 1}));
  EXPECT_EQ(wide.permute({2, 0, 1}).shape(), (Shape{1, 1, half}));
}

TEST(Tensor, FromChecksTheNumberOfValues) {
  expect_parts(message_of([] {
                 Tensor::from(std::vector<float>{1, 2, 3}, {2, 2});
               }),
               {"3 values", "[2, 2]", "4"});
  EXPECT_EQ(values(Tensor::from(std::vector<int32_t>{1, -2}, {2, 1})), (std::vector<double>{1, -2}));
}

TEST(Tensor, ListsArraysAndVectorsOfBoolMakeTensors) {
  const Tensor list = Tensor::from({1.f, 2.f, 3.f, 4.f}, {2, 2});
  EXPECT_EQ(list.dtype(), DType::f32);
  EXPECT_EQ(values(list), (std::vector<double>{1, 2, 3, 4}));
  EXPECT_EQ(Tensor::from({1, 2}, {2}).dtype(), DType::i32);
  EXPECT_EQ(Tensor::from({true, false}, {2}).dtype(), DType::boolean);
  const Tensor array = Tensor::from(std::array<int64_t, 2>{5, 6}, {2});
  EXPECT_EQ(array.dtype(), DType::i64);
  EXPECT_EQ(values(array), (std::vector<double>{5, 6}));
  const Tensor bools = Tensor::from(std::vector<bool>{true, false, true}, {3, 1});
  EXPECT_EQ(bools.dtype(), DType::boolean);
  EXPECT_EQ(values(bools), (std::vector<double>{1, 0, 1}));
  expect_parts(message_of([] { Tensor::from({1.f, 2.f}, {3}); }), {"2 values", "[3]"});
}

TEST(Tensor, AreF32OnTheCpuUnlessToldOtherwise) {
  for (const Tensor& tensor : {Tensor::empty({2, 3}), Tensor::empty_packed({2, 3}), Tensor::zeros({2, 3}),
                               Tensor::ones({2, 3}), Tensor::full({2, 3}, 1.5)}) {
    EXPECT_EQ(tensor.dtype(), DType::f32);
    EXPECT_TRUE(tensor.device().is_cpu());
    EXPECT_EQ(tensor.shape(), (Shape{2, 3}));
  }
  EXPECT_EQ(values(Tensor::zeros({2})), (std::vector<double>{0, 0}));
  EXPECT_EQ(values(Tensor::ones({2}, DType::i64)), (std::vector<double>{1, 1}));
  EXPECT_EQ(values(Tensor::full({2}, 1.5)), (std::vector<double>{1.5, 1.5}));
}

TEST(Tensor, ArangeCountsUpToTheEnd) {
  const auto list = [](const Tensor& tensor) { return values(tensor); };
  EXPECT_EQ(Tensor::arange(0, 3).dtype(), DType::i64);
  EXPECT_EQ(list(Tensor::arange(0, int64_t{3})), (std::vector<double>{0, 1, 2}));
  EXPECT_EQ(list(Tensor::arange(2, 9, 3)), (std::vector<double>{2, 5, 8}));
  EXPECT_EQ(list(Tensor::arange(2, 8, 3)), (std::vector<double>{2, 5}));
  EXPECT_EQ(list(Tensor::arange(3, 0, -2)), (std::vector<double>{3, 1}));
  EXPECT_EQ(Tensor::arange(4, 4).shape(), Shape{0});
  constexpr int64_t kLeast = std::numeric_limits<int64_t>::min(), kMost = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(Tensor::arange(kLeast, kMost, kMost).to_vector<int64_t>(),
            (std::vector<int64_t>{kLeast, -1, kMost - 1}));
  EXPECT_EQ(Tensor::arange(kMost, kLeast, kLeast).to_vector<int64_t>(), (std::vector<int64_t>{kMost, -1}));
  EXPECT_EQ(Tensor::arange(0, 3, 1, DType::i32).dtype(), DType::i32);
  EXPECT_EQ(Tensor::arange(0., 1, 0.1).dtype(), DType::f32);
  EXPECT_EQ(Tensor::arange(0., 1, 0.1).count(), 10);
  EXPECT_EQ(list(Tensor::arange(1., 0, -0.25, DType::f64)), (std::vector<double>{1, 0.75, 0.5, 0.25}));
  EXPECT_EQ(Tensor::arange(0., 1, 0.1).at({7}).item<float>(), float(7 * 0.1));
  for (const auto& wrong : std::vector<std::function<void()>>{
           [] { Tensor::arange(0, 3, 0); }, [] { Tensor::arange(0, 3, -1); }, [] { Tensor::arange(3, 0); },
           [] { Tensor::arange(0., 3, 0); }, [] { Tensor::arange(0., 3, -1); },
           [] { Tensor::arange(0, 1, NAN); }, [] { Tensor::arange(0, INFINITY); }})
    expect_parts(message_of(wrong), {"Tensor::arange: steps of", "never lead from"});
  expect_parts(message_of([] { Tensor::arange(0., 1e300, 1e-300); }),
               {"Tensor::arange", "more than 63 bits"});
}

TEST(Tensor, TypedAccessChecksTheDtype) {
  expect_parts(message_of([] { counting({2}).data<float>(); }), {"f64", "f32"});
  EXPECT_EQ(counting({2}).data<double>()[1], 1);
}

// data() of padded rows gave the padding as elements.
TEST(Tensor, ElementsAreThoseOfPackedHostMemory) {
  const Tensor padded = Tensor::zeros({2, 3}, DType::f64, Device::cpu());
  ASSERT_FALSE(padded.layout().is_packed());
  expect_error([&] { padded.elements<double>(); }, {"elements", "f64[2, 3]", "empty_packed", "to_vector()"});
  const Tensor x = counting({2, 3}).packed();
  const uint64_t version = x.version();
  EXPECT_EQ(x.elements<const double>()[4], 4);
  EXPECT_EQ(x.version(), version);
  for (double& value : x.elements<double>()) value += 1;
  EXPECT_EQ(x.version(), version + 1) << "writing is noticed";
  EXPECT_EQ(values(x), (std::vector<double>{1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(x.select(0, 1).elements<const double>().size(), 3u);
  expect_error([&] { x.slice(1, 0, 2).elements<const double>(); }, {"elements", "f64[2, 2]"});
  expect_error([&] { x.elements<float>(); }, {"f64", "f32"});
  EXPECT_EQ(x.version(), version + 1);
  expect_error([] { Tensor().elements<float>(); }, {"undefined"});
}

TEST(Tensor, BoolsAreMadeAndReadAsOtherElements) {
  const bool flags[] = {true, false, true};
  const Tensor tensor = Tensor::from(std::span<const bool>(flags), {3});
  EXPECT_EQ(tensor.dtype(), DType::boolean);
  EXPECT_EQ(tensor.to_vector<bool>(), (std::vector<bool>{true, false, true}));
  EXPECT_TRUE(tensor.at({2}).item<bool>());
  EXPECT_FALSE(tensor.at({1}).item<bool>());
}

TEST(Tensor, ItemAndToVectorConvert) {
  EXPECT_EQ(counting({1, 1}, 7).item<int64_t>(), 7);
  EXPECT_EQ(Tensor::full({}, 2.5, DType::bf16, kCpu).item<float>(), 2.5f);
  EXPECT_EQ(counting({2, 2}).to(DType::f16).to_vector<int32_t>(), (std::vector<int32_t>{0, 1, 2, 3}));
  EXPECT_EQ(counting({3}).to_vector<bool>(), (std::vector<bool>{false, true, true}));
  EXPECT_TRUE(counting({0, 3}).to_vector<double>().empty());
  expect_parts(message_of([] { counting({2, 3}).item(); }), {"item", "f64[2, 3]", "6 elements"});
  expect_parts(message_of([] { Tensor().item(); }), {"item", "undefined"});
  expect_parts(message_of([] { Tensor().to_vector<float>(); }), {"to_vector", "undefined"});
  expect_parts(message_of([] { Tensor().fill(1); }), {"undefined"});
}

// Such as a gradient that has not arrived: a view of one was an undefined tensor with a shape.
TEST(Tensor, AnUndefinedOneHasNoViews) {
  expect_parts(message_of([] { Tensor().expand({3}); }), {"expand", "undefined"});
  expect_parts(message_of([] { Tensor().reshape({1, 1}); }), {"reshape", "undefined"});
  expect_parts(message_of([] { Tensor().slice(0, 0, 1); }), {"slice", "undefined"});
  expect_parts(message_of([] { Tensor().select(0, 0); }), {"select", "undefined"});
  expect_parts(message_of([] { Tensor().transpose(0, 1); }), {"transpose", "undefined"});
}

// ---- views ----

TEST(Tensor, SliceSelectPermuteExpandByHand) {
  const Tensor x = counting({3, 4});
  EXPECT_EQ(values(x.slice(0, -2, 3)), (std::vector<double>{4, 5, 6, 7, 8, 9, 10, 11}));
  EXPECT_EQ(values(x.slice(1, 1, 4, 2)), (std::vector<double>{1, 3, 5, 7, 9, 11}));
  EXPECT_EQ(values(x.slice(-1, 3, 4, INT64_MAX)), (std::vector<double>{3, 7, 11}));
  EXPECT_EQ(x.slice(0, 3, 3).count(), 0);
  EXPECT_EQ(values(x.select(1, -1)), (std::vector<double>{3, 7, 11}));
  EXPECT_EQ(x.at({1, 2}).item<double>(), 6);
  EXPECT_EQ(values(x.permute({-1, 0})), values(x.transpose(0, 1)));
  EXPECT_EQ(values(counting({2, 1}).expand({2, 2, 2})), (std::vector<double>{0, 0, 1, 1, 0, 0, 1, 1}));
  EXPECT_EQ(x.reshape_with({2, -1}).shape(), (Shape{2, 6}));
  EXPECT_TRUE(x.slice(0, 1, 2).shares_storage(x));
}

TEST(Tensor, ViewErrorsSayWhatWasWrong) {
  const Tensor x = counting({3, 4});
  expect_parts(message_of([&] { x.slice(0, 1, 4); }), {"slice", "[1, 4)", "dimension 0 of [3, 4]"});
  expect_parts(message_of([&] { x.slice(0, -4, 2); }), {"slice", "-4"});
  expect_parts(message_of([&] { x.slice(1, 0, 2, 0); }), {"slice", "step 0"});
  expect_parts(message_of([&] { x.select(0, 3); }), {"select", "index 3", "dimension 0 of [3, 4]"});
  expect_parts(message_of([&] { x.select(2, 0); }), {"dimension 2", "[3, 4]"});
  expect_parts(message_of([&] { x.size(-3); }), {"dimension -3", "[3, 4]"});
  expect_parts(message_of([&] { x.at({1}); }), {"at", "1 indices", "f64[3, 4]"});
  expect_parts(message_of([&] { x.at({1, 4}); }), {"at", "index 4", "dimension 1 of [3, 4]"});
  expect_parts(message_of([&] { x.permute({0, 0}); }), {"permute", "named twice"});
  expect_parts(message_of([&] { x.permute({0}); }), {"permute", "f64[3, 4]"});
  expect_parts(message_of([&] { x.expand({3, 5}); }), {"expand", "[3, 4]", "[3, 5]"});
  expect_parts(message_of([&] { x.expand({4}); }), {"expand"});
  expect_parts(message_of([&] { x.reshape({5, 2}); }), {"reshape", "12 elements", "[5, 2]"});
  expect_parts(message_of([&] { x.transpose(0, 1).reshape({12}); }), {"reshape", "clone()"});
  expect_parts(message_of([&] { x.reshape_with({-1, -1}); }), {"reshape", "more than one"});
  expect_parts(message_of([&] { x.reshape_with({-1, 5}); }), {"reshape", "12", "5"});
  expect_parts(message_of([&] { Tensor::view_of(x.storage(), Layout::packed({13}), DType::f64); }),
               {"view_of", "past"});
  Layout late = Layout::packed({2});
  late.offset = 11;
  expect_parts(message_of([&] { Tensor::view_of(x.storage(), late, DType::f64); }), {"view_of"});
}

// ---- copies ----

TEST(Tensor, CopiesAcrossAllPairsOfDtypes) {
  // Small integers and halves: exact wherever the format has a fraction.
  const std::vector<double> given{0, 1, 2.5, 7, 100, 0.5};
  for (const DType from : kAll)
    for (const DType to : kAll) {
      SCOPED_TRACE(testing::Message() << from << " to " << to);
      const Tensor x = Tensor::from(given, {2, 3}).to(from), y = x.to(to);
      EXPECT_EQ(y.dtype(), to);
      const auto before = values(x), after = values(y);
      for (size_t i = 0; i < given.size(); ++i) {
        const double expected = to == DType::boolean  ? double(before[i] != 0)
                                : !is_floating(to)    ? std::trunc(before[i])
                                : to == DType::f8e4m3 ? float(f8e4m3(float(before[i])))
                                                      : before[i];
        EXPECT_EQ(after[i], expected) << i;
      }
    }
}

TEST(Tensor, CopiesBetweenAnyLayoutsWithBroadcasting) {
  const Tensor x = counting({2, 3});
  const Tensor y = Tensor::zeros({6, 4, 2}, DType::f32, kCpu);
  const Tensor part = y.slice(0, 1, 6, 2).slice(1, 1, 3).transpose(0, 2);  // [2, 2, 3]
  part.copy_from(x.reshape({2, 1, 3}));
  EXPECT_EQ(values(part), (std::vector<double>{0, 1, 2, 0, 1, 2, 3, 4, 5, 3, 4, 5}));
  double sum = 0;
  for (const double value : values(y)) sum += value;
  EXPECT_EQ(sum, 2 * 15) << "nothing else was written";
  expect_parts(message_of([&] { x.copy_from(counting({4, 3})); }), {"copy_from", "[4, 3]", "[2, 3]"});
  expect_parts(message_of([&] { x.copy_from(counting({2, 2, 3})); }), {"copy_from"});
}

TEST(Tensor, OverlappingCopiesReadBeforeTheyWrite) {
  for (const int64_t size : {6, 100'000}) {  // the larger one runs on several threads
    const Tensor x = counting({size});
    x.slice(0, 1, size).copy_from(x.slice(0, 0, size - 1));
    auto expected = values(counting({size}, -1));
    expected[0] = 0;
    ASSERT_EQ(values(x), expected);
  }
  const Tensor square = counting({3, 3});
  square.copy_from(square.transpose(0, 1));
  EXPECT_EQ(values(square), (std::vector<double>{0, 3, 6, 1, 4, 7, 2, 5, 8}));
  const Tensor row = counting({2, 2});
  row.copy_from(row.select(0, 1));  // broadcast over itself
  EXPECT_EQ(values(row), (std::vector<double>{2, 3, 2, 3}));
  row.copy_from(row);
  EXPECT_EQ(values(row), (std::vector<double>{2, 3, 2, 3}));
}

TEST(Tensor, AnExpandedDestinationIsRefused) {
  const Tensor wide = counting({1}).expand({3});
  expect_parts(message_of([&] { wide.copy_from(counting({3})); }), {"copy_from", "expanded"});
  expect_parts(message_of([&] { accumulate(wide, counting({3})); }), {"accumulate", "expanded"});
  wide.fill(4);  // the same value everywhere: no contradiction
  EXPECT_EQ(values(wide), (std::vector<double>{4, 4, 4}));
}

TEST(Tensor, CloneIsPitchedPackedIsPackedAndWithRowsCopiesOnlyIfItMust) {
  const Tensor x = counting({4, 5}), turned = x.transpose(0, 1);
  EXPECT_FALSE(x.clone().shares_storage(x));
  EXPECT_EQ(values(turned.clone()), values(turned));
  EXPECT_TRUE(x.with_rows().shares_storage(x));
  EXPECT_FALSE(turned.with_rows().shares_storage(x));
  EXPECT_TRUE(turned.with_rows().has_rows());
  EXPECT_FALSE(x.layout().is_packed());
  EXPECT_TRUE(x.packed().layout().is_packed());
  EXPECT_EQ(values(x.packed()), values(x));
  EXPECT_TRUE(x.packed().packed().layout().is_packed());
  EXPECT_TRUE(x.to(kCpu).shares_storage(x));
  EXPECT_TRUE(x.to(DType::f64).shares_storage(x));
}

TEST(Tensor, InPlaceWritersBumpTheVersionOfTheStorage) {
  const Tensor x = counting({4}), view = x.slice(0, 0, 2);
  const uint64_t before = x.version();
  view.fill(1);
  EXPECT_EQ(x.version(), before + 1);
  x.copy_from(counting({4}));
  EXPECT_EQ(view.version(), before + 2);
  accumulate(view, counting({2}));
  EXPECT_EQ(x.version(), before + 3);
}

TEST(Tensor, AccumulateRoundsOnce) {
  // 1 + 2^-8 + 2^-40 in f64: to f32 first it would be a tie of bf16 and go down.
  const Tensor y = Tensor::full({1}, 1, DType::bf16, kCpu);
  accumulate(y, Tensor::full({1}, 0x1p-8 + 0x1p-40, DType::f64, kCpu));
  EXPECT_EQ(y.item<double>(), 1 + 0x1p-7);
  const Tensor z = Tensor::full({1}, 0x1p24, DType::f32, kCpu);
  accumulate(z, Tensor::full({1}, 1 + 0x1p-20, DType::f64, kCpu));  // more than half a step of 2
  EXPECT_EQ(z.item<double>(), 0x1p24 + 2);
  expect_parts(message_of([&] { accumulate(y, z.expand({2})); }), {"accumulate", "[1]", "[2]"});
}

TEST(Tensor, EqualBitsAreThoseOfOneDtypeAndShapeInAnyLayout) {
  const Tensor x = counting({2, 3});
  EXPECT_TRUE(equal_bits(x, x.transpose(0, 1).clone().transpose(0, 1)));
  EXPECT_TRUE(equal_bits(Tensor::zeros({0, 2}), Tensor::zeros({0, 2})));
  EXPECT_TRUE(equal_bits(Tensor::full({1}, NAN), Tensor::full({1}, NAN)));
  EXPECT_FALSE(equal_bits(Tensor::full({1}, 0.0), Tensor::full({1}, -0.0)));
  EXPECT_FALSE(equal_bits(x, x.to(DType::f32)));
  EXPECT_FALSE(equal_bits(x, x.packed().reshape({3, 2})));
  const Tensor y = x.clone();
  y.at({1, 2}).fill(7);
  EXPECT_FALSE(equal_bits(x, y));
}

TEST(Tensor, FindsNonFiniteElements) {
  const Tensor x = Tensor::from(std::vector<float>{1, INFINITY, NAN, -INFINITY}, {2, 2});
  const NonFinite found = find_nonfinite(x.transpose(0, 1));
  EXPECT_EQ(found.nan, 1);
  EXPECT_EQ(found.inf, 2);
  EXPECT_EQ(found.first, 1);
  EXPECT_FALSE(find_nonfinite(counting({3})));
  EXPECT_FALSE(find_nonfinite(counting({3}).to(DType::i32)));
}

TEST(Tensor, FindsNonFiniteElementsOfALargeTensorInPieces) {
  constexpr int64_t kRow = (1 << 20) + 7;  // more than a piece
  const Tensor x = Tensor::zeros({5, kRow}, DType::bf16, kCpu);
  x.at({2, kRow - 1}).fill(NAN);
  x.at({4, 1}).fill(INFINITY);
  Allocator& allocator = kCpu.allocator();
  allocator.reset_peaks();
  const size_t before = allocator.stats().allocated;
  const auto expect = [](const Tensor& tensor, int64_t nan, int64_t inf, int64_t first) {
    const NonFinite found = find_nonfinite(tensor);
    EXPECT_EQ(found.nan, nan);
    EXPECT_EQ(found.inf, inf);
    EXPECT_EQ(found.first, first);
  };
  expect(x, 1, 1, 3 * kRow - 1);
  expect(x.transpose(0, 1), 1, 1, 5 + 4);
  expect(x.select(0, 4), 0, 1, 1);
  EXPECT_LT(allocator.stats().allocated_peak - before, x.bytes()) << "no copy of the whole tensor";
}

// ---- printing ----

TEST(Print, ShowsElementsDtypeShapeAndDevice) {
  EXPECT_EQ(to_string(counting({2, 2}), {.precision = 1}), "[[0.0, 1.0],\n [2.0, 3.0]] f64[2, 2] on cpu");
  EXPECT_EQ(to_string(Tensor::full({}, 2, DType::i32, kCpu)), "2 i32[] on cpu");
  EXPECT_EQ(to_string(Tensor::from(std::vector<int64_t>{-(int64_t{1} << 62)}, {1})),
            "[-4611686018427387904] i64[1] on cpu");
  EXPECT_EQ(to_string(counting({2}).to(DType::boolean)), "[0, 1] bool[2] on cpu");
  EXPECT_EQ(to_string(Tensor::full({1}, 12345, DType::f32, kCpu), {.precision = 2, .scientific = true}),
            "[1.23e+04] f32[1] on cpu");
  EXPECT_EQ(to_string(counting({0, 3})), "[] f64[0, 3] on cpu");
  EXPECT_EQ(to_string(Tensor()), "(undefined)");
  EXPECT_EQ(to_string(counting({2, 1, 2}), {.precision = 0}), "[[[0, 1]],\n [[2, 3]]] f64[2, 1, 2] on cpu");
}

TEST(Print, WritesAPointInEveryLocale) {
  const CommaLocale comma;
  EXPECT_EQ(to_string(counting({2}, 1.5), {.precision = 1}), "[1.5, 2.5] f64[2] on cpu");
  EXPECT_EQ(to_string(counting({1}, 1.5), {.precision = 2, .scientific = true}), "[1.50e+00] f64[1] on cpu");
  EXPECT_EQ(format_bytes(1536), "1.50 KiB");
}

TEST(Print, ShortensWhatIsLarge) {
  EXPECT_EQ(to_string(counting({10}), {.precision = 0, .edge_items = 2, .threshold = 9}),
            "[0, 1, ..., 8, 9] f64[10] on cpu");
  EXPECT_EQ(to_string(counting({10}), {.precision = 0, .edge_items = 2, .threshold = 10}),
            "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9] f64[10] on cpu");
  EXPECT_EQ(to_string(counting({3, 4}), {.precision = 0, .edge_items = 1, .threshold = 1}),
            "[[0, ..., 3],\n ...,\n [8, ..., 11]] f64[3, 4] on cpu");
  EXPECT_EQ(to_string(counting({3}), {.precision = 0, .edge_items = 0, .threshold = 1}),
            "[...] f64[3] on cpu");
  std::ostringstream text;
  text << counting({2000});
  EXPECT_EQ(text.str(), "[0.0000, 1.0000, 2.0000, ..., 1997.0000, 1998.0000, 1999.0000] f64[2000] on cpu");
}

TEST(Print, HasExponentsWhereDigitsWouldBeLost) {
  const auto of = [](const std::vector<double>& values) {
    return to_string(Tensor::from(values, {int64_t(values.size())}), {.precision = 2});
  };
  EXPECT_EQ(of({0, 1e-9, 2}), "[0.00e+00, 1.00e-09, 2.00e+00] f64[3] on cpu");
  EXPECT_EQ(of({-3e300}), "[-3.00e+300] f64[1] on cpu");
  EXPECT_EQ(of({0, 0.01, 99'999'999}), "[0.00, 0.01, 99999999.00] f64[3] on cpu");
  EXPECT_EQ(of({std::numeric_limits<double>::infinity(), 0.5}), "[inf, 0.50] f64[2] on cpu");
  EXPECT_EQ(to_string(Tensor::from(std::vector<int64_t>{1'000'000'000}, {1})), "[1000000000] i64[1] on cpu");
}

TEST(Tensor, AnUndefinedTensorIsSaidToBe) {
  expect_error([] { Tensor().clone(); }, {"clone", "undefined"});
  expect_error([] { Tensor().packed(); }, {"packed", "undefined"});
  expect_error([] { Tensor().to(DType::f32); }, {"to", "undefined"});
  expect_error([] { Tensor().to(Device::cpu()); }, {"to", "undefined"});
  expect_error([] { Tensor().data<float>(); }, {"data", "undefined"});
  expect_error([] { Tensor().data<int64_t>(); }, {"data", "undefined"});
  expect_error([] { Tensor().raw(); }, {"raw", "undefined"});
  expect_error([] { Tensor().device(); }, {"device", "undefined"});
  expect_error([] { Tensor().version(); }, {"version", "undefined"});
}

}  // namespace
}  // namespace tessera
