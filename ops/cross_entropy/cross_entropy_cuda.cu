#include "gpu/grid.cuh"
#include "ops/cross_entropy/cross_entropy_kernel.cuh"
#include "ops/cross_entropy/cross_entropy_kernels.h"

/// Forward reads each logit once: the row's maximum and the sum of the exponentials are kept up to date while
/// reading. Backward reads each once more and writes its gradient. In place, logits are read once and
/// gradients written once: rows wait in shared memory. One exponential an element and pass against 2 to 4
/// bytes: bound by memory. Kernels: cross_entropy_kernel.cuh.
///
/// A row belongs to so many threads that each has about four packs of 16 bytes: 4 or 8 lanes, a warp, a
/// block. Rows too few to give every SM some warps have a block each, rows of more than 2048
/// packs that are fewer than the SMs one of 1024 threads. Losses are added in double, each block
/// its rows in order, then the last block to end the blocks' sums; the targets that count are counted as
/// well. In place the mean must know their number first: a kernel of its own.

namespace tessera::ops {
namespace {

using gpu::ceil_div;
using gpu::kPackOf;
using gpu::kWarp;

constexpr int kBlock = 256, kMostThreads = 1024;

template <class T>
CrossEntropyRows<T> make_rows(const Tensor& logits, const Tensor& targets,
                              const CrossEntropyOptions& options) {
  return {logits.data<T>(),
          Indices(targets),
          logits.row_stride(),
          targets.count(),
          logits.row_length(),
          options.ignore_index,
          gpu::is_pack_aligned(logits.data<T>(), logits.row_stride(), kPackOf<T>),
          float(options.label_smoothing)};
}

/// Calls f<threads of a row, threads of a block, packs a thread reads at once> for `rows` rows of that many
/// packs.
template <class F>
void for_row_length(Device device, int64_t rows, int64_t packs, F&& f) {
  const int64_t multiprocessors = device.multiprocessors();
  if (packs <= 4) return f.template operator()<4, kBlock, 1>();
  if (packs <= 32) return f.template operator()<8, kBlock, 2>();
  const bool few = rows < 2 * multiprocessors;  // a warp each would leave the memory idle
  if (packs <= (few ? 128 : 1024)) return f.template operator()<kWarp, kBlock, 4>();
  if (packs <= 2048 || rows >= multiprocessors) return f.template operator()<kBlock, kBlock, 2>();
  f.template operator()<kMostThreads, kMostThreads, 4>();
}

/// Scratch of `count` doubles, counted in bytes: f64 is no dtype of a GPU's tensors.
Tensor doubles(int64_t count, Device device) {
  return Tensor::empty_packed({count * int64_t(sizeof(double))}, DType::u8, device);
}
double* as_doubles(const Tensor& scratch) {
  return static_cast<double*>(scratch.raw());
}

template <class T, int kThreads, bool kSmooth>
void launch_in_place(const CrossEntropyForward& args, const CrossEntropyRows<T>& rows, LossSink sink,
                     const float* dloss) {
  const Device device = args.logits.device();
  const double smoothing = args.options.label_smoothing, off = smoothing / double(rows.classes);
  const auto kernel = cross_entropy_in_place<T, kThreads, kSmooth>;
  int most = 0;  // bytes of shared memory a block may ask for; the kernel has a little of its own
  check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device.index()));
  const int64_t packs = ceil_div(rows.classes, kPackOf<T>);
  const int held = rows.whole ? int(std::min<int64_t>(packs, (most - 1024) / 16)) : 0;
  const unsigned blocks = gpu::resident_blocks(device, kernel, kThreads, size_t(held) * 16, rows.rows);
  const Tensor partial = doubles(blocks, device);
  sink.partial = as_doubles(partial);
  gpu::launch_dependent(device, {blocks, kThreads, size_t(held) * 16}, kernel, rows, args.logits.data<T>(),
                        sink, held, float(1 - smoothing + off), float(off), dloss);
}

}  // namespace

void cross_entropy_forward_cuda(const CrossEntropyForward& args) {
  dispatch_floating_cuda(args.logits.dtype(), "cross_entropy", [&]<class T>() {
    const Device device = args.logits.device();
    const auto rows = make_rows<T>(args.logits, args.targets, args.options);
    const bool each = args.options.reduction == Reduction::none;
    if (each && rows.rows == 0) return;
    LossSink sink{each ? args.loss.data<float>() : nullptr,
                  each ? nullptr : args.loss.data<float>(),
                  nullptr,
                  device.counters(1),
                  args.count.data<float>(),
                  args.options.reduction == Reduction::mean,
                  true};
    for_row_length(device, rows.rows, ceil_div(rows.classes, kPackOf<T>),
                   [&]<int kThreads, int kBlockThreads, int kUnroll>() {
                     const auto kernel =
                         rows.smoothing > 0
                             ? cross_entropy_forward<T, kThreads, kBlockThreads, kUnroll, true>
                             : cross_entropy_forward<T, kThreads, kBlockThreads, kUnroll, false>;
                     const unsigned blocks = gpu::resident_blocks(
                         device, kernel, kBlockThreads, 0, ceil_div(rows.rows, kBlockThreads / kThreads));
                     const Tensor partial = doubles(2 * int64_t(blocks), device);
                     sink.partial = as_doubles(partial);
                     gpu::launch_dependent(device, {blocks, kBlockThreads}, kernel, rows, sink,
                                           args.top.data<float>(), args.log_sum.data<float>());
                   });
  });
}

