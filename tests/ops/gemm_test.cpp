#include "ops/gemm/gemm.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <string>

#include "ops/random/random.h"
#include "runtime/parallel.h"
#include "runtime/rng.h"

extern "C" {
void openblas_set_num_threads(int threads);
int openblas_get_num_threads();
char* openblas_get_corename();
}

namespace tessera::ops {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

Tensor numbers(const Shape& shape, DType dtype, int64_t seed) {
  std::vector<double> values(size_t(shape.count()));
  for (size_t i = 0; i < values.size(); ++i) values[i] = double((int64_t(i) * 7 + seed) % 11 - 5);
  return Tensor::from(values, shape).to(dtype);
}

/// The definition, element by element.
std::vector<double> expected(const Tensor& d, const Tensor& a, const Tensor& b, double alpha,
                             bool accumulate) {
  const int64_t m = a.size(0), k = a.size(1), n = b.size(1);
  const auto in_a = a.to_vector<double>(), in_b = b.to_vector<double>(), in_d = d.to_vector<double>();
  std::vector<double> result(size_t(m * n));
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j) {
      double sum = 0;
      for (int64_t l = 0; l < k; ++l) sum += in_a[size_t(i * k + l)] * in_b[size_t(l * n + j)];
      result[size_t(i * n + j)] = alpha * sum + (accumulate ? in_d[size_t(i * n + j)] : 0);
    }
  return result;
}

/// While it lives, this process gets no more than `more` bytes of addresses besides those that it has.
class AddressLimit {
 public:
  explicit AddressLimit(int64_t more) {
    std::ifstream status("/proc/self/status");
    int64_t kib = 0;
    for (std::string word; kib == 0 && status >> word;)
      if (word == "VmSize:") status >> kib;
    ::getrlimit(RLIMIT_AS, &before_);
    const rlimit limit{rlim_t(kib) * 1024 + rlim_t(more), before_.rlim_max};
    ::setrlimit(RLIMIT_AS, &limit);
  }
  ~AddressLimit() { ::setrlimit(RLIMIT_AS, &before_); }
  AddressLimit(const AddressLimit&) = delete;

 private:
  rlimit before_{};
};

#if defined(__x86_64__)
// OpenBLAS falls back to Prescott's kernels, without AVX, where it does not know the CPU's model.
TEST(Gemm, OpenBlasUsesTheInstructionsOfTheCpu) {
  if (!__builtin_cpu_supports("avx2") || std::getenv("OPENBLAS_CORETYPE")) GTEST_SKIP();
  EXPECT_STRNE(openblas_get_corename(), "Prescott");
  EXPECT_EQ(std::getenv("OPENBLAS_CORETYPE"), nullptr);
}
#endif

TEST(GemmDeathTest, WithoutRoomForOpenBlasItSaysSoAndCanBeTriedAgain) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // a new process, in which OpenBLAS holds no buffer yet
  const auto with_little_room = [](int threads, int64_t room) {
    set_cpu_threads(threads);
    const Tensor a = numbers({64, 64}, DType::f32, 1), d = numbers({64, 64}, DType::f32, 2);
    try {
      const AddressLimit limit(room);
      multiply(d, a, a);
    } catch (const OutOfMemory& error) {
      std::fprintf(stderr, "%s\n", error.what());
    }
    multiply(d, a, a);
    std::_Exit(d.to_vector<double>() == expected(d, a, a, 1, false) ? 0 : 1);
  };
  const std::string refused = "^out of memory on cpu: OpenBLAS needs a buffer of 128 MiB for each of ",
                    next = " of them; [^\n]*TESSERA_THREADS[^\n]*\n$";
  EXPECT_EXIT(with_little_room(1, int64_t{64} << 20), testing::ExitedWithCode(0),
              refused + "1 thread, and the system gives 0" + next);
  EXPECT_EXIT(with_little_room(2, int64_t{192} << 20), testing::ExitedWithCode(0),
              refused + "2 threads, and the system gives 1" + next);
  EXPECT_EXIT(with_little_room(1, int64_t{192} << 20), testing::ExitedWithCode(0), "^$");
}

