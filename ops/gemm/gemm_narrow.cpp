#include "ops/gemm/gemm_narrow.h"
#include "runtime/has_cuda.h"

#include <algorithm>
#include <limits>

#include "ops/gemm/gemm_models_internal.h"
#include "runtime/integers.h"

namespace tessera::ops {
namespace {

constexpr int64_t kFew = 64;  // what makes a side narrow

/// The parts of k that one block adds up.
int64_t group_of(int64_t splits) {
  constexpr int64_t kAlone = 16;
  if (splits <= kAlone) return splits;
  int64_t group = 4;
  while (group * group < splits) ++group;
  return group;
}

}  // namespace

std::string gemm_narrow_lacks(const Gemm& g) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() / 2;
  // The largest tile, which the choice may always fall back on.
  if (std::max({g.m, g.n, g.k}) > kMost || g.batch * ceil_div(g.m, 64) * ceil_div(g.n, 64) > kMost)
    return "fewer elements";
  return {};
}

bool narrow_by_mma(const Gemm& g) {
  return g.in != DType::f32 && g.a;
}

NarrowChoice choose_narrow(const Gemm& g, const Gpu& gpu, int forced) {
  const NarrowCosts& c = gemm_costs(gpu).narrow;
  const int multiprocessors = gpu.multiprocessors;
  constexpr int64_t kResident = 3, kMost = std::numeric_limits<int32_t>::max() / 2, kMostParts = 2048;
  NarrowChoice best;
  for (int index = 0; index < int(std::size(kNarrowTiles)); ++index) {
    if (forced >= 0 && index != forced) continue;
    const NarrowTile& tile = kNarrowTiles[index];
    const bool swapped = tile.rows != tile.columns && g.n > g.m;
    const int64_t rows = swapped ? g.n : g.m, columns = swapped ? g.m : g.n;
    const int64_t tiles = g.batch * ceil_div(rows, tile.rows) * ceil_div(columns, tile.columns);
    const int64_t chunk = narrow_depth(tile, size_of(g.in)), chunks = ceil_div(g.k, chunk);
    const int64_t slots = multiprocessors * kResident;
    if (tiles > kMost) continue;
    const double size = double(size_of(g.in));
    const double chunk_bytes =
        double(std::min<int64_t>(rows, tile.rows) + std::min<int64_t>(columns, tile.columns)) *
        double(std::min(g.k, chunk)) * size;
    const double d_bytes =
        double(std::min<int64_t>(rows, tile.rows) * std::min<int64_t>(columns, tile.columns)) *
        double(size_of(g.out));
    const double issue = double(tile.rows * tile.columns) * double(std::min(g.k, chunk)) / 128 * 1.6 +
                         double((tile.rows + tile.columns) * chunk) / 32 + 100;
    for (int64_t wanted = 1;; wanted *= 2) {
      const bool most = wanted >= chunks || wanted * tiles >= slots || tile.rows * tile.columns > 1024;
      const int64_t parts = std::min({wanted, chunks, std::max<int64_t>(kMostParts / tiles, 1)});
      const int64_t depth = ceil_div(chunks, parts), splits = ceil_div(chunks, depth);
      const int64_t blocks = tiles * splits, group = group_of(splits), groups = ceil_div(splits, group);
      const double together = double(std::clamp<int64_t>(ceil_div(blocks, multiprocessors), 1, kResident));
      const double step = std::max({c.trip, together * issue, together * chunk_bytes / c.bytes_per_clock});
      const double rounds = double(ceil_div(blocks, slots));
      double clocks =
          c.ends + rounds * (c.block + double(depth) * step + together * d_bytes / c.bytes_per_clock);
      if (splits > 1) clocks += c.meet + double(ceil_div(group, 8)) * c.terms;
      if (groups > 1) clocks += c.meet + double(ceil_div(groups, 8)) * c.terms;
      if (best.seconds == 0 || clocks / c.clock < best.seconds)
        best = {.tile = index,
                .swapped = swapped,
                .splits = int(splits),
                .group = int(group),
                .seconds = clocks / c.clock};
      if (most) break;
    }
  }
  return best;
}

namespace {

/// Blocks of whole 128 rows and 32 columns: some 256 columns, fewer where there would be too few blocks, for
/// few loads of terms a row and many rows a load of them.
NarrowChoice choose_terms(const Gemm& g, const Gpu& gpu) {
  const NarrowTermsCosts& c = gemm_costs(gpu).narrow_terms;
  const int multiprocessors = gpu.multiprocessors;
  constexpr int64_t kWide = 256, kFewest = 64, kLarge = int64_t(32) << 20;
  const bool many = g.k > kMostTerms / 2;
  const int64_t strips = ceil_div(g.m, 128), wanted = multiprocessors * (many ? 3 : 4);
  const int64_t ranges =
      std::max(ceil_div(g.n, kWide), std::min(ceil_div(g.n, kFewest), ceil_div(wanted, strips * g.batch)));
  const int64_t size = int64_t(size_of(g.out));
  const bool shared = g.ldd * size % 32 != 0;
  return {.tile = kNarrowTerms,
          .rows = strips * ranges * g.batch > 2 * wanted ? 256 : 128,
          .columns = int(round_up(ceil_div(g.n, ranges), 32)),
          .staged = shared && g.batch * g.m * g.n * size > kLarge,
          .seconds = c.ends + gemm_bytes(g) / (shared ? c.shared
                                               : many ? c.more
                                                      : c.memory)};
}

}  // namespace

