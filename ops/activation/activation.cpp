#include "ops/activation/activation.h"

#include "autograd/tape.h"
#include "ops/activation/activation_internal.h"
#include "ops/activation/activation_kernels.h"
#include "runtime/has_cuda.h"
#include "runtime/text.h"

namespace tessera::ops {
namespace {

constexpr const char* kNames[] = {"none", "relu", "relu_squared", "silu", "gelu", "gelu_tanh"};

}  // namespace

const char* name_of(Activation kind) {
  return kNames[size_t(kind)];
}

Activation parse_activation(std::string_view name) {
  return parse_name<Activation>("activation: there is no kind", kNames, name);
}

void activation_forward(const Tensor& y, const Tensor& x, Activation kind) {
  if (kind == Activation::none) {
    if (!y.shares_storage(x)) y.copy_from(x);
  } else if (x.device().is_cpu()) {
    activation_forward_cpu(y, x, kind);
  } else if constexpr (kCuda) {
    activation_forward_cuda(y, x, kind);
  }
}

void activation_backward(const Tensor& dx, const Tensor& dy, const Tensor& x, Activation kind) {
  if (kind == Activation::none) {
    if (!dx.shares_storage(dy)) dx.copy_from(dy);
  } else if (x.device().is_cpu()) {
    activation_backward_cpu(dx, dy, x, kind);
  } else if constexpr (kCuda) {
    activation_backward_cuda(dx, dy, x, kind);
  }
}

Tensor activation(const Tensor& x, Activation kind, Site site) {
  const CallScope call(site);
  if (kind == Activation::none) return x;
  const char* const name = name_of(kind);
  check(x.defined(), name, ": x is undefined");
  Tensor y = Tensor::empty_like(x);
  activation_forward(y, x, kind);
  if (Tape* tape = Tape::recording(x)) {
    tape->record(name, {&x}, {&y}, [x = Saved(x), kind](Backward& b) {
      const Tensor dy = b.grad();
      Tensor dx = Tensor::empty_like(x.get());
      activation_backward(dx, dy, x.get(), kind);
      b.give(0, std::move(dx));
    });
  }
  return y;
}

}  // namespace tessera::ops
