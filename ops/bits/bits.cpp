#include "ops/bits/bits.h"
#include "runtime/has_cuda.h"

#include <algorithm>
#include <limits>

#include "ops/bits/bits_kernels.h"
#include "runtime/call_site.h"
#include "runtime/integers.h"

namespace tessera::ops {
namespace {

constexpr int64_t kMostRows = std::numeric_limits<int32_t>::max();  // an index is an i32
constexpr int64_t kMostWords = kMostRows / 32;                      // and so is a count of bits
constexpr int64_t kPanelBytes = 64 << 20;                           // of distances that are not kept

// Operations per second of each variant on an H200: popc has 16 results per clock and SM, a single-bit MMA of
// 64 x 128 x 256 takes some 128 clocks of an SM. Both write 4 bytes per pair.
constexpr double kPopcPerSmSecond = 16 * 1.7e9, kMmaWordsPerSmSecond = 64 * 128 * 8 / 128.0 * 1.7e9;
constexpr double kLaunchSeconds = 4e-6;

/// Of whole tiles of side x side pairs and 32 words, each by one block: fewer tiles than SMs leave SMs idle.
double seconds_of_tiles(const BitPairsProblem& problem, int64_t side, double words_per_sm_second,
                        const Gpu& gpu) {
  const double down = double(ceil_div(problem.m, side)), across = double(ceil_div(problem.n, side));
  const double tiles = problem.mirrored ? down * (down + 1) / 2 : down * across;
  const double words_of_tile = double(side * side * round_up(problem.words, 32));
  return tiles * words_of_tile / (words_per_sm_second * std::clamp<double>(tiles, 1, gpu.multiprocessors));
}

constexpr Variant<BitPairsProblem, void(const BitPairs&)> kVariants[] = {
    {"wgmma",
     [](const BitPairsProblem& problem, const Gpu& gpu) -> Reason {
       if (gpu.major != 9) return "compute capability 9.0 (single-bit warpgroup MMAs)";
       if (!problem.aligned || problem.words < 4)
         return "rows that start on 16-byte boundaries (4 words or more)";
       return {};
     },
     [](const BitPairsProblem& problem, const Gpu& gpu) {
       return Estimate{2 * kLaunchSeconds + seconds_of_tiles(problem, 128, kMmaWordsPerSmSecond, gpu)};
     },
     [](const BitPairs& call) {
       if constexpr (kCuda) bit_pairs_wgmma(call);
     }},
    {"popc", lacks_nothing<BitPairsProblem>,
     [](const BitPairsProblem& problem, const Gpu& gpu) {
       return Estimate{kLaunchSeconds + seconds_of_tiles(problem, 64, kPopcPerSmSecond, gpu)};
     },
     [](const BitPairs& call) {
       if constexpr (kCuda) bit_pairs_popc(call);
     }}};

void check_bits(const char* name, const char* what, const Tensor& bits) {
  check(bits.defined(), name, ": ", what, " is undefined");
  check(bits.dtype() == DType::i32 && bits.rank() == 2, name, ": ", what, " is ", describe(bits),
        "; expected packed bits, i32 [rows, words] (ops::pack_bits makes them)");
  check(bits.size(0) <= kMostRows && bits.size(1) <= kMostWords, name, ": ", what, " is ", describe(bits),
        "; expected at most ", kMostRows, " rows of ", kMostWords, " words");
}
void check_columns(const char* name, const Tensor& bits, int64_t columns) {
  check(columns >= 0, name, ": columns is ", columns, "; expected 0 or more");
  check(bits.size(1) == bit_words(columns), name, ": bits is ", describe(bits), " for ", columns,
        " columns; expected ", bit_words(columns), " words per row");
}
void check_together(const char* name, const char* first, const Tensor& a, const char* second,
                    const Tensor& b) {
  check(a.size(1) == b.size(1), name, ": ", first, " is ", describe(a), ", ", second, " is ", describe(b),
        "; expected as many words per row");
  check(a.device() == b.device(), name, ": ", first, " is ", describe(a), ", ", second, " is ", describe(b),
        "; both must be on one device");
}

bool same_rows(const Tensor& a, const Tensor& b) {
  if (!a.shares_storage(b) || a.shape() != b.shape()) return false;
  const Layout &x = a.layout(), &y = b.layout();
  return x.offset == y.offset && x.stride(0) == y.stride(0) && x.stride(1) == y.stride(1);
}

bool is_aligned(const Tensor& rows) {
  return reinterpret_cast<uintptr_t>(rows.raw()) % 16 == 0 &&
         (rows.size(0) <= 1 || rows.row_stride() % 4 == 0);
}

/// All pairs into `out`, whose rows may be a panel of a larger comparison.
void compare(const BitPairs& call) {
  if (call.out.count() == 0) return;
  if (call.a.device().is_cpu()) return bit_pairs_cpu(call);
  if constexpr (kCuda) {
    const Gpu gpu(call.a.device());
    const BitPairsProblem problem{.m = call.a.size(0),
                                  .n = call.b.size(0),
                                  .words = call.a.size(1),
                                  .mirrored = call.mirrored,
                                  .aligned = is_aligned(call.a) && is_aligned(call.b)};
    choose("bit_pairs", kVariants, problem, gpu).launch(call);
  }
}

/// Calls visit(distances [m, N], first) for panels of rows of a, compared with all rows of b.
template <class Visit>
void for_each_panel(const Tensor& a, const Tensor& b, const Visit& visit) {
  const int64_t rows = std::clamp<int64_t>(kPanelBytes / 4 / std::max<int64_t>(b.size(0), 1), 1, a.size(0));
  const Tensor of_a = count_bits(a), of_b = same_rows(a, b) ? of_a : count_bits(b);
  const Tensor scratch = Tensor::empty({rows, b.size(0)}, DType::i32, a.device());
  for (int64_t first = 0; first < a.size(0); first += rows) {
    const int64_t end = std::min(first + rows, a.size(0));
    const Tensor panel = scratch.slice(0, 0, end - first);
    compare({.a = a.slice(0, first, end),
             .b = b,
             .of_a = of_a.slice(0, first, end),
             .of_b = of_b,
             .out = panel,
             .measure = BitMeasure::hamming});
    visit(panel, first);
  }
}

}  // namespace

std::string describe_problem(const BitPairsProblem& problem) {
  return text_of(problem.m, " x ", problem.n, " rows of ", problem.words, " words",
                 problem.mirrored ? " with themselves" : "");
}
std::vector<std::string> bit_pairs_variants() {
  return names_of(kVariants);
}
size_t bit_pairs_choice(const BitPairsProblem& problem, const Gpu& gpu) {
  return choose_index("bit_pairs", kVariants, problem, gpu);
}

Tensor pack_bits(const Tensor& x, Site site) {
  const CallScope call(site);
  check(x.defined(), "pack_bits: x is undefined");
  check(x.rank() == 2 && is_floating(x.dtype()) && x.dtype() != DType::f8e4m3, "pack_bits: x is ",
        describe(x), "; expected f64, f32, bf16 or f16 of rank 2");
  const Tensor bits = Tensor::empty({x.size(0), bit_words(x.size(1))}, DType::i32, x.device());
  check_bits("pack_bits", "the mask", bits);
  if (bits.count() == 0) return bits;
  if (x.device().is_cpu()) {
    pack_bits_cpu(bits, x.detach());
  } else if constexpr (kCuda) {
    pack_bits_cuda(bits, x.detach().with_rows());
  }
  return bits;
}

Tensor unpack_bits(const Tensor& bits, int64_t columns, DType dtype, Site site) {
  const CallScope call(site);
  check_bits("unpack_bits", "bits", bits);
  check_columns("unpack_bits", bits, columns);
  check(is_floating(dtype) && dtype != DType::f8e4m3, "unpack_bits: dtype ", dtype,
        " is not supported; expected f64, f32, bf16 or f16");
  const Tensor y = Tensor::empty({bits.size(0), columns}, dtype, bits.device());
  if (y.count() == 0) return y;
  if (bits.device().is_cpu()) {
    unpack_bits_cpu(y, bits.with_rows());
  } else if constexpr (kCuda) {
    unpack_bits_cuda(y, bits.with_rows());
  }
  return y;
}

Tensor transpose_bits(const Tensor& bits, int64_t columns, Site site) {
  const CallScope call(site);
  check_bits("transpose_bits", "bits", bits);
  check_columns("transpose_bits", bits, columns);
  const Tensor out = Tensor::empty({columns, bit_words(bits.size(0))}, DType::i32, bits.device());
  if (out.count() == 0) return out;
  if (bits.device().is_cpu()) {
    transpose_bits_cpu(out, bits.with_rows());
  } else if constexpr (kCuda) {
    transpose_bits_cuda(out, bits.with_rows());
  }
  return out;
}

Tensor count_bits(const Tensor& bits, Site site) {
  const CallScope call(site);
  check_bits("count_bits", "bits", bits);
  const Tensor counts = Tensor::empty_packed({bits.size(0)}, DType::i32, bits.device());
  if (counts.count() == 0) return counts;
  if (bits.size(1) == 0) {
    counts.fill(0);
  } else if (bits.device().is_cpu()) {
    count_bits_cpu(counts, bits.with_rows());
  } else if constexpr (kCuda) {
    count_bits_cuda(counts, bits.with_rows());
  }
  return counts;
}

Tensor count_differences(const Tensor& a, const Tensor& b, Site site) {
  const CallScope call(site);
  check_bits("count_differences", "a", a);
  check_bits("count_differences", "b", b);
  check_together("count_differences", "a", a, "b", b);
  check(a.size(0) == b.size(0), "count_differences: a is ", describe(a), ", b is ", describe(b),
        "; expected as many rows");
  const Tensor sum = Tensor::empty_packed({1}, DType::i64, a.device());
  sum.fill(0);
  if (a.count() == 0) return sum;
  if (a.device().is_cpu()) {
    count_differences_cpu(sum, a.with_rows(), b.with_rows());
  } else if constexpr (kCuda) {
    count_differences_cuda(sum, a.with_rows(), b.with_rows());
  }
  return sum;
}

Tensor bit_pairs(const Tensor& a, const Tensor& b, BitMeasure measure, Site site) {
  const CallScope call(site);
  check_bits("bit_pairs", "a", a);
  check_bits("bit_pairs", "b", b);
  check_together("bit_pairs", "a", a, "b", b);
  const DType dtype = measure == BitMeasure::jaccard ? DType::f32 : DType::i32;
  BitPairs pairs{.a = a.with_rows(),
                 .out = Tensor::empty({a.size(0), b.size(0)}, dtype, a.device()),
                 .measure = measure};
  pairs.mirrored = same_rows(a, b);
  pairs.b = pairs.mirrored ? pairs.a : b.with_rows();
  if (measure != BitMeasure::overlap) {
    pairs.of_a = count_bits(pairs.a);
    pairs.of_b = pairs.mirrored ? pairs.of_a : count_bits(pairs.b);
  }
  compare(pairs);
  return pairs.out;
}

NearestRows nearest_bits(const Tensor& queries, const Tensor& bits, int64_t k, Site site) {
  const CallScope call(site);
  check_bits("nearest_bits", "queries", queries);
  check_bits("nearest_bits", "bits", bits);
  check_together("nearest_bits", "queries", queries, "bits", bits);
  check(bits.size(0) > 0, "nearest_bits: bits is ", describe(bits),
        "; expected at least one row to choose from");
  check(1 <= k && k <= bits.size(0), "nearest_bits: k = ", k, " of ", bits.size(0), " rows; expected 1 to ",
        bits.size(0));
  const Shape shape{queries.size(0), k};
  const NearestRows out{.indices = Tensor::empty_packed(shape, DType::i32, bits.device()),
                        .distances = Tensor::empty_packed(shape, DType::i32, bits.device())};
  if (out.indices.count() == 0) return out;
  const Tensor from = queries.with_rows(), to = same_rows(queries, bits) ? from : bits.with_rows();
  if (bits.device().is_cpu()) {
    nearest_bits_cpu(out, from, to);
  } else if constexpr (kCuda) {
    for_each_panel(from, to, [&](const Tensor& distances, int64_t first) {
      nearest_of_distances_cuda(out, distances, first);
    });
  }
  return out;
}

Tensor hamming_histogram(const Tensor& bits, Site site) {
  const CallScope call(site);
  check_bits("hamming_histogram", "bits", bits);
  const Tensor histogram = Tensor::empty_packed({32 * bits.size(1) + 1}, DType::i64, bits.device());
  histogram.fill(0);
  if (bits.size(0) < 2) return histogram;
  const Tensor rows = bits.with_rows();
  if (bits.device().is_cpu()) {
    hamming_histogram_cpu(histogram, rows);
  } else if constexpr (kCuda) {
    for_each_panel(rows, rows, [&](const Tensor& distances, int64_t first) {
      add_to_histogram_cuda(histogram, distances, first);
    });
  }
  return histogram;
}

}  // namespace tessera::ops
