#include "ops/sparse_linear/joint_plan.h"

#include <algorithm>
#include <cstdio>
#include <limits>
#include <span>

#include "ops/sparse_linear/sparse_weight.h"
#include "runtime/integers.h"

namespace tessera::ops::sparse {
namespace {

constexpr int kMostCluster = 8, kWarps = 8, kThreads = 256;  // blocks; of a group
constexpr int64_t kMostSums = int64_t{1} << 28;              // of splits or parts, in memory: 1 GiB
constexpr int64_t kMostSteps = 32;                           // a lane of a warp has the place of each
constexpr int64_t kMostPacks = 65535;  // blocks along y of the grid that arranges x for wgmma
/// Inputs of which a group of columns has 128 or more: fewer are not worth the sum over the cluster.
constexpr int64_t kLeastInputs = 128;

/// Of the shapes for so many tokens the one that cuts the inputs into the most splits, and then the one with
/// the most on the way, whose blocks all fit on the GPU at once; if none does, the one with the fewest
/// splits. `units`: the most splits that have something to do.
JointPlan plan_of(std::span<const JointShape> shapes, int64_t tiles, int64_t units, int64_t tokens,
                  bool swiglu, int multiprocessors, const char* most_tokens) {
  const auto first = std::ranges::find_if(
      shapes, [&](const JointShape& shape) { return shape.swiglu == swiglu && shape.tokens >= tokens; });
  JointPlan plan{.tiles = int(tiles)};
  if (first == shapes.end()) {
    plan.lacks = most_tokens;
    return plan;
  }
  for (int splits = 2 * kMostCluster; splits >= 1; splits /= 2)
    for (auto shape = first; shape != shapes.end(); ++shape) {
      if (shape->swiglu != swiglu || shape->tokens != first->tokens) break;
      const int sharing = swiglu ? 1 : shape->groups, blocks = splits / sharing;
      if (blocks < 1 || blocks > kMostCluster || (blocks > 1 && splits > units)) continue;
      plan.shape = int(shape - shapes.begin()), plan.blocks = blocks;
      plan.fits = clusters_that_fit(multiprocessors, shape->per_sm, blocks);
      if (tiles <= plan.fits) return plan;
    }
  return plan;
}

}  // namespace

JointPlan plan_sell(int64_t tiles, int64_t in, int64_t tokens, bool swiglu, int multiprocessors) {
  const int64_t parts = sell_delta4::parts_of(in), width = sell_delta4::width_of(in);
  JointPlan plan = plan_of(kSellShapes, tiles, parts, tokens, swiglu, multiprocessors, "at most 8 tokens");
  if (*plan.lacks) return plan;
  const JointShape& shape = kSellShapes[plan.shape];
  plan.steps = int(ceil_div(parts, int64_t(plan.blocks) * (swiglu ? 1 : shape.groups)));
  plan.per_unit = 640;  // 32 lanes with 16 bytes of values and 4 of distances
  const int64_t x_bytes = shape.tokens == 1 ? 4 : 2 * shape.tokens;
  plan.shared = shape.groups * (plan.steps * (width + 8) * x_bytes + shape.tokens * kTileRows * 4);
  const int64_t warps = tiles * (swiglu ? 2 : 1) * parts * sell_delta4::kSlices;
  plan.early = int(kEarlyBytes / plan.per_unit / std::max<int64_t>(1, warps));
  if (plan.shared > kMostShared) plan.lacks = "x and sums that fit into the shared memory of a block";
  if (plan.steps > kMostSteps) plan.lacks = "at most 32 parts of the inputs per block";
  return plan;
}

JointPlan plan_columns(int64_t tiles, int64_t in, int64_t tokens, bool swiglu, int multiprocessors) {
  JointPlan plan = plan_of(kColumnShapes, tiles, in / kLeastInputs, tokens, swiglu, multiprocessors,
                           swiglu ? "at most 4 tokens" : "at most 8 tokens");
  if (*plan.lacks) return plan;
  const JointShape& shape = kColumnShapes[plan.shape];
  plan.steps = int(ceil_div(ceil_div(in, int64_t(plan.blocks) * (swiglu ? 1 : shape.groups)), 32) * 32);
  plan.per_unit = 512;
  const int64_t groups = tiles * plan.blocks * shape.groups;
  plan.early = int(std::min<int64_t>(plan.steps, kEarlyBytes / plan.per_unit / std::max<int64_t>(1, groups)));
  return plan;
}

SellWgmmaPlan plan_sell_wgmma(int64_t windows, int64_t in, int64_t tokens, int multiprocessors) {
  constexpr int64_t kMostUnits = int64_t{1} << 22;  // times blocks fits into 32 bits
  SellWgmmaPlan plan{.windows = int(windows), .parts = int(sell_delta4::parts_of(in))};
  plan.tokens = tokens <= 8 ? 8 : tokens <= 16 ? 16 : tokens <= 32 ? 32 : 64;
  plan.token_tiles = int(ceil_div(tokens, plan.tokens));
  const int64_t width = sell_delta4::width_of(in);
  plan.passes = int(std::max<int64_t>(1, ceil_div(width, kWgmmaColumns)));
  plan.columns = int(round_up(ceil_div(width, plan.passes), 8));
  plan.apart = 8;
  while (plan.apart * 8 < plan.columns) plan.apart *= 2;
  const int64_t units = windows * (kTileRows / kWgmmaRows) * plan.parts;
  plan.blocks = int(
      std::clamp<int64_t>(multiprocessors / std::max(1, plan.token_tiles), 1, std::max<int64_t>(1, units)));
  const int64_t parts = plan.parts, each = std::max<int64_t>(1, units / plan.blocks);
  plan.splits = int(parts < 2 ? 1 : std::min(parts, (parts - 2) / each + 2));
  if (tokens > kSellWgmmaTokens) plan.lacks = "at most 128 tokens";
  if (in == 0) plan.lacks = "inputs";
  if (units > kMostUnits) plan.lacks = "at most 2^22 units of work";
  if (windows * kTileRows * plan.token_tiles * plan.tokens * plan.splits > kMostSums)
    plan.lacks = "at most 2^28 sums";
  if (int64_t(plan.token_tiles) * plan.parts * plan.passes > kMostPacks)
    plan.lacks = "at most 65,535 blocks that arrange the inputs";
  return plan;
}

std::string describe(const SellWgmmaPlan& plan) {
  const int units = plan.units(), least = units / plan.blocks, most = int(ceil_div(units, plan.blocks));
  return text_of(plan.windows, " windows of 256 outputs in ", plan.parts,
                 plan.parts == 1 ? " part, " : " parts, ", plan.token_tiles, " x ", plan.tokens, " tokens, ",
                 plan.blocks, plan.token_tiles == 1 ? " blocks, " : " blocks each, ", least,
                 least == most ? "" : text_of(" to ", most), " units of 128 rows");
}

MmaPlan plan_mma(int64_t windows, int64_t in, int64_t tokens, int multiprocessors) {
  MmaPlan plan{.windows = int(windows), .parts = int(mma_delta4::parts_of(in))};
  plan.tokens = tokens <= 8 ? 8 : tokens <= 16 ? 16 : 32;
  plan.token_tiles = int(ceil_div(tokens, plan.tokens));
  const int64_t units = windows * mma_delta4::kStrips * plan.parts * plan.token_tiles;
  plan.blocks = int(std::clamp<int64_t>(units, 1, multiprocessors));
  if (tokens > kMmaTokens) plan.lacks = "at most 64 tokens";
  if (in == 0) plan.lacks = "inputs";
  if (units * mma_delta4::kStripRows * plan.tokens > kMostSums) plan.lacks = "at most 2^28 sums of its parts";
  return plan;
}

std::string describe(const MmaPlan& plan) {
  const int64_t units = int64_t(plan.strips()) * plan.parts * plan.token_tiles;
  return text_of(plan.windows, " windows of 256 outputs in ", plan.parts,
                 plan.parts == 1 ? " part, " : " parts, ", plan.token_tiles, " x ", plan.tokens, " tokens, ",
                 plan.blocks, " blocks of ", kMmaWarps, " warps, up to ",
                 ceil_div(ceil_div(units, plan.blocks), kMmaWarps), " units per warp");
}

std::string describe(const JointPlan& plan, const JointShape& shape, int multiprocessors) {
  const int64_t blocks = int64_t(plan.tiles) * plan.blocks,
                resident = std::min<int64_t>(blocks, int64_t(multiprocessors) * shape.per_sm);
  const double on_the_way =
      double(resident * shape.groups * kWarps * shape.ahead) * double(plan.per_unit) / multiprocessors / 1024;
  char text[256];
  std::snprintf(
      text, sizeof text,
      "%d tiles of 256 outputs%s, %lld blocks of %d threads in clusters of %d, %s (%d clusters fit), "
      "%.0f KB per SM on the way",
      plan.tiles, shape.swiglu ? " of gate and up" : "", static_cast<long long>(blocks),
      shape.groups * kThreads, plan.blocks,
      plan.waves() <= 1 ? "one wave" : (std::to_string(plan.waves()) + " waves").c_str(), plan.fits,
      on_the_way);
  return text;
}

}  // namespace tessera::ops::sparse
