#include "ops/mlp/mlp.h"

#include <algorithm>

#include "autograd/tape.h"
#include "ops/activation/activation_internal.h"
#include "ops/gemm/gemm.h"
#include "ops/linear/linear_kernels.h"
#include "ops/linear/sliced_rows_internal.h"
#include "ops/mlp/mlp_kernels.h"
#include "tensor/pads.h"

namespace tessera::ops {
namespace {

/// f(h), written over h if it is not needed any more.
Tensor activate_hidden(const Tensor& h, Activation kind, bool in_place) {
  if (kind == Activation::none) return h;
  const Tensor a = in_place ? h : as_scratch(Tensor::empty_like(h));
  activation_forward(a, h, kind);
  return a;
}

struct Hidden {
  Tensor h, a;
};

/// y and the hidden rows; h is undefined unless it is asked for.
Hidden forward(const Tensor& y, const Tensor& x, const Tensor& up, const Tensor& down, const Tensor& up_bias,
               const Tensor& down_bias, const Tensor& residual, Activation kind, bool keeps_h) {
  const auto rows = [&] { return as_scratch(Tensor::empty({x.size(0), up.size(0)}, x.dtype(), x.device())); };
  Hidden hidden{keeps_h ? rows() : Tensor(), rows()};
  if (x.device().is_cuda() && fuses_up(hidden.a, hidden.h, x, up, kind, Gpu(x.device()))) {
    fused_up(hidden.a, hidden.h, x, up, up_bias, kind);
  } else {
    const Tensor h = keeps_h ? hidden.h : hidden.a;
    hidden.a = Tensor();
    linear_forward(h, x, up, up_bias);
    hidden.a = activate_hidden(h, kind, !keeps_h);
  }
  linear_forward(y, hidden.a, down, down_bias, residual);
  return hidden;
}

/// dh = (dy down) f'(h), and a = f(h) if it is wanted.
struct HiddenGradients {
  Tensor dh, a;
};
HiddenGradients hidden_gradients(const Tensor& dy, const Tensor& h, const Tensor& down, Activation kind,
                                 bool wants_a) {
  const bool fits = dy.device().is_cuda();
  HiddenGradients hidden{fits ? as_scratch(Tensor::empty_like(h)) : Tensor(),
                         fits && wants_a ? as_scratch(Tensor::empty_like(h)) : Tensor()};
  if (fits && fuses_down_gradient(hidden.dh, hidden.a, dy, down, h, kind, Gpu(dy.device()))) {
    fused_down_gradient(hidden.dh, hidden.a, dy, down, h, kind);
    return hidden;
  }
  if (wants_a) hidden.a = activate_hidden(h, kind, false);
  hidden.dh = as_scratch(linear_input_gradient(dy, down));
  activation_backward(hidden.dh, hidden.dh, h, kind);
  return hidden;
}

/// The gradients of both weights (inputs 1 and 2), of up's bias (3) and, unless `down`'s rows are not all of
/// dy, of down's (4), where they are wanted, in one launch. Returns false, and has done nothing, where that
/// does not pay.
bool weight_gradients(Backward& b, WeightGradient up, WeightGradient down, bool all_rows) {
  if (!b.needs(1) || !b.needs(2) || !up.dy.defined() || !up.dy.device().is_cuda()) return false;
  const bool sums_down = all_rows && b.needs(4);
  const GradTarget up_bias = bias_sums(b, 3, up.dy),
                   down_bias = sums_down ? bias_sums(b, 4, down.dy) : GradTarget();
  if (up_bias.grad.defined() && down_bias.grad.defined() && up_bias.grad.raw() == down_bias.grad.raw())
    return false;  // one leaf is both biases
  up.sums = up_bias.grad, down.sums = down_bias.grad;
  if (!multiply_gradients(b, up, down)) return false;
  if (b.needs(3)) b.written(3, up_bias);
  if (sums_down) b.written(4, down_bias);
  return true;
}

/// The operands of a recorded call, and what its forward pass left.
struct Call {
  const Tensor &x, &up, &down, &up_bias, &down_bias, &residual;
  const Hidden& hidden;
  Activation kind;
};

void record_dense(Tape& tape, Tensor& y, const Call& call) {
  tape.record(
      "mlp", {&call.x, &call.up, &call.down, &call.up_bias, &call.down_bias, &call.residual}, {&y},
      [x = Saved(call.x), up = Saved(call.up), down = Saved(call.down), saved_h = Saved(call.hidden.h),
       kept = requires_grad(call.down) ? Saved(call.hidden.a) : Saved(), kind = call.kind](Backward& b) {
        const Tensor dy = flatten_leading(b.grad(), 1);
        const PassVariant pass("mlp", dy);
        const bool further = b.needs(0) || b.needs(1) || b.needs(3);
        const bool makes_a = b.needs(2) && !kept.defined();
        const Tensor h = saved_h.get();
        HiddenGradients hidden;
        if (further)
          hidden = hidden_gradients(dy, h, down.get(), kind, makes_a);
        else if (makes_a)
          hidden.a = activate_hidden(h, kind, false);
        if (!makes_a) hidden.a = kept.get();
        const bool together = weight_gradients(b, {1, up.get(), hidden.dh, flatten_leading(x.get(), 1)},
                                               {2, down.get(), dy, hidden.a}, true);
        if (!together) linear_parameter_gradients(b, 2, 4, down.get(), hidden.a, dy);
        // Before dx, which is added to dy where x is the residual, and after everything that reads dy.
        b.pass(0, {5});
        if (!further) return;
        hidden.a = Tensor();
        const Shape& shape = x.get().shape();
        linear_input_gradient(b, 0, shape, hidden.dh.reshape(shape.with(-1, up.get().size(0))), up.get());
        if (!together) linear_parameter_gradients(b, 1, 3, up.get(), flatten_leading(x.get(), 1), hidden.dh);
      });
}

/// What a sliced backward pass needs of the forward pass.
struct SlicedPass {
  SlicedRows rows;
  Saved up, down;
  Saved x, h;   // as rows.keep gave them; x only if up gets a gradient
  Saved a;      // of all rows, if down's gradient is summed over them
  Shape shape;  // of x
  Activation kind;
  WeightGrad weight_grad;