// Small integers: every partial sum is exact in f32, so plain loops and OpenBLAS (80 x 70 x 65 is above its
// threshold) must both hit the definition exactly, whatever the layout.
TEST(Gemm, EveryOrientationScaleAndSumIsExactOnIntegers) {
  for (const DType dtype : {DType::f64, DType::f32})
    for (const auto& [m, n, k] : {std::array<int64_t, 3>{3, 4, 5}, {80, 70, 65}, {5, 33, 257}, {1, 9, 300}})
      for (const bool transpose_a : {false, true})
        for (const bool transpose_b : {false, true})
          for (const bool accumulate : {false, true})
            for (const double alpha : {1.0, -0.5}) {
              Tensor a = transpose_a ? numbers({k, m}, dtype, 1).transpose(0, 1) : numbers({m, k}, dtype, 1);
              Tensor b = transpose_b ? numbers({n, k}, dtype, 2).transpose(0, 1) : numbers({k, n}, dtype, 2);
              const Tensor d = numbers({m, n}, dtype, 3);
              const auto want = expected(d, a, b, alpha, accumulate);
              multiply(d, a, b, {.alpha = alpha, .accumulate = accumulate});
              EXPECT_EQ(d.to_vector<double>(), want) << dtype << " " << m << " " << n << " " << k
                                                     << transpose_a << transpose_b << accumulate << alpha;
            }
}

// What CUDA does with more than 2^30 rows, columns or k, with a limit of a few: on integers that are exact in
// every dtype and order.
TEST(Gemm, PiecesAreTheWhole) {
  std::vector<Device> places{Device::cpu()};
  if (Device::cuda_count() > 0) places.push_back(Device::cuda(0));
  for (const Device device : places)
    for (const int64_t most : {1, 7, 64, 100})
      for (const bool accumulate : {false, true}) {
        const auto on = [&](const Tensor& x) { return x.to(device); };
        const auto check = [&](const Shape& lead_a, const Shape& lead_b, const Shape& lead_d, int64_t m,
                               int64_t n, int64_t k) {
          const auto shape = [](const Shape& lead, int64_t rows, int64_t columns) {
            return lead.inserted(lead.rank(), rows).inserted(lead.rank() + 1, columns);
          };
          const DType dtype = DType::f32;
          const Tensor a = on(numbers(shape(lead_a, m, k), dtype, 1)),
                       b = on(numbers(shape(lead_b, k, n), dtype, 2));
          const Tensor whole = on(numbers(shape(lead_d, m, n), dtype, 3)), pieces = whole.clone();
          MultiplyOptions options{.alpha = 2, .accumulate = accumulate};
          if (!accumulate) {
            options.bias = on(numbers({n}, dtype, 4));
            options.residual = on(numbers(shape(lead_d, m, n), dtype, 5));
          }
          multiply(whole, a, b, options);
          multiply_in_chunks(pieces, a, b, options, most);
          EXPECT_EQ(pieces.to_vector<double>(), whole.to_vector<double>())
              << device.name() << " " << most << " " << whole.shape() << " k " << k;
        };
        check({}, {}, {}, 130, 70, 3);
        check({}, {}, {}, 3, 5, 200);
        check({}, {}, {}, 1, 131, 1);
        check({3}, {}, {3}, 40, 2, 9);
        check({2, 1}, {5}, {2, 5}, 3, 4, 6);
        check({1}, {150}, {150}, 1, 3, 2);
      }
}

/// Shapes that are cut into one tile and into many, whose last ones are shorter.
TEST(Gemm, TheNumberOfThreadsChangesNoBit) {
  const int before = cpu_threads();
  const auto draw = [](const Shape& shape, DType dtype, uint64_t seed) {
    Rng rng(seed);
    const Tensor x = Tensor::empty(shape, dtype, Device::cpu());
    fill_normal(x, 0, 1, rng);
    return x;
  };
  for (const DType dtype : {DType::f32, DType::f64})
    for (const auto& [m, n, k] : {std::array<int64_t, 3>{40, 40, 40},
                                  {768, 171, 64},
                                  {171, 64, 768},
                                  {300, 700, 100},
                                  {1, 3000, 100},
                                  {3000, 1, 100}})
      for (const bool transpose_a : {false, true})
        for (const bool transpose_b : {false, true}) {
          const Tensor a = transpose_a ? draw({k, m}, dtype, 1).transpose(0, 1) : draw({m, k}, dtype, 1);
          const Tensor b = transpose_b ? draw({n, k}, dtype, 2).transpose(0, 1) : draw({k, n}, dtype, 2);
          std::vector<std::vector<double>> results;
          for (const int threads : {1, 2, 4}) {
            set_cpu_threads(threads);
            const Tensor d = draw({m, n}, dtype, 3);
            multiply(d, a, b, {.accumulate = true});
            results.push_back(d.to_vector<double>());
          }
          EXPECT_TRUE(results[0] == results[1] && results[0] == results[2])
              << dtype << " " << m << " " << n << " " << k << transpose_a << transpose_b;
        }
  set_cpu_threads(before);
}

