#include "ops/gmm_nll/gmm_nll_kernel.cuh"
#include "ops/gmm_nll/gmm_nll_kernels.h"

/// Every parameter is read once, forward or backward, and every gradient written once; in between lie three
/// exponentials a component, against 6 to 24 bytes: bound by memory, in bf16 with the arithmetic at about
/// half of what the GPU issues in that time. Kernels and their memory accesses: gmm_nll_kernel.cuh.
///
/// Training pays for one pass: while a tape records a sum or a mean, forward makes the gradients together
/// with the loss, 2 x 3 K elements per token, for the gradient of the loss that it expects: 1, or the tape's
/// loss scale. Backward compares that with the gradient that arrived, on the device, and has nothing to do if
/// they are equal; otherwise it computes the gradients again. Scaling those that are there would move as many
/// bytes and round twice.
///
/// The losses are added in double: each thread its own tokens', then the block's, then the last block to end
/// adds the blocks' in their order. The grid, and with it the order, depends on problem and GPU alone.

namespace tessera::ops {
namespace {

constexpr int kMostInRegisters = 20;

/// Blocks per SM, for which registers are bounded (65,536 / (128 * 7) = 73), and a warp's tiles in
/// shared memory (docs/ops/gmm_nll.md has what was tried).
template <int kMost>
constexpr int kResident = kMost <= 4    ? 8
                          : kMost <= 10 ? 7
                                        : 4;
template <class T>
constexpr int kGmmStages = sizeof(T) == 2 ? 3 : 2;

template <class T, GmmPass kPass, int kMost>
void launch_tiles(Device device, GmmArgs<T> args) {
  const auto kernel = gmm_tiles<T, kMost, kPass, kGmmStages<T>, kResident<kMost>>;
  const size_t bytes = size_t(kGmmStages<T>) * kGmmThreads * 3 * size_t(args.components) * sizeof(T);
  const unsigned blocks =
      gpu::resident_blocks(device, kernel, kGmmThreads, bytes, gpu::ceil_div(args.count, kGmmThreads));
  gpu::launch_dependent(device, {blocks, kGmmThreads, bytes}, kernel, args);
}

template <class T, GmmPass kPass>
void launch_pass(Device device, GmmArgs<T> args) {
  // A reduced loss of nothing is still a number.
  if (args.count == 0 && (kPass == GmmPass::gradients || args.each)) return;
  if (args.components <= 4) return launch_tiles<T, kPass, 4>(device, args);
  if (args.components <= 10) return launch_tiles<T, kPass, 10>(device, args);
  if (args.components <= kMostInRegisters) return launch_tiles<T, kPass, kMostInRegisters>(device, args);
  const auto kernel = gmm_wide<T, kPass>;
  const unsigned blocks =
      gpu::resident_blocks(device, kernel, kGmmThreads, 0, gpu::ceil_div(args.count, kGmmWarps));
  gpu::launch_dependent(device, {blocks, kGmmThreads}, kernel, args);
}

template <class T>
Targets<T> targets(const Tensor& y) {
  return y.defined() ? Targets<T>{y.raw(), y.dtype() == DType::f32} : Targets<T>{nullptr, false};
}

template <class T>
GmmArgs<T> arguments(const Tensor& dparams, const Tensor& dy, const Tensor& params, const Tensor& y,
                     Reduction reduction) {
  GmmArgs<T> args{};
  args.params = params.data<T>();
  args.dparams = dparams.defined() ? dparams.data<T>() : nullptr;
  args.y = targets<T>(y);
  args.dy = targets<T>(dy);
  args.count = y.count();
  args.components = int(params.size(-2));
  args.whole = gpu::is_pack_aligned(args.params, 0, gpu::kPackOf<T>) &&
               gpu::is_pack_aligned(args.dparams, 0, gpu::kPackOf<T>);
  args.each = reduction == Reduction::none;
  args.share = reduction == Reduction::mean ? 1.0f / float(args.count) : 1.0f;
  args.divisor = reduction == Reduction::mean ? double(args.count) : 1.0;
  return args;
}

}  // namespace

void gmm_nll_forward_cuda(const Tensor& loss, const Tensor& dparams, const Tensor& dy, const Tensor& dloss,
                          const Tensor& params, const Tensor& y, Reduction reduction) {
  dispatch_floating_cuda(params.dtype(), "gmm_nll", [&]<class T>() {
    const Device device = y.device();
    GmmArgs<T> args = arguments<T>(dparams, dy, params, y, reduction);
    args.losses = loss.data<float>();
    args.expected = dloss.defined() ? dloss.data<float>() : nullptr;
    // The partial sums are doubles in memory counted in bytes: f64 is no dtype of a GPU's tensors. No grid
    // has more blocks than 2,048 threads per SM make.
    const int64_t most = int64_t(device.multiprocessors()) * 2048 / kGmmThreads;
    const Tensor scratch =
        args.each ? Tensor() : Tensor::empty_packed({most * int64_t(sizeof(double))}, DType::u8, device);
    if (!args.each) {
      args.partial = static_cast<double*>(scratch.raw());
      args.arrived = device.counters(1);
    }
    if (dparams.defined() || dy.defined()) return launch_pass<T, GmmPass::both>(device, args);
    launch_pass<T, GmmPass::loss>(device, args);
  });
}

void gmm_nll_backward_cuda(const Tensor& dparams, const Tensor& dy, const Tensor& dloss, const Tensor& params,
                           const Tensor& y, Reduction reduction, bool made, const Tensor& made_for) {
  dispatch_floating_cuda(params.dtype(), "gmm_nll", [&]<class T>() {
    GmmArgs<T> args = arguments<T>(dparams, dy, params, y, reduction);
    args.dloss = dloss.data<float>();
    args.made = made;
    args.expected = made_for.defined() ? made_for.data<float>() : nullptr;
    launch_pass<T, GmmPass::gradients>(y.device(), args);
  });
}

}  // namespace tessera::ops
