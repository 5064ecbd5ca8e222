#include "ops/sparse_linear/sparse_linear.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "autograd/tape.h"
#include "ops/linear/linear.h"
#include "ops/random/random.h"
#include "ops/sparse_linear/sparse_linear_kernels.h"
#include "runtime/parallel.h"
#include "tests/errors.h"
#include "tests/tensors.h"

// Compressed weights: arrays, round trips, what validate() refuses; products under gates next to dense ones.

namespace tessera::ops {
namespace {

constexpr SparseFormat kFormats[] = {SparseFormat::dense_columns, SparseFormat::tiled_cbc,
                                     SparseFormat::tca_bme, SparseFormat::sell_delta4,
                                     SparseFormat::mma_delta4};

/// A matrix of which about `density` of the elements are not 0; bits alone matter, so NaN, inf and -0 are
/// among them.
Tensor random_matrix(int64_t out, int64_t in, DType dtype, double density, Rng& rng) {
  const Tensor matrix = Tensor::zeros({out, in}, dtype, Device::cpu());
  const Tensor words = Tensor::empty_packed({2, out * in}, DType::i64, Device::cpu());
  fill_integers(words, int64_t{1} << 32, rng);
  const int64_t* const word = words.data<int64_t>();
  for (int64_t r = 0; r < out; ++r)
    for (int64_t c = 0; c < in; ++c) {
      const int64_t i = r * in + c;
      if (double(word[i]) >= density * 4294967296.0) continue;
      char* const to =
          static_cast<char*>(matrix.raw()) + size_t(r * matrix.row_stride() + c) * size_of(dtype);
      std::memcpy(to, word + out * in + i, size_of(dtype));
    }
  return matrix;
}

/// N(0, 1) rounded to the dtype, with zeros.
Tensor sparse_normal(const Shape& shape, DType dtype, double sparsity, uint64_t seed) {
  Rng rng(seed);
  const Tensor values = Tensor::empty_packed(shape, DType::f32, Device::cpu()),
               draws = Tensor::empty_packed(shape, DType::f32, Device::cpu());
  fill_normal(values, 0, 1, rng);
  fill_uniform(draws, 0, 1, rng);
  for (int64_t i = 0; i < values.count(); ++i)
    if (draws.data<float>()[i] < float(sparsity)) values.data<float>()[i] = 0;
  return values.to(dtype);
}

TEST(SparseLinearWeight, ReturnsEveryMatrixBitForBit) {
  // 100,000 matrices: 24 sizes around the tiles' edges, three dtypes, all densities.
  Rng rng(3);
  const int64_t sizes[][2] = {{0, 0}, {0, 5}, {5, 0},  {1, 1},   {1, 9},   {9, 1},
                              {7, 8}, {8, 8}, {9, 17}, {16, 16}, {17, 15}, {3, 31}};
  const DType dtypes[] = {DType::f16, DType::bf16, DType::f32};
  int64_t done = 0;
  for (int64_t round = 0; done < 100'000; ++round)
    for (const auto& [out, in] : sizes) {
      const DType dtype = dtypes[round % 3];
      const Tensor matrix = random_matrix(out, in, dtype, double(round % 11) / 10, rng);
      for (const SparseFormat format : kFormats) {
        const SparseWeight weight = compress(matrix, format);
        if (!same_bits(to_dense(weight), matrix)) {
          FAIL() << name_of(format) << " " << dtype << " [" << out << ", " << in << "] round " << round;
        }
        ++done;
      }
    }
  for (const auto& [out, in] : {std::pair<int64_t, int64_t>{64, 64},
                                {65, 63},
                                {128, 129},
                                {255, 70},
                                {256, 64},
                                {257, 65},
                                {300, 200},
                                {1, 1000},
                                {1000, 1}})
    for (const DType dtype : dtypes)
      for (const double density : {0.0, 0.05, 0.5, 1.0})
        for (const SparseFormat format : kFormats) {
          const Tensor matrix = random_matrix(out, in, dtype, density, rng);
          const SparseWeight weight = compress(matrix, format);
          validate(weight, "matrix");
          EXPECT_TRUE(same_bits(to_dense(weight), matrix))
              << name_of(format) << " [" << out << ", " << in << "]";
        }
}

TEST(SparseLinearWeight, LaysTcaBmeOutInTheOrderOfTheFragments) {
  // One element in each corner of each level: the order of their values is the order of the format.
  const Tensor matrix = Tensor::zeros({65, 66}, DType::f32, Device::cpu());
  const auto put = [&](int64_t r, int64_t c, double value) { matrix.at({r, c}).fill(value); };
  put(0, 0, 1), put(0, 7, 2), put(1, 0, 3);         // bitmap 0: row by row
  put(8, 0, 4);                                     // bitmap 1: below
  put(0, 8, 5), put(15, 15, 6);                     // bitmaps 2 and 3
  put(3, 16, 7), put(12, 63, 8);                    // tiles 1 and 3 of the median
  put(16, 0, 9), put(63, 63, 10);                   // medians 1 and 3
  put(2, 64, 11), put(64, 1, 12), put(64, 65, 13);  // the other groups
  const SparseWeight weight = compress(matrix, SparseFormat::tca_bme);
  EXPECT_EQ(weight.stored, 13);
  EXPECT_EQ(weight.most, 64);
  EXPECT_EQ(weight.offsets.to_vector<int32_t>(), (std::vector<int32_t>{0, 16, 24, 32, 40}));
  const std::vector<float> values = weight.values.to_vector<float>();
  EXPECT_EQ(std::vector<float>(values.begin(), values.begin() + 16),
            (std::vector<float>{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(values[16], 11);
  EXPECT_EQ(values[24], 12);
  EXPECT_EQ(values[32], 13);
  const std::vector<int32_t> info = weight.info.to_vector<int32_t>();
  EXPECT_EQ(std::vector<int32_t>(info.begin(), info.begin() + 4), (std::vector<int32_t>{0, 8, 9, 9}));
  const std::vector<int64_t> bitmaps = weight.bitmaps.to_vector<int64_t>();
  EXPECT_EQ(bitmaps[0], 1 | 1 << 7 | 1 << 8);
  EXPECT_EQ(bitmaps[1], 1);
  EXPECT_EQ(bitmaps[2], 1);
  EXPECT_EQ(uint64_t(bitmaps[3]), uint64_t{1} << 63);
  EXPECT_EQ(bitmaps[4], int64_t{1} << 24);            // (3, 16): row 3, column 0
  EXPECT_EQ(bitmaps[15], int64_t{1} << (8 * 4 + 7));  // (12, 63): bottom right of tile 3
}

TEST(SparseLinearWeight, LaysTiledCbcOutColumnByColumn) {
  const Tensor matrix = Tensor::zeros({257, 65}, DType::f32, Device::cpu());
  const auto put = [&](int64_t r, int64_t c, double value) { matrix.at({r, c}).fill(value); };
  put(0, 0, 1), put(255, 0, 2), put(64, 1, 3), put(0, 63, 4);
  put(5, 64, 5), put(256, 2, 6), put(256, 64, 7);
  const SparseWeight weight = compress(matrix, SparseFormat::tiled_cbc);
  EXPECT_EQ(weight.offsets.to_vector<int32_t>(), (std::vector<int32_t>{0, 8, 16, 24, 32}));
  const std::vector<float> values = weight.values.to_vector<float>();
  EXPECT_EQ(std::vector<float>(values.begin(), values.begin() + 5), (std::vector<float>{1, 2, 3, 4, 0}));
  const std::vector<int32_t> info = weight.info.to_vector<int32_t>();
  EXPECT_EQ(info[0], 0 << 9 | 2);
  EXPECT_EQ(info[1], 2 << 9 | 1);
  EXPECT_EQ(info[2], 3 << 9 | 0);
  EXPECT_EQ(info[63], 3 << 9 | 1);
  const std::vector<int64_t> bitmaps = weight.bitmaps.to_vector<int64_t>();
  EXPECT_EQ(bitmaps[0], 1);
  EXPECT_EQ(uint64_t(bitmaps[3]), uint64_t{1} << 63);
  EXPECT_EQ(bitmaps[5], 1);
  // The sizes of the format: 4 bytes per group and one more, 4 per column tile, 8 per bitmap.
  EXPECT_EQ(weight.bytes(), 4 * (4 + 1) + 4 * 4 * 64 + 8 * 4 * 256 + 4 * uint64_t(weight.values.count()));
}

TEST(SparseLinearWeight, LaysSellDelta4OutSliceBySlice) {
  EXPECT_EQ(sell_delta4::parts_of(255), 1);
  EXPECT_EQ(sell_delta4::width_of(255), 256);
  EXPECT_EQ(sell_delta4::parts_of(256), 2);
  EXPECT_EQ(sell_delta4::parts_of(4096), 8);
  EXPECT_EQ(sell_delta4::width_of(4096), 512);
  EXPECT_EQ(sell_delta4::width_of(11008), 1376);
  EXPECT_EQ(sell_delta4::parts_of(14336), 16);
  const Tensor matrix = Tensor::zeros({257, 300}, DType::f32, Device::cpu());  // parts of 152 columns
  const auto put = [&](int64_t r, int64_t c, double value) { matrix.at({r, c}).fill(value); };
  put(3, 0, 1), put(3, 1, 2), put(3, 18, 3);  // distances 0, 0, 15 and an empty entry before 0
  put(200, 151, 4);                           // nine empty entries of 16 columns, then 7 more
  for (int c = 0; c < 9; ++c) put(7, 2 * c, 5 + c);
  put(40, 152, 20), put(256, 299, 21);
  const SparseWeight weight = compress(matrix, SparseFormat::sell_delta4);
  EXPECT_EQ(weight.stored, 15);
  EXPECT_EQ(weight.groups(), 4);
  // The longest rows first: 200 with 10 entries, 7 with 9, 3 with 4, 40 with one, then the others in order.
  const std::vector<int32_t> info = weight.info.to_vector<int32_t>();
  ASSERT_EQ(info.size(), 2u * 64);
  EXPECT_EQ(uint32_t(info[0]), 200u | 7u << 8 | 3u << 16 | 40u << 24);
  EXPECT_EQ(uint32_t(info[1]), 0u | 1u << 8 | 2u << 16 | 4u << 24);
  std::vector<int32_t> offsets{0};
  for (const auto& [slices, chunks] : {std::pair{8, 2}, {8, 1}, {8, 0}, {8, 2}})
    for (int s = 0; s < slices; ++s) offsets.push_back(offsets.back() + (s == 0 ? chunks : 0));
  EXPECT_EQ(weight.offsets.to_vector<int32_t>(), offsets);
  const std::vector<int32_t> gaps = weight.gaps.to_vector<int32_t>();
  ASSERT_EQ(gaps.size(), 5u * 32);
  EXPECT_EQ(uint32_t(gaps[0]), 0xFFFFFFFFu);  // row 200
  EXPECT_EQ(uint32_t(gaps[32]), 0x7Fu);       // its second chunk
  EXPECT_EQ(uint32_t(gaps[1]), 0x11111110u);  // row 7
  EXPECT_EQ(uint32_t(gaps[32 + 1]), 1u);      // column 16
  EXPECT_EQ(uint32_t(gaps[2]), 0x0F00u);      // row 3: 0, 1, an empty one at 17, 18
  const std::vector<float> values = weight.values.to_vector<float>();
  ASSERT_EQ(values.size(), 5u * 256);
  EXPECT_EQ(values[256 + 1], 4);
  EXPECT_EQ(values[0], 0);
  EXPECT_EQ((std::vector<float>(values.begin() + 8, values.begin() + 16)),
            (std::vector<float>{5, 6, 7, 8, 9, 10, 11, 12}));
  EXPECT_EQ(values[256 + 8], 13);
  EXPECT_EQ((std::vector<float>(values.begin() + 16, values.begin() + 21)),
            (std::vector<float>{1, 2, 0, 3, 0}));
  EXPECT_EQ(values[2 * 256 + 3 * 8], 20);
}

TEST(SparseLinearWeight, RefusesSlicesThatDoNotFitTogether) {
  Rng rng(7);
  const Tensor matrix = random_matrix(260, 300, DType::f16, 0.5, rng);
  const auto broken = [&](const char* says, auto&& change) {
    SparseWeight weight = compress(matrix, SparseFormat::sell_delta4);
    change(weight);
    EXPECT_NE(message_of([&] { validate(weight, "layer"); }).find(says), std::string::npos)
        << message_of([&] { validate(weight, "layer"); });
  };
  broken("first slice start", [](SparseWeight& w) { w.offsets.data<int32_t>()[0] = 1; });
  broken("offsets descend", [](SparseWeight& w) { w.offsets.data<int32_t>()[3] = -1; });
  broken("'info' has row", [](SparseWeight& w) { w.info.data<int32_t>()[0] = w.info.data<int32_t>()[1]; });
  broken("in place 3; expected the 4 rows", [](SparseWeight& w) {  // of the second window
    int32_t& first = w.info.data<int32_t>()[64];
    int32_t& second = w.info.data<int32_t>()[65];
    const int32_t last = first >> 24 & 0xFF, other = second & 0xFF;
    first = int32_t(uint32_t(first & 0xFFFFFF) | uint32_t(other) << 24);
    second = (second & ~0xFF) | last;
  });
  broken("outside its part", [](SparseWeight& w) { w.gaps.data<int32_t>()[0] = -1; });
  broken("expected the 3 rows that there are", [](SparseWeight& w) { w.out = 259; });
  broken("'values' is", [](SparseWeight& w) { w.values = w.values.slice(0, 0, 256); });
  broken("'gaps' is", [](SparseWeight& w) { w.gaps = w.gaps.slice(0, 0, 32); });
  broken("'gaps' is missing", [](SparseWeight& w) { w.gaps = Tensor(); });
  broken("'offsets' is", [](SparseWeight& w) { w.in = 10000; });
  broken("'info' is", [](SparseWeight& w) { w.info = w.info.to(DType::i64); });
  broken("stored elements", [](SparseWeight& w) { w.stored -= 1; });
  broken("stored elements", [](SparseWeight& w) { w.most = 64; });
}

TEST(SparseLinearWeight, RefusesArraysThatDoNotFitTogether) {
  Rng rng(7);
  const Tensor matrix = random_matrix(130, 70, DType::f16, 0.5, rng);
  for (const SparseFormat format : {SparseFormat::tiled_cbc, SparseFormat::tca_bme}) {
    const auto broken = [&](const char* says, auto&& change) {
      SparseWeight weight = compress(matrix, format);
      change(weight);
      EXPECT_NE(message_of([&] { validate(weight, "layer"); }).find(says), std::string::npos)
          << name_of(format) << ": " << message_of([&] { validate(weight, "layer"); });
    };
    broken("offsets descend", [](SparseWeight& w) { w.offsets.data<int32_t>()[1] = -8; });
    broken("leave room for", [](SparseWeight& w) { w.bitmaps.data<int64_t>()[0] = 0; });
    broken("'info'", [](SparseWeight& w) { w.info.data<int32_t>()[1] += 1; });
    broken("outside the matrix",
           [](SparseWeight& w) { w.bitmaps.data<int64_t>()[w.bitmaps.count() - 1] |= int64_t{1} << 62; });
    broken("first group start", [](SparseWeight& w) { w.offsets.data<int32_t>()[0] = 8; });
    broken("'values' is", [](SparseWeight& w) { w.values = w.values.slice(0, 0, 8); });
    broken("'values' is", [](SparseWeight& w) { w.offsets.data<int32_t>()[w.groups()] = -1; });
    broken("'bitmaps' is", [](SparseWeight& w) { w.bitmaps = w.bitmaps.slice(0, 0, 64); });
    broken("'bitmaps' is", [](SparseWeight& w) { w.out = 400; });
    broken("'offsets' is", [](SparseWeight& w) { w.offsets = w.offsets.to(DType::i64); });
    broken("'info' is missing", [](SparseWeight& w) { w.info = Tensor(); });
    broken("'values' is missing", [](SparseWeight& w) { w.values = Tensor(); });
    broken("stored elements", [](SparseWeight& w) { w.stored += 1; });
    broken("expected sizes of", [](SparseWeight& w) { w.in = -1; });
    broken("expected sizes of", [](SparseWeight& w) { w.in = int64_t{1} << 40; });
    broken("values are i32",
           [](SparseWeight& w) { w.values = Tensor::zeros({8}, DType::i32, Device::cpu()); });
  }
  SparseWeight columns = compress(matrix, SparseFormat::dense_columns);
  columns.in = 71;
  EXPECT_NE(message_of([&] { validate(columns, "layer"); }).find("expected [71, 130]"), std::string::npos);
}

TEST(SparseLinearWeight, AcceptsOnlyArraysOfTheSameMatrix) {
  // A changed bit of the index arrays is refused; what is accepted differs in values alone.
  Rng rng(11);
  const Tensor matrix = random_matrix(70, 66, DType::f16, 0.4, rng);
  for (const SparseFormat format : {SparseFormat::tiled_cbc, SparseFormat::tca_bme}) {
    const SparseWeight whole = compress(matrix, format);
    for (int64_t round = 0; round < 3000; ++round) {
      SparseWeight weight = whole;
      Tensor* const arrays[] = {&weight.bitmaps, &weight.offsets, &weight.info};
      Tensor& array = *arrays[round % 3];
      array = array.clone();
      const int64_t bit = (round * 7919) % int64_t(8 * array.bytes());
      static_cast<unsigned char*>(array.raw())[bit / 8] ^= static_cast<unsigned char>(1 << bit % 8);
      EXPECT_FALSE(message_of([&] { validate(weight, "layer"); }).empty())
          << name_of(format) << " bit " << bit;
    }
  }
}

TEST(SparseLinearWeight, SaysWhatItCannotCompress) {
  const auto says = [](const Tensor& weight) {
    return message_of([&] { compress(weight, SparseFormat::tca_bme); });
  };
  EXPECT_NE(says({}).find("undefined"), std::string::npos);
  EXPECT_NE(says(Tensor::zeros({3}, DType::f16, Device::cpu())).find("expected a matrix"), std::string::npos);
  EXPECT_NE(says(Tensor::zeros({3, 3}, DType::f64, Device::cpu())).find("expected f16, bf16 or f32"),
            std::string::npos);
  const Tensor one = Tensor::zeros({1, 1}, DType::f16, Device::cpu());
  for (const Shape& large : {Shape{1, kMostSparseSize + 1}, Shape{kMostSparseSize + 1, 1}})
    EXPECT_NE(says(one.expand(large)).find("expected sizes of 0 to 1073741824"), std::string::npos);
  EXPECT_NE(message_of([] { parse_sparse_format("csr"); }).find("tca-bme"), std::string::npos);
}

TEST(SparseLinearWeight, NormsOfColumnsAreThoseOfTheMatrix) {
  const Tensor matrix = sparse_normal({130, 70}, DType::bf16, 0.4, 2);
  const std::vector<float> values = matrix.to(DType::f32).to_vector<float>();
  for (const SparseFormat format : kFormats) {
    const std::vector<float> norms = column_norms(compress(matrix, format)).to_vector<float>();
    for (int64_t c = 0; c < 70; ++c) {
      double sum = 0;
      for (int64_t r = 0; r < 130; ++r) sum += std::pow(double(values[size_t(r * 70 + c)]), 2);
      EXPECT_EQ(norms[size_t(c)], float(std::sqrt(sum))) << name_of(format) << " column " << c;
    }
  }
}

// ---- products ----

/// What a gate leaves of x, by its definition.
Tensor gated_by_definition(const Tensor& x, const Gate& gate) {
  const Tensor y = x.clone();
  const int64_t in = x.size(1);
  for (int64_t t = 0; t < x.size(0); ++t) {
    std::vector<std::pair<float, int64_t>> order;
    for (int64_t j = 0; j < in; ++j) {
      const float c = gate.scales.defined() ? gate.scales.at({j}).item<float>() : 1.0f;
      order.push_back({-std::fabs(x.at({t, j}).item<float>()) * c, j});
    }
    if (gate.kind == Gate::Kind::threshold)
      for (int64_t j = 0; j < in; ++j)
        if (-order[size_t(j)].first <= float(gate.threshold)) y.at({t, j}).fill(0);
    if (gate.kind == Gate::Kind::top_k) {
      std::stable_sort(order.begin(), order.end(),
                       [](const auto& a, const auto& b) { return a.first < b.first; });
      for (int64_t i = gate.keep; i < in; ++i) y.at({t, order[size_t(i)].second}).fill(0);
    }
  }
  return y;
}

std::vector<Gate> gates_of(int64_t in) {
  Rng rng(9);
  const Tensor scales = Tensor::empty_packed({in}, DType::f32, Device::cpu());
  fill_uniform(scales, 0.2, 2, rng);
  return {Gate{},
          {.kind = Gate::Kind::threshold, .threshold = 0.7},
          {.kind = Gate::Kind::threshold, .threshold = 0.5, .scales = scales},
          {.kind = Gate::Kind::top_k, .keep = in / 3},
          {.kind = Gate::Kind::top_k, .keep = in / 2, .scales = scales},
          {.kind = Gate::Kind::top_k, .keep = 0},
          {.kind = Gate::Kind::threshold, .threshold = 1e9}};
}

TEST(SparseLinear, EqualsTheDenseProductOfTheGatedInputs) {
  for (const auto& [out, in, tokens] :
       {std::tuple<int64_t, int64_t, int64_t>{5, 7, 1}, {130, 70, 3}, {257, 129, 9}}) {
    const Tensor weight = sparse_normal({out, in}, DType::bf16, 0.5, 4),
                 x = sparse_normal({tokens, in}, DType::bf16, 0, 5),
                 bias = sparse_normal({out}, DType::bf16, 0, 6),
                 residual = sparse_normal({tokens, out}, DType::bf16, 0, 7);
    for (const Gate& gate : gates_of(in)) {
      const Tensor gated = gated_by_definition(x, gate);
      const Tensor expected =
          linear(gated.to(DType::f64), weight.to(DType::f64), bias.to(DType::f64), residual.to(DType::f64));
      for (const SparseFormat format : kFormats) {
        const Tensor y = sparse_linear(x.to(DType::f64), compress(weight, format), gate, bias.to(DType::f64),
                                       residual.to(DType::f64));
        const std::vector<double> a = y.to_vector<double>(), b = expected.to_vector<double>();
        for (size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], 1e-12 * (1 + double(in)));
        EXPECT_TRUE(same_bits(apply_gate(x, gate), gated));
      }
    }
  }
}

TEST(SparseLinear, GivesEqualBitsInEveryFormatWithAnyThreadsAndTokens) {
  const Tensor weight = sparse_normal({521, 263}, DType::f16, 0.6, 4),
               x = sparse_normal({21, 263}, DType::f32, 0, 5);
  const Gate gate{.kind = Gate::Kind::threshold, .threshold = 0.4};
  const Tensor first = sparse_linear(x, compress(weight, SparseFormat::dense_columns), gate);
  for (int64_t t = 0; t < x.size(0); ++t) {  // no sum depends on the tokens next to it
    const Tensor alone =
        sparse_linear(x.slice(0, t, t + 1), compress(weight, SparseFormat::dense_columns), gate);
    EXPECT_TRUE(same_bits(alone, first.slice(0, t, t + 1))) << t;
  }
  const int threads = cpu_threads();
  for (const int count : {1, 3}) {
    set_cpu_threads(count);
    for (const SparseFormat format : kFormats)
      EXPECT_TRUE(same_bits(sparse_linear(x, compress(weight, format), gate), first)) << name_of(format);
  }
  set_cpu_threads(threads);
}

TEST(SparseLinear, PartsAreRowRangesWithGatesOfTheirOwn) {
  const Tensor q = sparse_normal({70, 40}, DType::f32, 0.3, 1),
               k = sparse_normal({33, 40}, DType::f32, 0.6, 2),
               x = sparse_normal({2, 3, 40}, DType::f32, 0, 3), bias = sparse_normal({103}, DType::f32, 0, 4);
  const Gate gate{.kind = Gate::Kind::threshold, .threshold = 0.9};
  const std::vector<SparsePart> parts = {{compress(q, SparseFormat::tca_bme), gate},
                                         {compress(k, SparseFormat::tiled_cbc), {}}};
  const Tensor y = sparse_linear(x, parts, bias);
  EXPECT_EQ(y.shape(), (Shape{2, 3, 103}));
  EXPECT_TRUE(same_bits(y.slice(-1, 0, 70), sparse_linear(x, parts[0].weight, gate, bias.slice(0, 0, 70))));
  EXPECT_TRUE(same_bits(y.slice(-1, 70, 103), sparse_linear(x, parts[1].weight, {}, bias.slice(0, 70, 103))));
  EXPECT_FALSE(same_bits(y.slice(-1, 0, 70), sparse_linear(x, parts[0].weight, {}, bias.slice(0, 0, 70))));
}

TEST(SparseLinear, AnyNumberOfPartsEqualsOneCallPerPart) {
  const Tensor x = sparse_normal({3, 50}, DType::f32, 0, 3);
  std::vector<SparsePart> parts;  // runs of one, of six and of two parts of the same format, and an empty one
  int64_t out = 0;
  for (const auto& [format, rows] : {std::pair{SparseFormat::tca_bme, 20},
                                     {SparseFormat::tiled_cbc, 33},
                                     {SparseFormat::tiled_cbc, 0},
                                     {SparseFormat::tiled_cbc, 7},
                                     {SparseFormat::tiled_cbc, 64},
                                     {SparseFormat::tiled_cbc, 1},
                                     {SparseFormat::tiled_cbc, 260},
                                     {SparseFormat::dense_columns, 5},
                                     {SparseFormat::dense_columns, 9}}) {
    const Gate gate{.kind = Gate::Kind::threshold, .threshold = 0.1 * double(parts.size())};
    parts.push_back({compress(sparse_normal({rows, 50}, DType::f32, 0.5, parts.size() + 1), format), gate});
    out += rows;
  }
  const Tensor bias = sparse_normal({out}, DType::f32, 0, 4),
               residual = sparse_normal({3, out}, DType::f32, 0, 5),
               y = sparse_linear(x, parts, bias, residual);
  int64_t first = 0;
  for (const SparsePart& part : parts) {
    const int64_t end = first + part.weight.out;
    EXPECT_TRUE(same_bits(
        y.slice(-1, first, end),
        sparse_linear(x, part.weight, part.gate, bias.slice(0, first, end), residual.slice(-1, first, end))))
        << "rows " << first << " to " << end;
    first = end;
  }
}

TEST(SparseLinear, KeepsANanUnderEveryGate) {
  const Tensor weight = sparse_normal({9, 20}, DType::f32, 0, 1),
               x = sparse_normal({1, 20}, DType::f32, 0, 2);
  x.at({0, 11}).fill(std::numeric_limits<double>::quiet_NaN());
  for (const Gate& gate : gates_of(20)) {
    if (gate.kind == Gate::Kind::top_k && gate.keep == 0) continue;
    for (const SparseFormat format : kFormats)
      EXPECT_TRUE(std::isnan(sparse_linear(x, compress(weight, format), gate).at({0, 3}).item<double>()));
  }
}

TEST(SparseLinear, TakesEmptyOperands) {
  for (const SparseFormat format : kFormats) {
    const SparseWeight weight = compress(sparse_normal({4, 0}, DType::f32, 0, 1), format);
    const Tensor bias = sparse_normal({4}, DType::f32, 0, 2);
    const Tensor y = sparse_linear(Tensor::empty({3, 0}, DType::f32, Device::cpu()), weight, {}, bias);
    for (int64_t t = 0; t < 3; ++t) EXPECT_TRUE(same_bits(y.select(0, t), bias));
    EXPECT_EQ(sparse_linear(sparse_normal({3, 7}, DType::f32, 0, 1),
                            compress(sparse_normal({0, 7}, DType::f32, 0, 1), format))
                  .shape(),
              (Shape{3, 0}));
    EXPECT_EQ(sparse_linear(sparse_normal({0, 7}, DType::f32, 0, 1),
                            compress(sparse_normal({5, 7}, DType::f32, 0, 1), format))
                  .shape(),
              (Shape{0, 5}));
  }
}

TEST(SparseLinear, RunsDenseColumnsInF32OnAGpu) {
  if (Device::cuda_count() == 0) GTEST_SKIP() << "skipped: no GPU";
  const Tensor matrix = sparse_normal({70, 50}, DType::f32, 0, 1);
  for (const int64_t tokens : {1, 9, 64}) {
    const Tensor x = sparse_normal({tokens, 50}, DType::f32, 0, 2);
    for (const Gate& gate : {Gate{.kind = Gate::Kind::threshold, .threshold = 0.7},
                             Gate{.kind = Gate::Kind::top_k, .keep = 20}}) {
      const Tensor here = sparse_linear(x, compress(matrix, SparseFormat::dense_columns), gate),
                   there =
                       sparse_linear(x.to(Device::cuda()),
                                     compress(matrix, SparseFormat::dense_columns).to(Device::cuda()), gate);
      const std::vector<float> expected = here.to_vector<float>(), got = there.to_vector<float>();
      for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected[i], 1e-4) << tokens << " " << i;
    }
  }
}

TEST(SparseLinear, TakesScalesOfItsDeviceAlone) {
  if (Device::cuda_count() == 0) GTEST_SKIP() << "skipped: no GPU";
  const Tensor x = sparse_normal({2, 6}, DType::f32, 0, 2);
  const Gate gate{.kind = Gate::Kind::threshold, .scales = Tensor::zeros({6}, DType::f32, Device::cuda())},
      here{.kind = Gate::Kind::threshold, .scales = Tensor::zeros({6}, DType::f32, Device::cpu())};
  for (const std::string& message :
       {message_of([&] { apply_gate(x, gate); }), message_of([&] { counting_inputs(x, gate); }),
        message_of([&] { apply_gate(x.to(Device::cuda()), here); })})
    EXPECT_NE(message.find("both must be on one device"), std::string::npos) << message;
}

TEST(SparseLinear, SaysWhatDoesNotFit) {
  const SparseWeight weight = compress(sparse_normal({4, 6}, DType::f16, 0, 1), SparseFormat::tca_bme);
  const Tensor x = sparse_normal({2, 6}, DType::f16, 0, 2);
  const auto expect = [](const char* says, auto&& call) {
    EXPECT_NE(message_of(call).find(says), std::string::npos) << message_of(call);
  };
  expect("has 5", [&] { sparse_linear(sparse_normal({2, 5}, DType::f16, 0, 2), weight); });
  expect("is f16; expected f16, f32 or f64", [&] { sparse_linear(x.to(DType::bf16), weight); });
  expect("no parts", [&] { sparse_linear(x, std::span<const SparsePart>()); });
  expect("is undefined", [&] { sparse_linear(x, SparseWeight{}); });
  expect("bias is", [&] { sparse_linear(x, weight, {}, sparse_normal({5}, DType::f16, 0, 1)); });
  expect("residual is", [&] { sparse_linear(x, weight, {}, {}, sparse_normal({2, 5}, DType::f16, 0, 1)); });
  expect("threshold is -1",
         [&] { sparse_linear(x, weight, {.kind = Gate::Kind::threshold, .threshold = -1}); });
  expect("threshold is nan",
         [&] { sparse_linear(x, weight, {.kind = Gate::Kind::threshold, .threshold = std::nan("")}); });
  expect("keeps 7 inputs of 6", [&] { sparse_linear(x, weight, {.kind = Gate::Kind::top_k, .keep = 7}); });
  SparseWeight large = weight;
  large.out = kMostSparseSize + 1;
  expect("expected sizes of 0 to 1073741824", [&] { sparse_linear(x, large); });
  const Tensor wide = x.slice(1, 0, 1).expand({2, kMostSparseSize + 1});
  expect("apply_gate: x is f16[2, 1073741825]", [&] { apply_gate(wide, {}); });
  expect("counting_inputs: x is f16[2, 1073741825]", [&] { counting_inputs(wide, {}); });
  expect("scales are", [&] {
    sparse_linear(x, weight,
                  {.kind = Gate::Kind::threshold, .scales = Tensor::zeros({3}, DType::f32, Device::cpu())});
  });
  expect("a tape is recording", [&] {
    const Tape tape;
    sparse_linear(x, weight);
  });
}

}  // namespace
}  // namespace tessera::ops