TEST(Gemm, OpenBlasKeepsItsThreadsAndTheyChangeNoBit) {
  const int before = openblas_get_num_threads();
  const Tensor a = Tensor::empty({300, 200}, DType::f32, Device::cpu()),
               b = Tensor::empty({200, 400}, DType::f32, Device::cpu());
  Rng rng(1);
  fill_normal(a, 0, 1, rng), fill_normal(b, 0, 1, rng);
  std::vector<std::vector<float>> results;
  for (const int threads : {1, 2, 3}) {
    openblas_set_num_threads(threads);
    const Tensor d = Tensor::empty({300, 400}, DType::f32, Device::cpu());
    multiply(d, a, b);
    results.push_back(d.to_vector<float>());
    EXPECT_EQ(openblas_get_num_threads(), threads);
  }
  openblas_set_num_threads(before);
  EXPECT_TRUE(results[0] == results[1] && results[0] == results[2]);
}

TEST(Gemm, UninitialisedResultsAreNotRead) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16})
    for (const int64_t size : {3, 50}) {
      const Tensor d = Tensor::full({size, size}, kNaN, dtype, Device::cpu());
      const Tensor a = numbers({size, size}, dtype, 1), b = numbers({size, size}, dtype, 2);
      multiply(d, a, b);
      for (const double value : d.to_vector<double>()) EXPECT_FALSE(std::isnan(value)) << dtype << size;
    }
}

TEST(Gemm, NonFiniteOperandsReachTheResult) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16})
    for (const int64_t size : {4, 64}) {
      const Tensor a = Tensor::zeros({size, size}, dtype, Device::cpu());
      const Tensor b = Tensor::full({size, size}, 1, dtype, Device::cpu());
      b.at({1, 2}).fill(std::numeric_limits<double>::infinity());
      const Tensor d = Tensor::empty({size, size}, dtype, Device::cpu());
      multiply(d, a, b);
      EXPECT_TRUE(std::isnan(d.at({0, 2}).item())) << "0 times infinity, " << dtype << size;
      EXPECT_EQ(d.at({0, 1}).item(), 0);
    }
}

TEST(Gemm, WritesNothingButTheResult) {
  // 9 columns of f32 are pitched to 12; the view leaves a row and a column of its frame on every side.
  const Tensor frame = Tensor::full({40, 40}, 7, DType::f32, Device::cpu());
  multiply(frame.slice(0, 1, 39).slice(1, 1, 39), numbers({38, 9}, DType::f32, 1),
           numbers({9, 38}, DType::f32, 2));
  const auto values = frame.to_vector<double>();
  for (int64_t i = 0; i < 40; ++i)
    for (const int64_t at : {i, 39 * 40 + i, i * 40, i * 40 + 39}) EXPECT_EQ(values[size_t(at)], 7) << at;
}

TEST(Gemm, BatchesBroadcastAndRowsFold) {
  const Tensor a = numbers({2, 3, 4, 5}, DType::f64, 1), one = numbers({5, 6}, DType::f64, 2),
               some = numbers({3, 5, 6}, DType::f64, 3);
  for (const Tensor& b : {one, some}) {
    const Tensor d = Tensor::empty({2, 3, 4, 6}, DType::f64, Device::cpu());
    multiply(d, a, b);
    for (int64_t i = 0; i < 2; ++i)
      for (int64_t j = 0; j < 3; ++j) {
        const Tensor part = Tensor::empty({4, 6}, DType::f64, Device::cpu());
        multiply(part, a.select(0, i).select(0, j), b.rank() == 2 ? b : b.select(0, j));
        EXPECT_EQ(d.select(0, i).select(0, j).to_vector<double>(), part.to_vector<double>());
      }
  }
}

TEST(Gemm, OneRowMatricesWithGapsAreABatch) {
  // The rows of a are columns in memory, so the batch cannot become rows of one product.
  const Tensor a = numbers({3, 4, 1}, DType::f64, 1).transpose(1, 2);  // [3, 1, 4], column stride 1
  const Tensor gaps = numbers({3, 1, 8}, DType::f64, 4).slice(2, 0, 8, 2);
  const Tensor b = numbers({4, 2}, DType::f64, 2);
  for (const Tensor& x : {a, gaps, a.slice(0, 0, 1).expand({3, 1, 4})}) {
    const Tensor d = Tensor::empty({3, 1, 2}, DType::f64, Device::cpu());
    multiply(d, x, b);
    for (int64_t i = 0; i < 3; ++i)
      EXPECT_EQ(d.select(0, i).to_vector<double>(), expected(d.select(0, i), x.select(0, i), b, 1, false));
  }
}

