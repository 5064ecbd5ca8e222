#include "ops/swiglu/swiglu.h"

#include "autograd/tape.h"
#include "ops/swiglu/swiglu_kernels.h"
#include "runtime/has_cuda.h"

namespace tessera::ops {
namespace {

void forward(const Tensor& y, const Tensor& gate, const Tensor& up) {
  if (gate.device().is_cpu()) {
    swiglu_forward_cpu(y, gate, up);
  } else if constexpr (kCuda) {
    swiglu_forward_cuda(y, gate, up);
  }
}

void backward(const Tensor& dgate, const Tensor& dup, const Tensor& dy, const Tensor& gate,
              const Tensor& up) {
  if (dy.device().is_cpu()) {
    swiglu_backward_cpu(dgate, dup, dy, gate, up);
  } else if constexpr (kCuda) {
    swiglu_backward_cuda(dgate, dup, dy, gate, up);
  }
}

struct Halves {
  Tensor gate, up;
};
Halves halves(const Tensor& x) {
  const int64_t width = x.size(-1) / 2;
  return {x.slice(-1, 0, width), x.slice(-1, width, 2 * width)};
}

}  // namespace

Tensor swiglu(const Tensor& gate, const Tensor& up, Site site) {
  const CallScope call(site);
  check(gate.defined() && up.defined(), "swiglu: ", gate.defined() ? "up" : "gate", " is undefined");
  check(gate.shape() == up.shape() && gate.dtype() == up.dtype() && gate.device() == up.device(),
        "swiglu: gate is ", describe(gate), ", but up is ", describe(up));
  Tensor y = Tensor::empty_like(gate);
  forward(y, gate.detach(), up.detach());
  if (Tape* tape = Tape::recording(gate, up)) {
    tape->record("swiglu", {&gate, &up}, {&y}, [gate = Saved(gate), up = Saved(up)](Backward& b) {
      const auto gradient = [&](int input) {
        return b.needs(input) ? Tensor::empty_like(gate.get()) : Tensor();
      };
      Tensor dgate = gradient(0), dup = gradient(1);
      backward(dgate, dup, b.grad(), gate.get(), up.get());
      b.give(0, std::move(dgate));
      b.give(1, std::move(dup));
    });
  }
  return y;
}

void swiglu_forward(const Tensor& y, const Tensor& packed) {
  const Halves x = halves(packed);
  forward(y, x.gate, x.up);
}

Tensor swiglu_gradient(const Tensor& dy, const Tensor& packed) {
  Tensor dx = Tensor::empty_like(packed);
  const Halves x = halves(packed), d = halves(dx);
  backward(d.gate, d.up, dy, x.gate, x.up);
  return dx;
}

Tensor swiglu(const Tensor& packed, Site site) {
  const CallScope call(site);
  check(packed.defined(), "swiglu: x is undefined");
  check(packed.rank() >= 1 && packed.size(-1) % 2 == 0, "swiglu: x is ", describe(packed),
        "; expected [..., 2F]: gate and up");
  const Halves x = halves(packed.detach());
  Tensor y = Tensor::empty_like(x.gate);
  forward(y, x.gate, x.up);
  if (Tape* tape = Tape::recording(packed)) {
    tape->record("swiglu", {&packed}, {&y}, [packed = Saved(packed)](Backward& b) {
      b.give(0, swiglu_gradient(b.grad(), packed.get()));
    });
  }
  return y;
}

}  // namespace tessera::ops
