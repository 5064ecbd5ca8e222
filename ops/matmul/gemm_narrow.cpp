#include "ops/matmul/gemm_narrow.h"

#include <algorithm>
#include <limits>

#include "ops/matmul/gemm_sm90_plan.h"

namespace tessera::ops {
namespace {

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

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

NarrowChoice choose_narrow(const Gemm& g, int multiprocessors, int forced) {
  // Measured (docs/ops/gemm.md): clocks of a launch and its end, a block, a trip to memory, meeting, and
  // eight parts that are added up; what a block's SM gets of memory. The clock is slower than the card's by
  // what they miss.
  constexpr double kClock = 0.97e9, kEnds = 3450, kBlock = 1800, kTrip = 900, kBytesPerClock = 14,
                   kMeet = 1800, kTerms = 500;
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
      const double step = std::max({kTrip, together * issue, together * chunk_bytes / kBytesPerClock});
      const double rounds = double(ceil_div(blocks, slots));
      double clocks = kEnds + rounds * (kBlock + double(depth) * step + together * d_bytes / kBytesPerClock);
      if (splits > 1) clocks += kMeet + double(ceil_div(group, 8)) * kTerms;
      if (groups > 1) clocks += kMeet + double(ceil_div(groups, 8)) * kTerms;
      if (best.seconds == 0 || clocks / kClock < best.seconds)
        best = {.tile = index,
                .swapped = swapped,
                .splits = int(splits),
                .group = int(group),
                .seconds = clocks / kClock};
      if (most) break;
    }
  }
  return best;
}

bool gemm_narrow_pays(const Gemm& g, Device device) {
  // What the other rows take at least, seconds: cuBLASLt alone for f32; for 16 bits with copies and zeros
  // where rows are odd; the row "wgmma" where it can. A bias that they do not take along costs a launch, and
  // so does a long k beside few sums, which cuBLASLt often leaves to a block or two.
  constexpr int64_t kFew = 64, kShort = 256, kLong = 4096;
  constexpr double kAligned = 7.5e-6, kOdd = 10e-6, kSingle = 8.2e-6, kBias = 2e-6, kTerm = 2e-9,
                   kBytesPerSecond = 2e12;
  if (std::min({g.m, g.n, g.k}) > kFew || !gemm_narrow_lacks(g).empty()) return false;
  const bool aligned = gemm_sm90_lacks(g, device).empty();
  const double batch = double(g.batch), of_a = double(g.m * g.k), of_b = double(g.k * g.n),
               of_d = double(g.m * g.n);
  const double bytes =
      ((g.stride_a == 0 ? 1 : batch) * of_a + (g.stride_b == 0 ? 1 : batch) * of_b) * double(size_of(g.in)) +
      batch * of_d * double(size_of(g.out));
  double others = g.in == DType::f32 ? kSingle : aligned ? kAligned : kOdd;
  if (g.bias && !aligned) others += kBias;
  if (std::max(g.m, g.n) <= kShort) others += kTerm * double(std::min(g.k, kLong));
  return choose_narrow(g, device.card().multiprocessors).seconds < others + bytes / kBytesPerSecond;
}

void gemm_narrow(const Gemm& gemm, Device device) {
  if constexpr (kCuda) {
    const NarrowChoice choice = choose_narrow(gemm, device.card().multiprocessors);
    dispatch_floating_cuda(gemm.in, "gemm", [&]<class T>() { narrow_cuda<T>(gemm, choice, device); });
  }
}

}  // namespace tessera::ops
