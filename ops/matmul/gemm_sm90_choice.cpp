#include <algorithm>
#include <limits>

#include "ops/matmul/gemm_sm90_plan.h"

namespace tessera::ops {
namespace {

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

bool vectors(const void* data, int64_t ld, int64_t stride, DType dtype) {
  const int64_t size = int64_t(size_of(dtype));
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && ld * size % 16 == 0 && stride * size % 16 == 0;
}

/// Whether the copy engine can write d.
bool direct(const Gemm& g) {
  if (!vectors(g.d, g.ldd, g.stride_d, g.out)) return false;
  return g.pads_d || g.n * int64_t(size_of(g.out)) % 16 == 0;
}

}  // namespace

std::string gemm_sm90_lacks(const Gemm& g, Device device) {
  if (device.card().major != 9) return "a card of compute capability 9.0";
  if (g.in != DType::bf16 && g.in != DType::f16) return "bf16 or f16 operands";
  if (!vectors(g.a, g.lda, g.stride_a, g.in) || !vectors(g.b, g.ldb, g.stride_b, g.in))
    return "operands whose rows start on 16-byte boundaries";
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() / 2;
  if (std::max({g.m, g.n, g.k}) > kMost || g.batch * ceil_div(g.m, 128) * ceil_div(g.n, 128) > kMost / 64)
    return "fewer elements";
  return {};
}

ProductChoice choose_product(const Gemm& g, int multiprocessors, int forced) {
  // Clocks of an SM, measured (docs/ops/gemm.md): from the launch to the first product and from the last to
  // the end; what L2 yields an SM; the waiting of parts of k for each other.
  constexpr double kClock = 1.6e9, kEnds = 6500, kBytesPerClock = 62, kMeeting = 3000;
  constexpr int64_t kMostTiles = 1024;  // in parts
  const int64_t blocks = ceil_div(g.k, 64);
  const bool may_store = g.out == g.in && direct(g);
  ProductChoice best;
  for (int index = 0; index < int(std::size(kProductTiles)); ++index) {
    if (forced >= 0 && index != forced) continue;
    const ProductTileShape& tile = kProductTiles[index];
    const bool stores = may_store && (g.beta == 0 || tile.adds);
    const int64_t tiles = g.batch * ceil_div(g.m, tile.rows * tile.cluster) * ceil_div(g.n, tile.columns);
    const int64_t slots = multiprocessors / tile.cluster;
    const double products = double(tile.rows) * tile.columns / 32 * tile.slack;  // 64 of k
    const double loaded = 128.0 * (tile.rows + double(tile.columns) / tile.cluster);
    const double piece = double(tile.rows) * tile.columns;
    const auto clocks = [&](int64_t splits) {
      const int64_t depth = ceil_div(blocks, splits),
                    waves = ceil_div(tiles * splits, slots - slots % splits);
      const double stored = piece * (splits > 1 || g.out == DType::f32 ? 4 : 2);
      const double block = std::max(products, (loaded + stored / double(depth)) / kBytesPerClock);
      const double adding = splits > 1 ? kMeeting + 8 * piece / kBytesPerClock : 0;
      return kEnds + double(waves) * (double(depth) * block + tile.between + adding);
    };
    // Splits that fill a number of waves; at least four blocks of k each.
    for (int64_t waves = 0; waves <= 3; ++waves) {
      const int64_t wanted = waves == 0 ? 1 : std::min({slots * waves / tiles, slots, blocks / 4});
      if (wanted < 1 || (waves > 0 && wanted == 1)) continue;
      const int64_t splits = ceil_div(blocks, ceil_div(blocks, wanted));
      const bool by_threads = splits > 1 || !stores;
      if (by_threads && (!tile.by_threads || (splits > 1 && tiles * tile.cluster > kMostTiles))) continue;
      const double seconds = clocks(splits) / kClock;
      if (best.seconds == 0 || seconds < best.seconds)
        best = {.tile = index, .splits = int(splits), .by_threads = by_threads, .seconds = seconds};
    }
  }
  return best;
}

bool gemm_sm90_pays(const Gemm& g, Device device) {
  // A row or a column is no tile, and a few of them whose sums go through scratch are none either.
  const int64_t few = std::min(g.m, g.n);
  return few > 1 && (few > 8 || !choose_product(g, device.card().multiprocessors).by_threads);
}

void gemm_wgmma(const Gemm& gemm, Device device) {
  if constexpr (kCuda) {
    const ProductChoice choice = choose_product(gemm, device.card().multiprocessors);
    if (gemm.in == DType::bf16)
      product_sm90<bf16>(gemm, choice, device);
    else
      product_sm90<f16>(gemm, choice, device);
  }
}

}  // namespace tessera::ops