  void operator()(Backward& b) {
    const Tensor dy = flatten_leading(b.grad(), 1);
    const PassVariant pass("mlp", dy);
    const bool full = a.defined(), wants_down = b.needs(2) && weight_grad == WeightGrad::slice;
    const bool wants_up = b.needs(1) && x.defined();
    const bool further = b.needs(0) || wants_up || b.needs(3);
    HiddenGradients hidden;
    Tensor dy_rows, x_rows;
    if (further || wants_down) {
      rows.choose(dy);
      dy_rows = rows.take_scaled(dy);
      const Tensor h_rows = rows.take_kept(h.get());
      if (further)
        hidden = hidden_gradients(dy_rows, h_rows, down.get(), kind, wants_down);
      else
        hidden.a = activate_hidden(h_rows, kind, false);
      if (wants_up) x_rows = rows.take_kept(x.get());
    }
    const bool together =
        wants_down && wants_up &&
        weight_gradients(b, {1, up.get(), hidden.dh, x_rows}, {2, down.get(), dy_rows, hidden.a}, false);
    if (!together && wants_down) linear_weight_gradient(b, 2, down.get(), hidden.a, dy_rows);
    if (full)
      linear_parameter_gradients(b, 2, 4, down.get(), a.get(), dy);
    else
      bias_gradient(b, 4, dy);
    b.pass(0, {5});
    if (!further) return;
    hidden.a = Tensor();
    rows.give_input_gradient(b, 0, shape, hidden.dh, up.get());
    if (together) return;
    if (wants_up)
      linear_parameter_gradients(b, 1, 3, up.get(), x_rows, hidden.dh);
    else
      bias_gradient(b, 3, hidden.dh);
  }
};

/// As many rows as x has tokens.
int64_t tokens_of(const Tensor& x) {
  return flatten_leading(x, 1).size(0);
}

void record_sliced(Tape& tape, Tensor& y, const Call& call, const SlicedBackward& slice) {
  SlicedRows rows("mlp", slice, tokens_of(call.x), call.x.device());
  if (rows.is_dense()) return record_dense(tape, y, call);
  const bool trains = slice.weight_grad != WeightGrad::none;
  const bool keeps_x = trains && requires_grad(call.up);
  const bool keeps_a = slice.weight_grad == WeightGrad::full && requires_grad(call.down);
  const Saved x = keeps_x ? Saved(rows.keep(flatten_leading(call.x, 1))) : Saved(),
              h = Saved(rows.keep(call.hidden.h));
  tape.record("mlp", {&call.x, &call.up, &call.down, &call.up_bias, &call.down_bias, &call.residual}, {&y},
              SlicedPass{.rows = std::move(rows),
                         .up = Saved(call.up),
                         .down = Saved(call.down),
                         .x = x,
                         .h = h,
                         .a = keeps_a ? Saved(call.hidden.a) : Saved(),
                         .shape = call.x.shape(),
                         .kind = call.kind,
                         .weight_grad = slice.weight_grad});
}

Tensor run_mlp(const Tensor& x, const Tensor& up, const Tensor& down, Activation kind, const Tensor& up_bias,
               const Tensor& down_bias, const Tensor& residual, const SlicedBackward* slice) {
  check_operand("mlp", "x", x, x);
  check(x.rank() >= 1, "mlp: x is a scalar; expected [..., D]");
  check_linear("mlp", "up", x, x.size(-1), up, up_bias);
  check_linear("mlp", "down", x, up.size(0), down, down_bias);
  const Shape shape = x.shape().with(-1, down.size(0));
  check_residual("mlp", x, shape, residual);
  if (slice) slice->validate("mlp");
  const PassVariant pass("mlp", x);
  Tape* const tape = Tape::recording(x, up, down, up_bias, down_bias, residual);
  Tensor y = Tensor::empty(shape, x.dtype(), x.device());
  const Tensor added = residual.defined() ? flatten_leading(residual, 1) : residual;
  const Hidden hidden = forward(flatten_leading(y, 1), flatten_leading(x, 1), up.detach(), down.detach(),
                                up_bias, down_bias, added, kind, tape != nullptr);
  const Call call{x, up, down, up_bias, down_bias, residual, hidden, kind};
  if (tape && slice) record_sliced(*tape, y, call, *slice);
  if (tape && !slice) record_dense(*tape, y, call);
  return y;
}

}  // namespace

Tensor mlp(const Tensor& x, const Tensor& up, const Tensor& down, Activation kind, const Tensor& up_bias,
           const Tensor& down_bias, const Tensor& residual, Site site) {
  const CallScope call(site);
  return run_mlp(x, up, down, kind, up_bias, down_bias, residual, nullptr);
}

Tensor mlp(const Tensor& x, const Tensor& up, const Tensor& down, Activation kind, const Tensor& up_bias,
           const Tensor& down_bias, const Tensor& residual, const SlicedBackward& slice, Site site) {
  const CallScope call(site);
  return run_mlp(x, up, down, kind, up_bias, down_bias, residual, &slice);
}

}  // namespace tessera::ops
