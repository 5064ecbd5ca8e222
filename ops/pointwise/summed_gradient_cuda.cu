#include "ops/activation/activation_math.h"
#include "ops/pointwise/pointwise_kernels.h"
#include "ops/reduce/reduce_pass.cuh"
#include "ops/reduce/sum_of.cuh"

/// Gradients of operands that broadcast: one read of dy and of the other operand, whose terms are summed as
/// they are read, and one write of the other operand's gradient if it is wanted; bound by memory.

namespace tessera::ops {
namespace {

/// A term of operand_gradient, and the other operand's gradient. One function for all kinds, since each
/// instance of the reduction is a dozen kernels.
template <class T>
struct Term {
  bool chooses, divides;
  float sign;  // of a choice: 1 if the larger one wins

  explicit Term(Binary kind)
      : chooses(kind == Binary::maximum || kind == Binary::minimum),
        divides(kind == Binary::div),
        sign(kind == Binary::minimum ? -1.0f : 1.0f) {}
  /// The operand: of a quotient its inverse, of a choice so that the larger one wins.
  __device__ __forceinline__ float own(float mine) const {
    return divides ? quotient<sizeof(T) == 2>(1.0f, mine) : chooses ? sign * mine : mine;
  }
  __device__ __forceinline__ float operator()(float own, float dy, float other) const {
    if (!chooses) return divides ? -dy * (other * own * own) : dy * other;
    const float signed_other = sign * other;
    return own == signed_other ? 0.5f * dy : own < signed_other ? 0.0f : dy;
  }
  __device__ __forceinline__ float written(float own, float dy, float other) const {
    if (!chooses) return dy * own;
    const float signed_other = sign * other;
    return own == signed_other ? 0.5f * dy : signed_other < own ? 0.0f : dy;
  }
};

}  // namespace

bool summed_gradient_cuda(const Tensor& d, const Tensor& dy, const Tensor& mine, const Tensor& other,
                          Binary kind, const Tensor& d_other) {
  const ReducePlan plan = plan_to(dy.layout(), d.layout(), mine.defined() ? &mine.layout() : nullptr);
  if (dy.layout().strides != other.layout().strides || !is_one_pass(plan) || plan.length == 0) return false;
  if (d_other.defined()) {
    const int64_t width = dy.size(-1), pack = 16 / int64_t(size_of(dy.dtype()));
    const int64_t whole = ceil_div(width, pack) * pack;
    if (dy.layout().strides != d_other.layout().strides ||
        (width != whole && !owns_row_padding(d_other, whole)))
      return false;
  }
  if (plan.outputs == 0) return true;
  dispatch_floating_cuda(dy.dtype(), name_of(kind), [&]<class T>() {
    const Mapped<Term<T>, T, 1> from{.x = dy.data<T>(),
                                     .others = {other.data<T>()},
                                     .z = mine.defined() ? mine.data<T>() : nullptr,
                                     .f = Term<T>(kind),
                                     .written = d_other.defined() ? d_other.data<T>() : nullptr};
    const auto place = [](const T* data) { return reinterpret_cast<uintptr_t>(data) % 16; };
    const bool alike =
        place(from.x) == place(from.others[0]) && (!from.written || place(from.x) == place(from.written));
    reduce_pass(dy.device(), plan, from, d.data<float>(), SumOf{}, Finish{}, alike);
  });
  return true;
}

}  // namespace tessera::ops
