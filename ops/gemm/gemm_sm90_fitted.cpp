#include <algorithm>

#include "ops/gemm/gemm_models_internal.h"
#include "ops/gemm/gemm_sm90_fitted_internal.h"
#include "runtime/integers.h"

/// When and how GEMMs run in gemm_sm90_fitted.cuh.

namespace tessera::ops {
namespace {

int64_t waves(const Gemm& g, const Gpu& gpu, const GemmChoice& choice) {
  const int64_t down = choice.along_n ? 1 : choice.cluster, across = choice.cluster / down;
  return ceil_div(g.batch * ceil_div(g.m, choice.rows * down) * ceil_div(g.n, choice.columns * across),
                  gpu.multiprocessors / choice.cluster);
}

}  // namespace

std::string gemm_fitted_lacks(const Gemm& g) {
  if (g.terms > 1) return "a product, not a sum of several";
  if (g.transpose_a) return "an a whose k is dense";
  if (g.out != g.in) return "a d of the operands' dtype";
  if (!gemm_stores_by_tma(g)) return "a d that TMA can write";
  return {};
}

double fitted_seconds(const Gemm& g, const Gpu& gpu, const GemmChoice& choice) {
  const FittedCosts& c = gemm_costs(gpu).fitted;
  const int64_t rows = choice.rows, columns = choice.columns, cluster = choice.cluster,
                down = choice.along_n ? 1 : cluster, across = cluster / down;
  const auto rounds = double(waves(g, gpu, choice));
  // 64 of k: what goes through shared memory at 128 bytes per clock, both operands written once, b read once
  // and a by each warpgroup; and what comes from L2.
  const double shared = double(2 * columns + rows * (1 + columns / 64)) * (columns == 64    ? c.shared_64
                                                                           : columns == 128 ? c.shared_128
                                                                                            : c.shared_192),
               of_b = g.transpose_b ? c.across_lines : c.across_mn,
               loaded = 128 *
                        (double(columns) / double(down) * (gemm_on_lines(g.b, g.ldb, g.stride_b) ? 1 : of_b) +
                         double(rows) / double(across) *
                             (gemm_on_lines(g.a, g.lda, g.stride_a) ? 1 : c.across_lines));
  const double block = std::max(shared, loaded / c.bytes_per_clock) *
                       (fitted_stages(choice.rows, choice.columns) <= 4 ? c.few_stages : 1);
  const double clocks =
      c.ends + (cluster > 1 ? c.clusters : 0) +
      rounds * (double(ceil_div(g.k, 64)) * block + c.epilogue + c.element * double(rows * columns));
  return std::max(clocks / c.clock, c.least + gemm_bytes(g) / c.bytes_per_second);
}

GemmChoice choose_fitted(const Gemm& g, const Gpu& gpu, int most_columns) {
  // Beyond, other tiles hide their epilogues, and the model has seen little.
  constexpr int64_t kMostWaves = 3;
  GemmChoice best;
  for (const int columns : kFittedColumns) {
    if (columns > most_columns) break;
    for (int64_t rows = 8; rows <= most_fitted_rows(columns); rows = next_fitted_rows(rows))
      for (const int shared : {0, 1, 2}) {  // neither operand, a, b
        GemmChoice choice{.tile = kFittedTile,
                          .rows = int(rows),
                          .columns = columns,
                          .cluster = shared == 0 ? 1 : 2,
                          .along_n = shared == 1};
        if (choice.cluster > gpu.multiprocessors || !has_fitted_tile(choice, g.k) ||
            waves(g, gpu, choice) > kMostWaves)
          continue;
        choice.seconds = fitted_seconds(g, gpu, choice);
        if (best.seconds == 0 || choice.seconds < best.seconds) best = choice;
      }
  }
  return best;
}

}  // namespace tessera::ops
