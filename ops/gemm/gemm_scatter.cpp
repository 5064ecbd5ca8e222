#include "ops/gemm/gemm_scatter_plan.h"

#include "ops/gemm/gemm_models_internal.h"
#include "runtime/has_cuda.h"

namespace tessera::ops {

std::string gemm_scatter_lacks(const Gemm& g, const Gpu& gpu) {
  if (std::string lacks = gemm_sm90_lacks(g, gpu); !lacks.empty()) return lacks;
  if (g.transpose_a || g.transpose_b) return "operands whose columns are dense";
  if (g.batch != 1 || g.terms != 1) return "one matrix";
  if (!gemm_on_vectors(g.d, g.ldd, 0, g.out)) return "a result whose rows start on 16-byte boundaries";
  return {};
}

GemmChoice choose_scatter(const Gemm& g, const Gpu& gpu, int forced) {
  Gemm by_threads = g;
  by_threads.d = reinterpret_cast<void*>(uintptr_t{2});  // as if TMA could not write it: the threads do
  GemmChoice best;
  for (const int tile : kScatterTiles) {
    if (forced >= 0 && tile != forced) continue;
    const GemmChoice choice = choose_gemm(by_threads, gpu, tile);
    if (choice.seconds > 0 && (best.seconds == 0 || choice.seconds < best.seconds)) best = choice;
  }
  return best;
}

void gemm_scatter(const Gemm& gemm, const GemmScatter& scatter, Device device) {
  if constexpr (kCuda) {
    const GemmChoice choice = choose_scatter(gemm, Gpu(device));
    if (gemm.in == DType::bf16)
      gemm_scatter_sm90<bf16>(gemm, scatter, choice, device);
    else
      gemm_scatter_sm90<f16>(gemm, scatter, choice, device);
  }
}

}  // namespace tessera::ops
