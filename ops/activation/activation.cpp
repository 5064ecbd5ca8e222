#include "ops/activation/activation.h"

#include "autograd/tape.h"
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

Tensor activation(const Tensor& x, Activation kind, Site site) {
  const CallScope call(site);
  if (kind == Activation::none) return x;
  const char* const name = name_of(kind);
  check(x.defined(), name, ": x is undefined");
  Tensor y = Tensor::empty_like(x);
  if (x.device().is_cpu()) {
    activation_forward_cpu(y, x, kind);
  } else if constexpr (kCuda) {
    activation_forward_cuda(y, x, kind);
  }
  if (Tape* tape = Tape::recording(x)) {
    tape->record(name, {&x}, {&y}, [x = Saved(x), kind](Backward& b) {
      const Tensor dy = b.grad();
      Tensor dx = Tensor::empty_like(x.get());
      if (dx.device().is_cpu()) {
        activation_backward_cpu(dx, dy, x.get(), kind);
      } else if constexpr (kCuda) {
        activation_backward_cuda(dx, dy, x.get(), kind);
      }
      b.give(0, std::move(dx));
    });
  }
  return y;
}

}  // namespace tessera::ops
