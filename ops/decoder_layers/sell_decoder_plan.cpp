#include "ops/decoder_layers/sell_decoder_plan.h"

#include <algorithm>
#include <limits>

#include "ops/decoder_layers/decoder_layers_kernels.h"
#include "runtime/integers.h"

namespace tessera::ops::decoder {
namespace {

constexpr int64_t kWarps = kSellWarps;
constexpr int kMostStages = 3;

}  // namespace

SellDecoderPlan plan_sell_decoder(const SparseDecoderLayer& layer, int blocks) {
  SellDecoderPlan plan;
  // The parts of a GEMV are numbered through, from `matrix` on.
  const auto add = [&](int gemv, int matrix, const std::vector<SparseWeight>& parts, int most) {
    int64_t slices = 0, rows = 0;
    for (int i = 0; i < most; ++i) {
      const bool there = size_t(i) < parts.size();
      plan.first_slice[matrix + i] = there ? int(slices) : std::numeric_limits<int>::max();
      plan.first_row[matrix + i] = int(rows);
      if (!there) continue;
      slices += ceil_div(parts[size_t(i)].out, sell_delta4::kSliceRows);
      rows += parts[size_t(i)].out;
    }
    plan.gemv[gemv] = {.parts = int(sell_delta4::parts_of(parts[0].in)),
                       .width = int(sell_delta4::width_of(parts[0].in)),
                       .slices = int(slices)};
  };
  add(0, 0, layer.qkv, 3), add(1, 3, layer.out, 1), add(2, 4, layer.up, 2), add(3, 6, layer.down, 1);
  int first = 0, most = 0;
  for (SellGemv& gemv : plan.gemv) {
    gemv.first = first;
    first = (first + gemv.slices % blocks) % blocks;
    most = std::max(most, ceil_div(gemv.slices, blocks));
    plan.vector_bytes =
        std::max(plan.vector_bytes, (int64_t(gemv.parts) * gemv.width + sell_delta4::kEntries) * 2);
  }
  plan.vector_bytes = round_up(std::max(plan.vector_bytes, kSellAttentionBytes), 128);
  plan.sum_bytes = int64_t(most) * kWarps * sell_delta4::kSliceRows * 4;
  const int64_t left = kSharedBytes - kSellOtherBytes - plan.vector_bytes - plan.sum_bytes;
  plan.stages = int(std::clamp<int64_t>(left / (kWarps * kSellStageBytes), 0, kMostStages));
  return plan;
}

}  // namespace tessera::ops::decoder
