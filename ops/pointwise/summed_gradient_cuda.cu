#include "ops/pointwise/pointwise_kernels.h"
#include "ops/reduce/reduce_pass.cuh"
#include "ops/reduce/sum_of.cuh"

/// Gradients of operands that broadcast: one read of dy and of the other operand, whose terms are summed as
/// they are read; bound by memory.

namespace tessera::ops {
namespace {

/// A term of operand_gradient; own: the operand, of a quotient its inverse. One function for all kinds, since
/// each instance of the reduction is a dozen kernels.
struct Term {
  bool chooses, divides;
  float sign;  // of a product, and of a choice: 1 if the larger one wins

  explicit Term(Binary kind)
      : chooses(kind == Binary::maximum || kind == Binary::minimum),
        divides(kind == Binary::div),
        sign(kind == Binary::div || kind == Binary::minimum ? -1.0f : 1.0f) {}
  __device__ __forceinline__ float own(float mine) const { return divides ? 1.0f / mine : mine; }
  __device__ __forceinline__ float operator()(float own, float dy, float other) const {
    if (!chooses) return sign * dy * (other * own * own);
    const float ahead = sign * own, behind = sign * other;
    return own == other ? 0.5f * dy : ahead < behind ? 0.0f : dy;
  }
};

}  // namespace

bool summed_gradient_cuda(const Tensor& d, const Tensor& dy, const Tensor& mine, const Tensor& other,
                          Binary kind) {
  const ReducePlan plan = plan_to(dy.layout(), d.layout(), mine.defined() ? &mine.layout() : nullptr);
  if (dy.layout().strides != other.layout().strides || !is_one_pass(plan) || plan.length == 0) return false;
  if (plan.outputs == 0) return true;
  dispatch_floating_cuda(dy.dtype(), name_of(kind), [&]<class T>() {
    const Mapped<Term, T, 1> from{.x = dy.data<T>(),
                                  .others = {other.data<T>()},
                                  .z = mine.defined() ? mine.data<T>() : nullptr,
                                  .f = Term(kind)};
    const bool alike =
        reinterpret_cast<uintptr_t>(from.x) % 16 == reinterpret_cast<uintptr_t>(from.others[0]) % 16;
    reduce_pass(dy.device(), plan, from, d.data<float>(), SumOf{}, Finish{}, alike);
  });
  return true;
}

}  // namespace tessera::ops
