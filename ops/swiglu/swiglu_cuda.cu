#include "gpu/elementwise.cuh"
#include "ops/swiglu/swiglu_kernels.h"
#include "ops/swiglu/swiglu_math.h"

/// Bound by memory. Forward reads two elements and writes one. Backward reads three and writes two in one
/// kernel where all five operands are rows on 16-byte boundaries, of whole packs or with row padding of the
/// gradients' own; other layouts take a generic element-wise pass for each gradient, five reads and two
/// writes. The library's exponential and IEEE division would take longer than the memory does, so 16-bit
/// dtypes use the approximate instructions, as the activations do.

namespace tessera::ops {
namespace {

constexpr int kThreads = 256;

template <class T>
inline constexpr bool kFast = sizeof(T) == 2;

template <class T>
struct Forward {
  __device__ T operator()(T gate, T up) const { return T(swiglu_value<kFast<T>>(float(gate), float(up))); }
};
template <class T>
struct Dgate {
  __device__ T operator()(T dy, T gate, T up) const {
    return T(swiglu_dgate<kFast<T>>(float(dy), float(gate), float(up)));
  }
};
template <class T>
struct Dup {
  __device__ T operator()(T dy, T gate) const { return T(swiglu_dup<kFast<T>>(float(dy), float(gate))); }
};

template <class T>
struct BackwardRows {
  T *dgate, *dup;
  const T *dy, *gate, *up;
  int64_t strides[5];  // between the rows of those, in their order
  uint32_t packs, packs_per_row;
  gpu::Divider by_packs_per_row;
};

/// One pack of 16 bytes per operand and thread.
template <class T>
__global__ void __launch_bounds__(kThreads) backward_rows(BackwardRows<T> args) {
  constexpr int kPack = gpu::kPackOf<T>;
  gpu::wait_and_launch_dependents();
  const uint32_t pack = blockIdx.x * uint32_t(kThreads) + threadIdx.x;
  if (pack >= args.packs) return;
  const uint32_t row = args.by_packs_per_row.divide(pack);
  const int64_t column = int64_t(pack - row * args.packs_per_row) * kPack;
  const auto offset = [&](int operand) { return int64_t(row) * args.strides[operand] + column; };
  const auto dy = gpu::load_pack<kPack>(args.dy + offset(2)),
             gate = gpu::load_pack<kPack>(args.gate + offset(3)),
             up = gpu::load_pack<kPack>(args.up + offset(4));
  gpu::Pack<T, kPack> dgate, dup;
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
    dgate.at[i] = Dgate<T>{}(dy.at[i], gate.at[i], up.at[i]);
    dup.at[i] = Dup<T>{}(dy.at[i], gate.at[i]);
  }
  gpu::store_pack<kPack>(args.dgate + offset(0), dgate);
  gpu::store_pack<kPack>(args.dup + offset(1), dup);
}

/// Launches backward_rows, or returns false where it does not take the operands.
template <class T>
bool backward_in_rows(const Tensor& dgate, const Tensor& dup, const Tensor& dy, const Tensor& gate,
                      const Tensor& up) {
  constexpr int kPack = gpu::kPackOf<T>;
  const auto loop = make_loop(dy.shape(), dgate, dup, dy, gate, up);
  const int inner = loop.rank - 1;
  if (loop.count == 0 || loop.rank > 2) return false;
  const int64_t packs_per_row = gpu::ceil_div(loop.sizes[inner], kPack), whole = packs_per_row * kPack;
  // What a ragged row's last pack adds is row padding.
  if (loop.sizes[inner] != whole && !(owns_row_padding(dgate, whole) && owns_row_padding(dup, whole)))
    return false;
  if (loop.count / kPack > (int64_t(1) << 31) - kThreads) return false;
  BackwardRows<T> args{dgate.data<T>(), dup.data<T>(), dy.data<T>(), gate.data<T>(), up.data<T>()};
  const void* const bases[] = {args.dgate, args.dup, args.dy, args.gate, args.up};
  for (int operand = 0; operand < 5; ++operand) {
    const int64_t stride = inner == 1 ? loop.strides[operand][0] : 0;
    if (loop.strides[operand][inner] != 1 || stride % kPack != 0 ||
        reinterpret_cast<uintptr_t>(bases[operand]) % 16 != 0)
      return false;
    args.strides[operand] = stride;
  }
  args.packs = uint32_t(loop.count / loop.sizes[inner] * packs_per_row);
  args.packs_per_row = uint32_t(packs_per_row);
  args.by_packs_per_row = gpu::Divider(args.packs_per_row);
  gpu::launch_dependent(dy.device(), {dim3(unsigned(gpu::ceil_div(args.packs, kThreads))), kThreads},
                        backward_rows<T>, args);
  return true;
}

}  // namespace

void swiglu_forward_cuda(const Tensor& y, const Tensor& gate, const Tensor& up) {
  dispatch_floating_cuda(y.dtype(), "swiglu",
                         [&]<class T>() { gpu::elementwise<T, T, T>(y, Forward<T>{}, gate, up); });
}

void swiglu_backward_cuda(const Tensor& dgate, const Tensor& dup, const Tensor& dy, const Tensor& gate,
                          const Tensor& up) {
  dispatch_floating_cuda(dy.dtype(), "swiglu", [&]<class T>() {
    if (dgate.defined() && dup.defined() && backward_in_rows<T>(dgate, dup, dy, gate, up)) return;
    if (dgate.defined()) gpu::elementwise<T, T, T, T>(dgate, Dgate<T>{}, dy, gate, up);
    if (dup.defined()) gpu::elementwise<T, T, T>(dup, Dup<T>{}, dy, gate);
  });
}

}  // namespace tessera::ops
