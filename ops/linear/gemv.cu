#include "ops/linear/gemv.cuh"

namespace tessera::ops {
namespace {

using gemv::Args;

/// Bytes at the start of every row that are prefetched into L2: enough for the microseconds in which small
/// kernels leave the memory idle, and a few megabytes of an L2 of 50.
constexpr int64_t kAheadBytes = 1024;

template <class T>
Args<T> args_of(const Tensor& y, const Tensor& x, const Tensor& weight, const Tensor& bias) {
  const int64_t bytes = weight.size(1) * int64_t(sizeof(T)) / 16 * 16;
  return {.y = y.data<T>(),
          .x = x.data<T>(),
          .weight = weight.data<T>(),
          .bias = bias.defined() ? bias.data<T>() : nullptr,
          .y_stride = y.layout().stride(0),
          .x_stride = x.layout().stride(0),
          .weight_stride = weight.layout().stride(0),
          .second = 0,
          .tokens = int(x.size(0)),
          .in = int(weight.size(1)),
          .out = int(weight.size(0)),
          .ahead = uint32_t(std::min(bytes, kAheadBytes))};
}

template <class T, int kAhead, int kBlocks, bool kGated, bool kWhole>
void launch_mma(Device device, const Args<T>& args) {
  gpu::launch(device,
              {.grid = dim3(unsigned(gpu::ceil_div(args.out, 8))), .block = gemv::kThreads, .overlaps = true},
              gemv::gemv_mma<T, kAhead, kBlocks, kGated, kWhole>, args);
}

template <int kTokens, int kRows, int kAhead>
void launch_fma(Device device, const Args<float>& args) {
  const gpu::LaunchShape shape{
      .grid = dim3(unsigned(gpu::ceil_div(args.out, kRows))), .block = gemv::kThreads, .overlaps = true};
  if (args.in % 4 == 0)
    gpu::launch(device, shape, gemv::gemv_fma<kTokens, kRows, kAhead, true>, args);
  else
    gpu::launch(device, shape, gemv::gemv_fma<kTokens, kRows, kAhead, false>, args);
}

}  // namespace

void gemv_cuda(const Tensor& y, const Tensor& x, const Tensor& weight, const Tensor& bias) {
  const Device device = x.device();
  dispatch_floating_cuda(x.dtype(), "linear", [&]<class T>() {
    const Args<T> args = args_of<T>(y, x, weight, bias);
    if constexpr (sizeof(T) == 4) {
      if (args.tokens == 1)
        launch_fma<1, 4, 4>(device, args);
      else if (args.tokens <= 4)
        launch_fma<4, 4, 2>(device, args);
      else
        launch_fma<8, 8, 1>(device, args);
    } else if (args.in % gpu::kPackOf<T> != 0) {
      launch_mma<T, 2, 2, false, false>(device, args);
    } else {
      launch_mma<T, 4, 4, false, true>(device, args);
    }
  });
}

void gemv_swiglu_cuda(const Tensor& y, const Tensor& x, const Tensor& weight) {
  const Device device = x.device();
  dispatch_floating_cuda(x.dtype(), "linear_swiglu", [&]<class T>() {
    if constexpr (sizeof(T) == 2) {
      Args<T> args = args_of<T>(y, x, weight, {});
      args.out = int(y.size(1)), args.second = y.size(1);
      if (args.in % gpu::kPackOf<T> != 0)
        launch_mma<T, 2, 2, true, false>(device, args);
      else
        launch_mma<T, 4, 2, true, true>(device, args);
    }
  });
}

}  // namespace tessera::ops
