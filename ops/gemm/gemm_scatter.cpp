#include "ops/gemm/gemm_scatter_internal.h"

#include "ops/gemm/gemm_models_internal.h"
#include "runtime/has_cuda.h"

namespace tessera::ops {

std::string gemm_scatter_lacks(const Gemm& g, const Gpu& gpu) {
  if (std::string lacks = gemm_sm90_lacks(g, gpu); !lacks.empty()) return lacks;
  if (g.transpose_a || g.transpose_b) return "operands whose columns are dense";
  if (g.batch != 1 || g.terms != 1) return "one matrix";
  if (g.out != g.in) return "a result of the operands' dtype";
  if (!gemm_on_vectors(g.d, g.ldd, 0, g.out)) return "a result whose rows start on 16-byte boundaries";
  if (choose_fitted(g, gpu, kMostScatteredColumns).seconds == 0) return "at most three waves of tiles";
  return {};
}

GemmChoice choose_scatter(const Gemm& g, const GemmScatter& scatter, const Gpu& gpu) {
  GemmChoice choice = choose_fitted(g, gpu, kMostScatteredColumns);
  if (g.beta != 0) return choice;
  const ScatterCosts& c = gemm_costs(gpu).scatter;
  choice.seconds += double((scatter.rows - g.m) * g.n) * double(size_of(g.out)) / c.bytes_per_second;
  if (scatter.indices) choice.seconds += c.group * double(scatter.rows) / 32 / double(gpu.multiprocessors);
  return choice;
}

void gemm_scatter(const Gemm& gemm, const GemmScatter& scatter, Device device) {
  if constexpr (kCuda) {
    const GemmChoice choice = choose_scatter(gemm, scatter, Gpu(device));
    if (gemm.in == DType::bf16)
      gemm_scatter_sm90<bf16>(gemm, scatter, choice, device);
    else
      gemm_scatter_sm90<f16>(gemm, scatter, choice, device);
  }
}

}  // namespace tessera::ops
