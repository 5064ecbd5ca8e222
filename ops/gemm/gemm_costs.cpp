#include "ops/gemm/gemm_costs.h"

#include <limits>

namespace tessera::ops {
namespace {

/// Fitted on an H100 SXM (wgmma, narrow, cublas, padding) and on an H200 (fitted, stream, TF32); the two
/// share their SMs and clocks. Fitted tiles have not run on an H100, so there they must be faster by more.
constexpr GemmCosts kH100{
    .wgmma = {.clock = 1.6e9,
              .ends = 4800,
              .clusters = 2100,
              .bytes_per_clock = 47,
              .byte = 0.003,
              .stored_per_clock = 32,
              .epilogue = 4600,
              .threads = 0.35,
              .part = 1100,
              .most_parts = 16,
              .shared = 1,
              .alone = 1.3,
              .across_lines = 2,
              .across_mn = 2,
              .least = 5.2e-6,
              .round = 1.3e-6,
              .bytes_per_second = 3.1e12,
              .flops = 400e12,
              .takes_long = 12e-6,
              .few = 8,
              .clearly = 0.85,
              .clearly_from = 60e-6},
    .fitted = {.clock = 1.34e9,
               .ends = 7020,
               .clusters = 1500,
               .shared_64 = 0.98,
               .shared_128 = 0.74,
               .shared_192 = 0.73,
               .bytes_per_clock = 74,
               .across_lines = 1.55,
               .across_mn = 1.83,
               .few_stages = 1.13,
               .epilogue = 1340,
               .element = 0.076,
               .least = 6.7e-6,
               .bytes_per_second = 3.4e12,
               .clearly = 1.2},
    .scatter = {.bytes_per_second = 6e12, .group = 1.9e-6},
    .stream = {.ends = 3e-6,
               .tile = 0.8e-6,
               .column = 0.15e-6,
               .column_ends = 2.5e-6,
               .exchange = 0.5e-6,
               .step = 0.2e-6,
               .wide_step = 0.25e-6,
               .memory = 4.35e12,
               .tokens_from_l2 = 12.5e12,
               .across_lines = 1.6,
               .small = 2 << 20,
               .few_tokens = 8,
               .launch = 5.5e-6,
               .wide_tokens = 32,
               .token = 0.1e-6,
               .tiles_memory = 3.3e12,
               .about = 1.12},
    .narrow = {.clock = 0.97e9,
               .ends = 3450,
               .block = 1800,
               .trip = 900,
               .bytes_per_clock = 14,
               .meet = 1800,
               .terms = 500},
    .narrow_mma = {.ends = 3.2e-6,
                   .block = 1.25e-6,
                   .stage = 0.745e-6,
                   .elements = 0.6e-6,
                   .meet = 2e-6,
                   .term = 0.07e-6,
                   .multiply = 1.11e-12,
                   .memory = 2.9e12,
                   .sm = 41e9,
                   .stores = 9.2e9},
    .narrow_terms = {.ends = 5.9e-6, .memory = 2.95e12, .more = 2.4e12, .shared = 2.2e12, .few_k = 16},
    .cublas = {.ends = 5.3e-6,
               .odd = 2.5e-6,
               .few_and_odd = 1.7,
               .few_gradient = 1.7,
               .few_terms = 1.5,
               .flops = 520e12,
               .bytes_per_second = 2.9e12,
               .term = 2e-9,
               .bias = 2e-6,
               .single = 8.2e-6,
               .single_bytes = 2e12},
    .aligned = {},
    .few_tokens = {.gemv_bytes = std::numeric_limits<double>::infinity(), .longest = 0, .cublas_factor = 1},
    .margins = {.about = 1.05, .clearly = 0.9, .from = 15e-6},
    // T = 36096, 512 -> 1365 takes 0.57 ms as it is, 512 -> 1368 takes 0.096 ms.
    .padding = {.bytes_per_second = 2.5e12,
                .launch = 3e-6,
                .slow_flops = 80e12,
                .slow_bytes = 2.5e12,
                .fast_flops = 450e12},
    // 336 and 213 TFLOP/s (T = 36096, 1368 -> 512), 324 and 278 (512 -> 1368), 390 and 335 (T = 65536,
    // 3072 -> 768).
    .tf32 = {.along = 335e12, .across = 280e12, .copy_bytes = 2e12, .launch = 4e-6},
    .column_sums = {.two_launches = 9e-6, .bytes_per_second = 2.4e12}};

/// Tiles fitted to 693 GEMMs in all of them, most of drawn extents (docs/ops/gemm_costs.md); the rest, of
/// narrow GEMMs, to 221 in all variants (gemm_narrow.md).
constexpr GemmCosts on_h200() {
  GemmCosts costs = kH100;
  WgmmaCosts& tiles = costs.wgmma;
  tiles.clock = 1.57e9;
  tiles.ends = 10200, tiles.clusters = 2970, tiles.epilogue = 1970;
  tiles.bytes_per_clock = 54, tiles.byte = 0.0014, tiles.stored_per_clock = 45;
  tiles.threads = 0.92, tiles.part = 1650;
  tiles.shared = 0.91, tiles.alone = 0.98, tiles.across_lines = 2.1, tiles.across_mn = 1.97;
  tiles.least = 4.3e-6, tiles.round = 0.47e-6;
  tiles.bytes_per_second = 4.5e12, tiles.takes_long = 5.7e-6;
  costs.fitted.clearly = 1.09;
  costs.cublas.few_gradient = 0.86;
  costs.aligned = {.factor = 0.9, .gradients = 200e-6, .others = 20e-6, .few = 128, .long_k = 2};
  costs.few_tokens = {.gemv_bytes = 90e6, .longest = 4, .cublas_factor = 0.96};
  costs.padding.slow_bytes = 1e12;
  costs.narrow_mma.stage = 0.6e-6;
  costs.margins.clearly = 1;
  return costs;
}
constexpr GemmCosts kH200 = on_h200();

}  // namespace

const GemmCosts& gemm_costs(GpuModel model) {
  return model == GpuModel::h100 ? kH100 : kH200;
}

}  // namespace tessera::ops