TEST(Gemm, SumsRunOverTheMissingDimensions) {
  const Tensor a = numbers({2, 3, 4, 5}, DType::f64, 1), b = numbers({2, 3, 5, 6}, DType::f64, 2);
  const Tensor products = Tensor::empty({2, 3, 4, 6}, DType::f64, Device::cpu());
  multiply(products, a, b);
  const auto each = products.to_vector<double>();
  const auto check_sum = [&](const Shape& shape, const Tensor& left, bool one_gemm) {
    for (const bool accumulate : {false, true}) {
      const Tensor d = numbers(shape, DType::f64, 5);
      std::vector<double> want = accumulate ? d.to_vector<double>() : std::vector<double>(size_t(d.count()));
      for (int64_t i = 0; i < 2; ++i)
        for (int64_t j = 0; j < 3; ++j)
          for (int64_t e = 0; e < 24; ++e) {
            int64_t to = 0;
            if (shape.rank() >= 3 && shape[-3] == 3) to = j;
            if (shape.rank() == 4 && shape[0] == 2) to += i * shape[1];
            want[size_t(to * 24 + e)] += each[size_t((i * 3 + j) * 24 + e)];
          }
      EXPECT_EQ(sum_is_one_gemm(d, left, b), one_gemm) << shape;
      multiply_sum(d, left, b, accumulate);
      EXPECT_EQ(d.to_vector<double>(), want) << shape << accumulate;
    }
  };
  check_sum({2, 3, 4, 6}, a, true);
  check_sum({2, 1, 4, 6}, a, false);
  check_sum({3, 4, 6}, a, false);
  check_sum({1, 3, 4, 6}, a, false);
  check_sum({4, 6}, a, false);  // the columns of a do not go on from matrix to matrix
  check_sum({1, 1, 4, 6}, a, false);
  const Tensor by_columns = Tensor::empty({2, 3, 5, 4}, DType::f64, Device::cpu()).transpose(2, 3);
  by_columns.copy_from(a);
  check_sum({4, 6}, by_columns, true);
}

TEST(Gemm, NothingToSumGivesZerosOrTheBias) {
  const Tensor a = Tensor::empty({2, 0}, DType::f32, Device::cpu()),
               b = Tensor::empty({0, 3}, DType::f32, Device::cpu());
  const Tensor d = Tensor::full({2, 3}, kNaN, DType::f32, Device::cpu());
  multiply(d, a, b);
  EXPECT_EQ(d.to_vector<double>(), std::vector<double>(6, 0.0));
  multiply(d, a, b, {.bias = Tensor::from(std::vector<float>{1, 2, 3}, {3})});
  EXPECT_EQ(d.to_vector<double>(), (std::vector<double>{1, 2, 3, 1, 2, 3}));
  multiply(d, a, b, {.accumulate = true});
  EXPECT_EQ(d.to_vector<double>(), (std::vector<double>{1, 2, 3, 1, 2, 3}));
}

TEST(Gemm, LargeProductsRepeatBitwise) {
  const Tensor a = numbers({300, 257}, DType::f32, 1), b = numbers({257, 190}, DType::f32, 2);
  multiply(a, a.clone(), Tensor::full({257, 257}, 0.1, DType::f32, Device::cpu()));
  const Tensor first = Tensor::empty({300, 190}, DType::f32, Device::cpu()),
               second = Tensor::empty_like(first);
  multiply(first, a, b);
  for (int run = 0; run < 5; ++run) {
    multiply(second, a, b);
    EXPECT_EQ(first.to_vector<float>(), second.to_vector<float>());
  }
}

TEST(Gemm, HalfPrecisionGradientsMayBeF32) {
  // 1 + 2^-9 is not a bf16.
  const Tensor d = Tensor::empty({1, 1}, DType::f32, Device::cpu());
  const Tensor a = Tensor::from(std::vector<double>{1, 0.001953125}, {1, 2}).to(DType::bf16);
  multiply(d, a, Tensor::full({2, 1}, 1, DType::bf16, Device::cpu()));
  EXPECT_EQ(d.item(), 1.001953125);
}

}  // namespace
}  // namespace tessera::ops
