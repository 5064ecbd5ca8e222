#include "sparsity/pattern_bytes.h"

#include <bit>
#include <limits>
#include <numeric>

#include "runtime/integers.h"

namespace tessera::sparsity {
namespace {

constexpr int64_t kValueBytes = 2, kTileRows = 256, kLongestGap = 15;

struct Counts {
  int64_t kept = 0, fillers = 0;
  bool fits_2_4 = true;
};
Counts counts_of(const Mask& mask) {
  Counts counts;
  for (int64_t r = 0; r < mask.rows(); ++r) {
    const auto* const words = mask.words.data<int32_t>() + r * mask.words.row_stride();
    int64_t next = 0;  // the position after the last kept one
    for (int64_t w = 0; w < mask.words.size(1); ++w) {
      const auto word = uint32_t(words[w]);
      for (uint32_t rest = word; rest != 0; rest &= rest - 1) {
        const int64_t at = 32 * w + std::countr_zero(rest);
        counts.fillers += (at - next) / (kLongestGap + 1);
        next = at + 1;
        ++counts.kept;
      }
      for (int group = 0; group < 8; ++group)
        counts.fits_2_4 = counts.fits_2_4 && std::popcount(word >> 4 * group & 15u) <= 2;
    }
  }
  counts.fits_2_4 = counts.fits_2_4 && mask.columns % 4 == 0;
  return counts;
}

}  // namespace

std::vector<FormatBytes> format_bytes(const Mask& mask) {
  const Counts counts = counts_of(mask);
  const int64_t rows = mask.rows(), columns = mask.columns, all = rows * columns, dense = all * kValueBytes;
  std::vector<FormatBytes> formats;
  const auto add = [&](const char* format, int64_t bytes) {
    formats.push_back({format, bytes, double(bytes) / double(dense),
                       bytes == 0 ? std::numeric_limits<double>::infinity() : double(dense) / double(bytes)});
  };
  const int64_t values = counts.kept * kValueBytes, tiles = ceil_div(rows, kTileRows) * columns;
  add("dense", dense);
  add("csr", values + counts.kept * (columns <= 65536 ? 2 : 4) + 4 * (rows + 1));
  add("bitmap", values + rows * ceil_div(columns, 8));
  add("column_tiles", values + tiles * (kTileRows / 8 + 4));
  add("gaps", (counts.kept + counts.fillers) * kValueBytes + ceil_div(counts.kept + counts.fillers, 2));
  if (counts.fits_2_4) add("2:4", all / 2 * kValueBytes + ceil_div(all / 2 * 2, 8));
  return formats;
}

std::vector<SkippedBlocks> skipped_blocks(const Features& features, const Tensor& overlaps, int64_t group) {
  std::vector<int64_t> given(static_cast<size_t>(features.count()));
  std::iota(given.begin(), given.end(), int64_t{0});
  std::vector<SkippedBlocks> found;
  const auto add = [&](const char* order, std::span<const int64_t> indices, int64_t size) {
    const std::vector<double> shares = coherence_of(features, indices, size);
    if (shares.empty()) return;
    const double share = summarise(shares).mean;
    found.push_back(
        {order, size, share, share < 1 ? 1 / (1 - share) : std::numeric_limits<double>::infinity()});
  };
  add("given", given, 1);
  add("given", given, group);
  add("exhaustive", exhaustive_order(overlaps.data<int32_t>(), features.count(), group), group);
  return found;
}

}  // namespace tessera::sparsity
