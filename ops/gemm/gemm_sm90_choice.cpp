#include <algorithm>
#include <limits>

#include "ops/gemm/gemm_estimate_internal.h"
#include "ops/gemm/gemm_narrow.h"
#include "ops/gemm/gemm_sm90_plan.h"

namespace tessera::ops {
namespace {

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

bool vectors(const void* data, int64_t ld, int64_t stride, DType dtype) {
  const int64_t size = int64_t(size_of(dtype));
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && ld * size % 16 == 0 && stride * size % 16 == 0;
}

/// Whether TMA can write d.
bool direct(const Gemm& g) {
  if (!vectors(g.d, g.ldd, g.stride_d, g.out) || (g.c && !vectors(g.c, g.ldd, g.stride_d, g.out)))
    return false;
  return g.pads_d || g.n * int64_t(size_of(g.out)) % 16 == 0;
}

}  // namespace

bool gemm_on_lines(const void* data, int64_t ld, int64_t stride) {
  return reinterpret_cast<uintptr_t>(data) % 128 == 0 && ld % 64 == 0 && stride % 64 == 0;
}

std::string gemm_sm90_lacks(const Gemm& g, Device device) {
  if (device.card().major != 9) return "a GPU of compute capability 9.0";
  if (g.in != DType::bf16 && g.in != DType::f16) return "bf16 or f16 operands";
  if (!vectors(g.a, g.lda, g.stride_a, g.in) || !vectors(g.b, g.ldb, g.stride_b, g.in))
    return "operands whose rows start on 16-byte boundaries";
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() / 2;
  if (std::max({g.m, g.n, g.k * g.terms}) > kMost ||
      g.batch * ceil_div(g.m, 128) * ceil_div(g.n, 128) > kMost / 64)
    return "fewer elements";
  return {};
}

bool gemm_sm90_sums(const Gemm& g) {
  return product_is_gradient(!g.transpose_a, g.transpose_b) && g.out == DType::f32 && g.batch == 1 &&
         g.m <= kMostSummedRows;
}

ProductChoice choose_product(const Gemm& g, int multiprocessors, int forced) {
  // Clocks of an SM, fitted to products with and without the L2 emptied before (docs/ops/gemm.md): from the
  // launch to the first product and from the last to the end, and how much longer that takes with clusters;
  // what L2 yields an SM, and what each byte from there costs next to the products, as power; the epilogue
  // that no other warpgroup's products hide; an element that the threads write, and each part of k that they
  // wait for (beyond 16 no more); how much longer a warpgroup's products take that has none to take turns
  // with; bytes from L2 of an operand whose rows lie across lines, next to those of one whose rows do not.
  constexpr double kClock = 1.6e9, kEnds = 4800, kClusters = 2100, kBytesPerClock = 47, kByte = 0.003,
                   kStoredPerClock = 32, kEpilogue = 4600, kThreads = 0.35, kPart = 1100, kAlone = 1.3,
                   kAcrossLines = 2;
  // What a small product takes at least, and a round of tiles next to the clocks above: seconds, of the
  // comparison with other rows, not of that among tiles.
  constexpr double kLeast = 5.2e-6, kRound = 1.3e-6, kBytesPerSecond = 3.1e12, kFlops = 400e12, kLong = 12e-6;
  constexpr int64_t kMostTiles = 1024;  // in parts
  const int64_t blocks = g.terms * ceil_div(g.k, 64);
  const bool by_engine = direct(g), wide = g.out != g.in,
             gradient = product_is_gradient(!g.transpose_a, g.transpose_b);
  // Only of products that take a while: short ones are bound by their ends.
  const double flops = 2 * double(g.batch) * double(g.m) * double(g.n) * double(g.terms * g.k);
  const bool takes_long = std::max(flops / kFlops, gemm_bytes(g) / kBytesPerSecond) > kLong;
  const auto across = [&](const void* data, int64_t ld, int64_t stride) {
    return takes_long && !gemm_on_lines(data, ld, stride) ? kAcrossLines : 1;
  };
  const double across_a = across(g.a, g.lda, g.stride_a), across_b = across(g.b, g.ldb, g.stride_b);
  ProductChoice best;
  double fewest = 0;  // clocks
  int64_t rounds_of_best = 0;
  for (int index = 0; index < int(std::size(kProductTiles)); ++index) {
    const ProductTileShape& tile = kProductTiles[index];
    if ((forced >= 0 && index != forced) || !tile.takes(!g.transpose_a, g.transpose_b)) continue;
    const bool stores = by_engine && (wide ? gradient && (g.beta == 0 ? tile.wide : tile.wide_adds)
                                           : (g.beta == 0 ? tile.stores : tile.adds));
    const int64_t tiles =
        g.batch * ceil_div(g.m, tile.rows * tile.down()) * ceil_div(g.n, tile.columns * tile.side());
    const int64_t slots = multiprocessors / tile.cluster;
    // 64 of k: the tensor cores' time, and that of shared memory at 128 bytes per clock, where both operands
    // are written once, a is read once and b for every 64 rows.
    const double products = std::max(double(tile.rows) * tile.columns / 32,
                                     2.0 * tile.rows + tile.columns * (1 + tile.rows / 64.0));
    const double loaded = 128.0 * (double(tile.rows) / tile.side() + double(tile.columns) / tile.down());
    const double lines =
        128.0 * (double(tile.rows) / tile.side() * across_a + double(tile.columns) / tile.down() * across_b);
    const double piece = double(tile.rows) * tile.columns;
    const auto round = [&](int64_t splits, bool by_threads,
                           bool turns) {  // the clocks of one round of the grid
      const int64_t depth = ceil_div(blocks, splits);
      const double stored = piece * (splits > 1 || g.out == DType::f32 ? 4 : 2);
      const double block = std::max({(turns ? products : products * kAlone) + loaded * kByte,
                                     lines / kBytesPerClock, stored / double(depth) / kStoredPerClock});
      const double writing = by_threads ? kThreads * piece / double(splits) : 0;
      const double adding = splits > 1 ? double(std::min<int64_t>(splits, 16)) * kPart : 0;
      return double(depth) * block + (tile.ping_pong ? 0 : kEpilogue) + writing + adding;
    };
    // Splits of what does not fill a round, so that it fills a number of shorter ones; at least four blocks
    // of k each.
    const int64_t last = tiles % slots == 0 ? slots : tiles % slots;
    for (int64_t rounds = 0; rounds <= 3; ++rounds) {
      const int64_t wanted = rounds == 0 ? 1 : std::min({slots * rounds / last, slots, blocks / 4});
      if (wanted < 1 || (rounds > 0 && wanted == 1)) continue;
      const int64_t splits = ceil_div(blocks, ceil_div(blocks, wanted)), grid = slots - slots % splits;
      const int64_t whole = splits == 1 ? tiles : tiles / grid * grid;
      const bool by_threads = splits > 1 || !stores;
      if (by_threads && (!tile.by_threads || (tiles - whole) * tile.cluster > kMostTiles)) continue;
      const int64_t whole_rounds = ceil_div(whole, grid),
                    split_rounds = ceil_div((tiles - whole) * splits, grid);
      const bool turns = !tile.ping_pong || tile.cluster > 1 || whole_rounds + split_rounds > 1;
      const double clocks = kEnds + (tile.cluster > 1 ? kClusters : 0) +
                            double(whole_rounds) * round(1, by_threads, turns) +
                            double(split_rounds) * round(splits, by_threads, turns);
      if (fewest != 0 && clocks >= fewest) continue;
      fewest = clocks;
      rounds_of_best = whole_rounds + split_rounds;
      best = {.tile = index,
              .splits = int(splits),
              .whole = splits == 1 ? 0 : int(whole),
              .by_threads = by_threads};
    }
  }
  if (fewest != 0)
    best.seconds =
        std::max(fewest / kClock + kRound * double(rounds_of_best), kLeast + gemm_bytes(g) / kBytesPerSecond);
  // Smaller weights were not measured in that kernel. For up to 8 tokens and a weight whose k is not dense
  // (dx of linear, 4096 -> 32000) the others are 6 to 8 % faster.
  constexpr double kSmall = 2 << 20;
  const double weight = double(g.batch * std::max(g.m, g.n) * g.k) * double(size_of(g.in));
  const bool dense = stream_tokens_are_rows(g) ? g.transpose_b : !g.transpose_a;
  const bool streams =
      forced < 0 ? weight >= kSmall && (dense || std::min(g.m, g.n) > 8) : forced == kStreamTile;
  if (streams && gemm_stream_lacks(g).empty()) {
    const ProductChoice stream = choose_stream(g, multiprocessors);
    if (best.seconds == 0 || stream.seconds < best.seconds) return stream;
  }
  return best;
}

double gemm_bytes(const Gemm& g) {
  const double batch = double(g.batch), matrices = double(g.batch * g.terms), size = double(size_of(g.in));
  return (g.stride_a == 0 ? 1 : matrices) * double(g.m) * double(g.k) * size +
         (g.stride_b == 0 ? 1 : matrices) * double(g.k) * double(g.n) * size +
         batch * double(g.m) * double(g.n) * double(size_of(g.out));
}

double gemm_cublas_seconds(const Gemm& g) {
  // A launch and its ends; copies or zeros, or kernels that load element by element, for odd extents, at a
  // fraction of memory's speed where a side is a few, or where few terms make a large 16-bit d; a long k that
  // is left to a few blocks.
  constexpr double kEnds = 5.3e-6, kOdd = 2.5e-6, kFewAndOdd = 1.7, kFewTerms = 1.5, kFlops = 520e12,
                   kBytesPerSecond = 2.9e12, kTerm = 2e-9;
  constexpr int64_t kFew = 8, kTerms = 32, kNarrow = 64, kShort = 256, kLong = 4096;
  const bool odd = ((g.transpose_a ? g.m : g.k) | (g.transpose_b ? g.k : g.n) | g.n) % 8 != 0;
  const double flops = 2 * double(g.batch) * double(ceil_div(g.m, 64) * 64) * double(ceil_div(g.n, 64) * 64) *
                       double(g.terms * g.k);
  const int64_t side = std::min(g.m, g.n);
  const bool few_terms = g.k <= kTerms && side > kNarrow && g.out == g.in;
  const double bytes = gemm_bytes(g) * (odd && side <= kFew ? kFewAndOdd : few_terms ? kFewTerms : 1);
  // Operands whose padding is not ours come by way of a copy, read and written.
  const double copies = 2 * g.copied / kBytesPerSecond;
  return kEnds + copies + (odd ? kOdd : 0) + std::max(flops / kFlops, bytes / kBytesPerSecond) +
         (std::max(g.m, g.n) <= kShort ? kTerm * double(std::min(g.k, kLong)) : 0);
}

bool gemm_sm90_pays(const Gemm& g, Device device) {
  // A row or a column is no tile, and a few of them in parts or on odd places are none either. Where rows lie
  // across lines TMA is what is slow, and cuBLASLt may be faster: of products that are long
  // enough for its copies, where the estimates, both some 15 % off, say so clearly.
  constexpr double kClearly = 0.85, kLong = 60e-6;
  const int64_t few = std::min(g.m, g.n);
  if (few < 2) return false;
  const ProductChoice choice = choose_product(g, device.multiprocessors());
  if (choice.tile != kStreamTile && few <= 8 && (!direct(g) || choice.splits > 1)) return false;
  return choice.seconds < kLong ||
         (gemm_on_lines(g.a, g.lda, g.stride_a) && gemm_on_lines(g.b, g.ldb, g.stride_b)) ||
         gemm_cublas_seconds(g) >= kClearly * choice.seconds;
}

ProductChoice choose_pair(const Gemm& first, int multiprocessors, int forced) {
  Gemm both = first;
  both.batch = 2;
  both.stride_a = both.stride_b = both.stride_d = 64;  // other matrices, whose places do not matter
  ProductChoice best;
  for (const int tile : kPairTiles) {
    if (forced >= 0 && tile != forced) continue;
    const ProductChoice choice = choose_product(both, multiprocessors, tile);
    if (choice.seconds > 0 && (best.seconds == 0 || choice.seconds < best.seconds)) best = choice;
  }
  return best;
}

bool gemm_pair_pays(const Gemm& first, const Gemm& second, Device device) {
  const auto forced = tuning::ForceRow::forced("gemm");
  if (forced && *forced != int(GemmRow::wgmma)) return false;
  if ((first.sums || second.sums) && first.m + first.n > kMostSummedRows - 512) return false;
  const int multiprocessors = device.multiprocessors();
  double alone = 0;
  for (const Gemm& g : {first, second}) {
    if (!gemm_sm90_lacks(g, device).empty()) return false;
    if (!forced && (gemm_narrow_pays(g, device) || !gemm_sm90_pays(g, device))) return false;
    alone += choose_product(g, multiprocessors).seconds;
  }
  const double together = choose_pair(first, multiprocessors).seconds;
  return together > 0 && together < alone;
}

void gemm_pair(const Gemm& first, const Gemm& second, Device device) {
  if constexpr (kCuda) {
    const ProductChoice choice = choose_pair(first, device.multiprocessors());
    if (first.in == DType::bf16)
      product_pair_sm90<bf16>(first, second, choice, device);
    else
      product_pair_sm90<f16>(first, second, choice, device);
  }
}

void gemm_wgmma(const Gemm& gemm, Device device) {
  if constexpr (kCuda) {
    const ProductChoice choice = choose_product(gemm, device.multiprocessors());
    if (gemm.in == DType::bf16)
      product_sm90<bf16>(gemm, choice, device);
    else
      product_sm90<f16>(gemm, choice, device);
  }
}

}  // namespace tessera::ops
