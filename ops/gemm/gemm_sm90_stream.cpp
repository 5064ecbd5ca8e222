#include <algorithm>

#include "ops/gemm/gemm_models_internal.h"
#include "runtime/has_cuda.h"
#include "runtime/integers.h"

/// When and how skinny GEMMs run in gemm_sm90_stream.cuh, and the fused SwiGLU.

namespace tessera::ops {

bool stream_tokens_are_rows(const Gemm& g) {
  return g.m <= kStreamTokens && g.m <= g.n;
}

std::string gemm_stream_lacks(const Gemm& g) {
  if (g.terms > 1) return "a product, not a sum of several";
  if (std::min(g.m, g.n) > kStreamTokens) return "at most 64 rows or columns of d";
  if (stream_tokens_are_rows(g) ? g.transpose_a : !g.transpose_b) return "tokens whose k is dense";
  return {};
}

GemmChoice choose_stream(const Gemm& g, const Gpu& gpu, bool gated) {
  const StreamCosts& c = gemm_costs(gpu).stream;
  const int multiprocessors = gpu.multiprocessors;
  const bool few_rows = gated || stream_tokens_are_rows(g),
             k_first = few_rows ? !g.transpose_b : g.transpose_a;
  const int64_t rows = few_rows ? g.n : g.m, tokens = few_rows ? g.m : g.n, halves = gated ? 2 : 1;
  const int64_t columns = tokens <= 16 ? 16 : tokens <= 32 ? 32 : 64;
  const int64_t blocks = ceil_div(g.k, 64), most = kStreamRows / halves;
  const double weight =
      double(g.batch * halves * rows * g.k) * double(size_of(g.in)) *
      ((few_rows ? gemm_on_lines(g.b, g.ldb, g.stride_b) : gemm_on_lines(g.a, g.lda, g.stride_a))
           ? 1
           : c.across_lines);
  GemmChoice best;
  // Clusters of 4 leave SMs idle: GPCs have 16 or 18, of which some clusters of 8 lack one too.
  for (const int64_t splits : {1, 2, 8}) {
    const int64_t clusters = multiprocessors / splits - (splits > 2 ? 1 : 0);
    if (splits > blocks || clusters <= 0) continue;
    // Tiles of equal numbers of rows, in as few rounds as their width allows.
    const int64_t per_cluster = ceil_div(g.batch * rows, clusters);
    int64_t tile = std::min(ceil_div(per_cluster, ceil_div(per_cluster, most)), rows);
    if (k_first) tile = round_up(tile, 64);  // a box
    const int64_t tiles = g.batch * ceil_div(rows, tile), rounds = ceil_div(tiles, clusters);
    if (splits > 1 && rounds > 1) continue;
    const double steps = double(rounds * ceil_div(blocks, splits)),
                 from_l2 = double(tiles * blocks * columns) * 128,
                 idle = double(rounds * clusters) / double(tiles);
    const double epilogues =
        double(rounds - 1) * c.tile +
        (few_rows ? 0
                  : c.column_ends + double(rounds * tokens) * double(tile) / double(kStreamRows) * c.column);
    const double seconds = c.ends + epilogues + (splits > 1 ? c.exchange : 0) +
                           std::max((weight / c.memory + from_l2 / c.tokens_from_l2) * idle,
                                    steps * (columns > 32 ? c.wide_step : c.step));
    if (best.seconds == 0 || seconds < best.seconds)
      best = {.tile = kStreamTile, .splits = int(splits), .rows = int(tile), .seconds = seconds};
  }
  return best;
}

namespace {

/// x weight^T with d [T, 2F], which has no memory.
Gemm gate_and_up(const Tensor& x, const Tensor& weight) {
  Gemm g{.m = x.size(0), .n = weight.size(0), .k = x.size(1), .in = x.dtype(), .out = x.dtype()};
  g.transpose_b = true;
  g.a = x.raw(), g.b = weight.raw();
  g.lda = x.size(0) > 1 ? x.layout().stride(0) : row_pitch(g.k, g.in), g.ldb = weight.layout().stride(0);
  g.ldd = row_pitch(g.n, g.out);
  return g;
}

}  // namespace

std::string multiply_swiglu_lacks(const Tensor& x, const Tensor& weight, const Gpu& gpu) {
  if (x.count() == 0 || weight.count() == 0) return "operands that are not empty";
  if (x.size(0) > kStreamTokens) return "at most 64 tokens";
  for (const Tensor* const rows : {&x, &weight})
    if (rows->layout().stride(1) != 1 || (rows->size(0) > 1 && rows->layout().stride(0) < rows->size(1)))
      return "operands whose rows are dense and do not overlap";
  const Gemm g = gate_and_up(x, weight);
  if (std::string lacks = gemm_sm90_lacks(g, gpu); !lacks.empty()) return lacks;
  return gemm_stream_lacks(g);
}

bool multiply_swiglu_pays(const Tensor& x, const Tensor& weight, const Gpu& gpu) {
  const GemmOnGpu& gemm = gemm_on_gpu(gate_and_up(x, weight), gpu);
  return gemm_variant_unforced(gemm) == "wgmma" && gemm.wgmma().tile == kStreamTile;
}

void multiply_swiglu(const Tensor& y, const Tensor& x, const Tensor& weight) {
  if constexpr (kCuda) {
    const Device device = x.device();
    Gemm g = gate_and_up(x, weight);
    g.n /= 2;
    g.d = y.raw(), g.ldd = y.layout().stride(0);
    const GemmChoice choice = choose_stream(g, Gpu(device), true);
    if (g.in == DType::bf16)
      swiglu_stream_sm90<bf16>(g, choice, device);
    else
      swiglu_stream_sm90<f16>(g, choice, device);
  }
}

}  // namespace tessera::ops