void cross_entropy_backward_cuda(const CrossEntropyBackward& args) {
  dispatch_floating_cuda(args.logits.dtype(), "cross_entropy", [&]<class T>() {
    auto rows = make_rows<T>(args.logits, args.targets, args.options);
    rows.whole =
        rows.whole && gpu::is_pack_aligned(args.dlogits.data<T>(), args.dlogits.row_stride(), kPackOf<T>);
    const double smoothing = args.options.label_smoothing, off = smoothing / double(rows.classes);
    const bool mean = args.options.reduction == Reduction::mean;
    for_row_length(args.logits.device(), rows.rows, ceil_div(rows.classes, kPackOf<T>),
                   [&]<int kThreads, int kBlockThreads, int kUnroll>() {
                     gpu::launch_dependent(
                         args.logits.device(),
                         {gpu::grid_of(ceil_div(rows.rows, kBlockThreads / kThreads)), kBlockThreads},
                         cross_entropy_backward<T, kThreads, kBlockThreads, kUnroll>, rows,
                         args.dlogits.data<T>(), args.dlogits.row_stride(), args.dloss.data<float>(),
                         args.options.reduction == Reduction::none, mean ? args.count.data<float>() : nullptr,
                         args.top.data<float>(), args.log_sum.data<float>(), float(1 - smoothing + off),
                         float(off));
                   });
  });
}

void cross_entropy_in_place_cuda(const CrossEntropyForward& args, const Tensor& dloss) {
  dispatch_floating_cuda(args.logits.dtype(), "cross_entropy", [&]<class T>() {
    const Device device = args.logits.device();
    const auto rows = make_rows<T>(args.logits, args.targets, args.options);
    const bool mean = args.options.reduction == Reduction::mean;
    if (mean) {
      const int64_t blocks = std::clamp<int64_t>(ceil_div(rows.rows, 16 * kCountThreads), 1, 256);
      const Tensor partial = doubles(blocks, device);
      gpu::launch_dependent(device, {dim3(unsigned(blocks)), kCountThreads}, cross_entropy_count,
                            rows.targets, rows.rows, rows.ignored, as_doubles(partial), device.counters(1),
                            args.count.data<float>());
    }
    const LossSink sink{
        nullptr, args.loss.data<float>(), nullptr, device.counters(1), args.count.data<float>(), mean, false};
    const float* const g = dloss.defined() ? dloss.data<float>() : nullptr;
    const auto launch = [&]<int kThreads>() {
      return rows.smoothing > 0 ? launch_in_place<T, kThreads, true>(args, rows, sink, g)
                                : launch_in_place<T, kThreads, false>(args, rows, sink, g);
    };
    // Blocks small enough that several share an SM; one large one where only one row fits.
    const int64_t packs = ceil_div(rows.classes, kPackOf<T>);
    if (packs <= 128) return launch.template operator()<kWarp>();
    if (packs <= 1024) return launch.template operator()<128>();
    if (packs <= 4096) return launch.template operator()<256>();
    if (packs <= 12288) return launch.template operator()<512>();
    launch.template operator()<1024>();
  });
}

void cross_entropy_scale_cuda(const Tensor& dlogits, const Tensor& dloss, const Tensor& made_for) {
  dispatch_floating_cuda(dlogits.dtype(), "cross_entropy", [&]<class T>() {
    const Device device = dlogits.device();
    const int64_t rows = dlogits.rows(), classes = dlogits.row_length(), stride = dlogits.row_stride();
    const unsigned blocks = gpu::resident_blocks(device, cross_entropy_scale<T>, kBlock, 0,
                                                 ceil_div(rows * ceil_div(classes, kPackOf<T>), kBlock));
    gpu::launch_dependent(device, {blocks, kBlock}, cross_entropy_scale<T>, dlogits.data<T>(), stride, rows,
                          classes, gpu::is_pack_aligned(dlogits.data<T>(), stride, kPackOf<T>),
                          dloss.data<float>(), made_for.defined() ? made_for.data<float>() : nullptr);
  });
}

}  // namespace tessera::ops
