#include "ops/gemm/gemm_narrow_terms.cuh"

/// Launches of products of few terms; the essay is in gemm_narrow_terms.cuh.

namespace tessera::ops {
namespace {

template <class T>
NarrowOperand<T> operand(const void* data, int64_t ld, int64_t stride, bool k_major) {
  const T* const start = static_cast<const T*>(data);
  return {start, ld, stride, k_major, gpu::is_pack_aligned(start, ld, 2) && stride % 2 == 0, 0, 0};
}

template <class T, class Out>
void launch_terms(Device device, const NarrowLaunch<T>& launch, const NarrowChoice& choice) {
  const NarrowArgs<T>& args = launch.args;
  const auto run = [&]<int kSteps, bool kStaged>() {
    gpu::launch_dependent(device,
                          {.grid = dim3(launch.blocks),
                           .block = dim3(kNarrowThreads),
                           .shared_bytes = terms_bytes(choice.columns, kSteps, kStaged)},
                          narrow_terms_kernel<T, Out, kSteps, kStaged>, args, choice.rows, choice.columns);
  };
  if (choice.staged)
    args.k <= 16 ? run.template operator()<1, true>() : run.template operator()<2, true>();
  else
    args.k <= 16 ? run.template operator()<1, false>() : run.template operator()<2, false>();
}

}  // namespace

template <class T>
void narrow_terms_cuda(const Gemm& g, const NarrowChoice& choice, Device device) {
  check(g.k <= kMostTerms && choice.rows % 128 == 0 && choice.columns % 32 == 0, "gemm: ", g.k,
        " terms in blocks of ", choice.rows, " x ", choice.columns);
  const NarrowOperand<T> a = operand<T>(g.a, g.lda, g.stride_a, !g.transpose_a),
                         b = operand<T>(g.b, g.ldb, g.stride_b, g.transpose_b);
  NarrowLaunch<T> launch = narrow_launch(g, choice, choice.rows, choice.columns, g.k, a, b, device);
  launch.args.pads = g.owns_d_padding;
  if (launch.args.wide)
    launch_terms<T, float>(device, launch, choice);
  else
    launch_terms<T, T>(device, launch, choice);
}

template void narrow_terms_cuda<bf16>(const Gemm&, const NarrowChoice&, Device);
template void narrow_terms_cuda<f16>(const Gemm&, const NarrowChoice&, Device);

}  // namespace tessera::ops