NarrowChoice choose_narrow_mma(const Gemm& g, const Gpu& gpu, int forced) {
  if (forced == kNarrowTerms) return choose_terms(g, gpu);
  const NarrowMmaCosts& c = gemm_costs(gpu).narrow_mma;
  const int multiprocessors = gpu.multiprocessors;
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() / 2;
  const auto packs = [](const void* data, int64_t ld, int64_t stride) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && ld % 8 == 0 && stride % 8 == 0;
  };
  const double elements = packs(g.a, g.lda, g.stride_a) && packs(g.b, g.ldb, g.stride_b) ? 0 : c.elements;
  const double memory = gemm_bytes(g) / c.memory;
  const bool swapped = g.n > g.m;
  const int64_t rows = swapped ? g.n : g.m, columns = swapped ? g.m : g.n;
  NarrowChoice best;
  // Of equals the smallest tile, whose kernel starts soonest.
  for (int index = int(std::size(kNarrowMmaTiles)) - 1; index >= 0; --index) {
    if (forced >= 0 && index != forced) continue;
    const NarrowMmaTile& tile = kNarrowMmaTiles[index];
    // Wider ones were not measured, and would be half empty.
    if (forced < 0 && tile.columns > std::max<int64_t>(8, 2 * columns)) continue;
    const int64_t tiles = g.batch * ceil_div(rows, tile.rows) * ceil_div(columns, tile.columns);
    if (tiles > kMost) continue;
    const int64_t chunks = ceil_div(g.k, tile.depth), slots = multiprocessors * int64_t(tile.resident);
    const double deep = double(std::min<int64_t>(g.k, tile.depth));
    const double in =
        double(std::min<int64_t>(rows, tile.rows) + std::min<int64_t>(columns, tile.columns)) * deep * 2;
    const double out = double(std::min<int64_t>(rows, tile.rows) * std::min<int64_t>(columns, tile.columns));
    const double products = double(tile.rows * tile.columns) * deep * c.multiply;
    // One block per tile, or parts of k for one to four blocks per SM.
    for (int share = 0; share <= 4; share = std::max(1, share * 2)) {
      const int64_t wanted =
          share == 0 ? 1 : std::min(ceil_div(int64_t(multiprocessors) * share, tiles), chunks);
      const int64_t depth = ceil_div(chunks, wanted), splits = ceil_div(chunks, depth);
      const int64_t blocks = tiles * splits, group = group_of(splits), groups = ceil_div(splits, group);
      const double together =
          double(std::clamp<int64_t>(ceil_div(blocks, multiprocessors), 1, tile.resident));
      const double stage = std::max({c.stage + elements, together * in / c.sm, together * products});
      const double size = splits > 1 ? 4 : double(size_of(g.out));
      const double block = c.block + double(depth) * stage + together * out * size / c.stores;
      double seconds = c.ends + std::max(double(ceil_div(blocks, slots)) * block, memory + c.block);
      if (splits > 1) seconds += c.meet + double(group) * c.term;
      if (groups > 1) seconds += c.meet + double(groups) * c.term;
      if (best.seconds == 0 || seconds < best.seconds)
        best = {.tile = index,
                .swapped = swapped,
                .splits = int(splits),
                .group = int(group),
                .seconds = seconds};
    }
  }
  const int64_t pack = 16 / int64_t(size_of(g.out));
  const bool writes_packs =
      reinterpret_cast<uintptr_t>(g.d) % 16 == 0 && g.ldd % pack == 0 && g.stride_d % pack == 0;
  if (forced < 0 && g.k <= kMostTerms && std::min(g.m, g.n) > kFew && writes_packs) {
    const NarrowChoice terms = choose_terms(g, gpu);
    if (terms.seconds < best.seconds) return terms;
  }
  return best;
}

void gemm_narrow(const Gemm& gemm, Device device) {
  if constexpr (kCuda) {
    const NarrowChoice& choice = gemm_on_gpu(gemm, Gpu(device)).narrow();
    if (!narrow_by_mma(gemm))
      return dispatch_floating_cuda(gemm.in, "gemm",
                                    [&]<class T>() { narrow_cuda<T>(gemm, choice, device); });
    if (gemm.in == DType::bf16)
      narrow_mma_cuda<bf16>(gemm, choice, device);
    else
      narrow_mma_cuda<f16>(gemm, choice, device);
  }
}

}  // namespace tessera::ops
