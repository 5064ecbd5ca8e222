#include <algorithm>
#include <limits>

#include "ops/gemm/gemm_models_internal.h"
#include "ops/gemm/gemm_names_internal.h"
#include "runtime/has_cuda.h"
#include "runtime/integers.h"

namespace tessera::ops {

std::string gemm_sm90_lacks(const Gemm& g, const Gpu& gpu) {
  if (gpu.major != 9) return "a GPU of compute capability 9.0";
  if (g.in != DType::bf16 && g.in != DType::f16) return "bf16 or f16 operands";
  if (!gemm_on_vectors(g.a, g.lda, g.stride_a, g.in) || !gemm_on_vectors(g.b, g.ldb, g.stride_b, g.in))
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

namespace {

/// The modelled clocks of one tile shape on one GEMM.
class TileModel {
 public:
  TileModel(const Gemm& g, const WgmmaCosts& costs, const GemmTileShape& tile)
      : costs_(costs), tile_(tile), blocks_(g.terms * ceil_div(g.k, 64)), wide_out_(g.out == DType::f32) {
    // 64 of k: the tensor cores' time, and that of shared memory at 128 bytes per clock, where both operands
    // are written once, a is read once and b for every 64 rows.
    mma_ = std::max(double(tile.rows) * tile.columns / 32,
                    costs.shared * (2.0 * tile.rows + tile.columns * (1 + tile.rows / 64.0)));
    const double a = 128.0 * double(tile.rows) / tile.cluster_n(),
                 b = 128.0 * double(tile.columns) / tile.cluster_m();
    loaded_ = a + b;
    // K-major operands only of GEMMs that take a while: short ones are bound by their ends.
    const double flops = 2 * double(g.batch) * double(g.m) * double(g.n) * double(g.terms * g.k);
    const bool takes_long =
        std::max(flops / costs.flops, gemm_bytes(g) / costs.bytes_per_second) > costs.takes_long;
    const auto across = [&](const void* data, int64_t ld, int64_t stride, bool k_major) {
      if (gemm_on_lines(data, ld, stride)) return 1.0;
      return !k_major ? costs.across_mn : takes_long ? costs.across_lines : 1.0;
    };
    lines_ = a * across(g.a, g.lda, g.stride_a, !g.transpose_a) +
             b * across(g.b, g.ldb, g.stride_b, g.transpose_b);
  }

  /// One round of the grid. `ping_pong`: epilogues run under the next tile's MMAs.
  double round(int64_t splits, bool by_threads, bool ping_pong) const {
    const int64_t depth = ceil_div(blocks_, splits);
    const double elements = double(tile_.rows) * tile_.columns;
    const double stored = elements * (splits > 1 || wide_out_ ? 4 : 2);
    const double block =
        std::max({(ping_pong ? mma_ : mma_ * costs_.alone) + loaded_ * costs_.byte,
                  lines_ / costs_.bytes_per_clock, stored / double(depth) / costs_.stored_per_clock});
    const double writing = by_threads ? costs_.threads * elements / double(splits) : 0;
    const double adding = splits > 1 ? double(std::min(splits, costs_.most_parts)) * costs_.part : 0;
    return double(depth) * block + (tile_.ping_pong ? 0 : costs_.epilogue) + writing + adding;
  }

 private:
  const WgmmaCosts& costs_;
  const GemmTileShape& tile_;
  int64_t blocks_;
  bool wide_out_;
  double mma_ = 0, loaded_ = 0, lines_ = 0;
};

}  // namespace

GemmChoice choose_gemm(const Gemm& g, const Gpu& gpu, int forced, bool may_split) {
  const WgmmaCosts& c = gemm_costs(gpu).wgmma;
  constexpr int64_t kMostTiles = 1024;  // in parts
  const int64_t blocks = g.terms * ceil_div(g.k, 64);
  const bool by_tma = gemm_stores_by_tma(g), wide = g.out != g.in,
             gradient = product_is_gradient(!g.transpose_a, g.transpose_b);
  GemmChoice best;
  double fewest = 0;  // clocks
  int64_t rounds_of_best = 0;
  for (int index = 0; index < int(std::size(kGemmTiles)); ++index) {
    const GemmTileShape& tile = kGemmTiles[index];
    if ((forced >= 0 && index != forced) || !tile.takes(!g.transpose_a, g.transpose_b)) continue;
    const bool stores = by_tma && (wide ? gradient && (g.beta == 0 ? tile.wide : tile.wide_adds)
                                        : (g.beta == 0 ? tile.stores : tile.adds));
    const int64_t tiles = g.batch * ceil_div(g.m, tile.rows * tile.cluster_m()) *
                          ceil_div(g.n, tile.columns * tile.cluster_n());
    const int64_t slots = gpu.multiprocessors / tile.cluster;
    if (slots == 0) continue;  // a stream may have fewer SMs than a cluster
    const TileModel model(g, c, tile);
    // Splits of what does not fill a round, so that it fills a number of shorter ones; at least four blocks
    // of k each.
    const int64_t last = tiles % slots == 0 ? slots : tiles % slots;
    for (int64_t rounds = 0; rounds <= (may_split ? 3 : 0); ++rounds) {
      const int64_t wanted = rounds == 0 ? 1 : std::min({slots * rounds / last, slots, blocks / 4});
      if (wanted < 1 || (rounds > 0 && wanted == 1)) continue;
      const int64_t splits = ceil_div(blocks, ceil_div(blocks, wanted)), grid = slots - slots % splits;
      const int64_t whole = splits == 1 ? tiles : tiles / grid * grid;
      const bool by_threads = splits > 1 || !stores;
      if (by_threads && (!tile.by_threads || (tiles - whole) * tile.cluster > kMostTiles)) continue;
      const int64_t whole_rounds = ceil_div(whole, grid),
                    split_rounds = ceil_div((tiles - whole) * splits, grid);
      const bool ping_pong = !tile.ping_pong || tile.cluster > 1 || whole_rounds + split_rounds > 1;
      const double clocks = c.ends + (tile.cluster > 1 ? c.clusters : 0) +
                            double(whole_rounds) * model.round(1, by_threads, ping_pong) +
                            double(split_rounds) * model.round(splits, by_threads, ping_pong);
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
    best.seconds = std::max(fewest / c.clock + c.round * double(rounds_of_best),
                            c.least + gemm_bytes(g) / c.bytes_per_second);
  if ((forced < 0 || forced == kFittedTile) && gemm_fitted_lacks(g).empty()) {
    const GemmChoice fitted = choose_fitted(g, gpu);
    if (fitted.seconds > 0 &&
        (best.seconds == 0 || fitted.seconds * gemm_costs(gpu).fitted.clearly < best.seconds))
      best = fitted;
  }
  const StreamCosts& skinny = gemm_costs(gpu).stream;
  const double weight = double(g.batch * std::max(g.m, g.n) * g.k) * double(size_of(g.in));
  const bool dense = stream_tokens_are_rows(g) ? g.transpose_b : !g.transpose_a;
  const bool streams = forced < 0
                           ? weight >= skinny.small && (dense || std::min(g.m, g.n) > skinny.few_tokens)
                           : forced == kStreamTile;
  if (streams && gemm_stream_lacks(g).empty()) {
    const GemmChoice stream = choose_stream(g, gpu);
    const int64_t tokens = std::min(g.m, g.n);
    const double launched = stream.seconds + skinny.launch +
                            skinny.token * double(std::max<int64_t>(tokens - skinny.wide_tokens, 0));
    const double tiles = std::max(best.seconds, c.least + gemm_bytes(g) / skinny.tiles_memory);
    if (best.seconds == 0 || launched < skinny.about * tiles) return stream;
  }
  return best;
}

GemmChoice choose_pair(const Gemm& first, const Gpu& gpu, int forced) {
  Gemm both = first;
  both.batch = 2;
  both.stride_a = both.stride_b = both.stride_d = 64;  // other matrices, whose places do not matter
  GemmChoice best;
  for (const int tile : kPairTiles) {
    if (forced >= 0 && tile != forced) continue;
    const GemmChoice choice = choose_gemm(both, gpu, tile);
    if (choice.seconds > 0 && (best.seconds == 0 || choice.seconds < best.seconds)) best = choice;
  }
  return best;
}

namespace {

/// Two GEMMs of weights' gradients, as one launch or as two.
struct Pair {
  const Gemm &first, &second;
};

std::string describe_problem(const Pair& pair) {
  return text_of("two weights' gradients, ", pair.first.m, " x ", pair.first.n, " x ", pair.first.k, " in ",
                 pair.first.in);
}

constexpr Variant<Pair, void()> kPairVariants[] = {
    {"separate", lacks_nothing<Pair>,
     [](const Pair& pair, const Gpu& gpu) -> Estimate {
       double alone = 0;
       for (const Gemm* g : {&pair.first, &pair.second}) {
         if (!gemm_sm90_lacks(*g, gpu).empty()) return Estimate::otherwise();
         alone += gemm_on_gpu(*g, gpu).wgmma().seconds;
       }
       return {alone};
     },
     nullptr, kForcedVariants},
    {"pair",
     [](const Pair& pair, const Gpu& gpu) -> Reason {
       if ((pair.first.sums || pair.second.sums) && pair.first.m + pair.first.n > kMostSummedRows - 512)
         return "fewer rows for their sums";
       for (const Gemm* g : {&pair.first, &pair.second}) {
         if (std::string lacks = gemm_sm90_lacks(*g, gpu); !lacks.empty()) return lacks;
         if (gemm_variant(gemm_on_gpu(*g, gpu)) != "wgmma") return "GEMMs that variant wgmma takes";
       }
       return {};
     },
     [](const Pair& pair, const Gpu& gpu) -> Estimate {
       const double together = choose_pair(pair.first, gpu).seconds;
       return together > 0 ? Estimate{together} : Estimate::slower();
     },
     nullptr, kWgmmaVariants}};

}  // namespace

bool gemm_pair_pays(const Gemm& first, const Gemm& second, const Gpu& gpu) {
  return choose_index("gemm", kPairVariants, Pair{first, second}, gpu) == 1;
}

void gemm_pair(const Gemm& first, const Gemm& second, Device device) {
  if constexpr (kCuda) {
    const GemmChoice choice = choose_pair(first, Gpu(device));
    if (first.in == DType::bf16)
      gemm_pair_sm90<bf16>(first, second, choice, device);
    else
      gemm_pair_sm90<f16>(first, second, choice, device);
  }
}

void gemm_wgmma(const Gemm& gemm, Device device) {
  if constexpr (kCuda) {
    const GemmChoice& choice = gemm_on_gpu(gemm, Gpu(device)).wgmma();
    if (gemm.in == DType::bf16)
      gemm_sm90<bf16>(gemm, choice, device);
    else
      gemm_sm90<f16>(gemm, choice, device);
  }
}

}  // namespace tessera::ops
