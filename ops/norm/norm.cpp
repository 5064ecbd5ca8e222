#include "ops/norm/norm.h"

#include <optional>

#include "autograd/tape.h"
#include "ops/linear/linear_kernels.h"
#include "ops/norm/norm_kernels.h"
#include "ops/reduction.h"
#include "runtime/has_cuda.h"
#include "runtime/integers.h"

namespace tessera::ops {
namespace {

void check_parameter(const char* name, const char* what, const Tensor& parameter, const Tensor& x) {
  if (!parameter.defined()) return;
  check(parameter.rank() == 1 && parameter.size(0) == x.size(-1), name, ": ", what, " is ",
        describe(parameter), "; expected [", x.size(-1), "], the last dimension of x ", x.shape());
  check(parameter.dtype() == x.dtype() && parameter.device() == x.device(), name, ": ", what, " is ",
        describe(parameter), ", but x is ", describe(x), "; convert one of them (ops::cast) or move it");
}

Tensor rows_of(const Tensor& tensor) {
  return tensor.defined() ? tensor.with_rows() : tensor;
}

/// Where the gradient of a parameter is written: a leaf's own buffer if that waits for it, so that no copy is
/// left to do; undefined if it is not needed. In sum_dtype, or on a GPU in x's dtype if it is kept in that.
GradTarget parameter_target(Backward& b, int input, const Tensor& x) {
  if (!b.needs(input)) return {};
  const DType wide = sum_dtype(x.dtype());
  const GradTarget target = b.target(input);
  const auto writable = [&](DType dtype) {
    return dtype == wide || (dtype == x.dtype() && x.device().is_cuda());
  };
  if (target.grad.defined() && !target.accumulate && writable(target.grad.dtype()) && target.grad.has_rows())
    return target;
  const DType kept = b.grad_dtype(input);
  const bool direct = !target.grad.defined() && writable(kept);
  return {Tensor::empty({x.size(-1)}, direct ? kept : wide, x.device()), false};
}

/// Whether a parameter's gradient is not wanted, or lies in a leaf's f32 buffer that may be written at the
/// end of the pass.
bool may_wait(Backward& b, int input, const GradTarget& to) {
  if (!to.grad.defined()) return true;
  if (!b.may_wait(input) || to.grad.dtype() != DType::f32 || !to.grad.layout().is_packed()) return false;
  const Tensor buffer = b.target(input).grad;
  return buffer.defined() && buffer.raw() == to.grad.raw();
}

/// What an add_norm adds its residual to and how.
struct Residual {
  const Tensor& tensor;
  ResidualDropout dropout;
};

/// What backward needs of a norm next to its gradients.
struct Kept {
  Saved from, weight, mean, rstd;   // `from` is what was normalised
  std::optional<DropoutMask> drop;  // of the residual
  Saved mask;                       // on CUDA, see mask_shape
};

/// Hands the gradients of a norm to inputs 0 (x), 1 (the residual, if `adds`) and the two after them.
void backward(Backward& b, bool adds, const Kept& kept) {
  const Tensor from = kept.from.get().with_rows();
  const int parameters = adds ? 2 : 1;
  const bool wants_residual = adds && b.needs(1);
  const DropoutMask* const drop = kept.drop ? &*kept.drop : nullptr;
  const bool wants_dx = b.needs(0) || (wants_residual && !drop), wants_dropped = wants_residual && drop;
  const Tensor dsum = adds && b.has_grad(0) ? b.grad(0).with_rows() : Tensor();
  const bool both = adds && !drop;  // x and the residual have one gradient
  Tensor dx = dsum, again, dropped;
  Tensor dropped_sums;  // partial sums of its columns, for the bias of the layer that made the residual
  GradTarget dweight, dbias;
  const bool made = !adds || b.has_grad(1);
  if (made) {
    const Tensor dy = b.grad(adds ? 1 : 0).with_rows(), scale = rows_of(kept.weight.get());
    dx = wants_dx ? Tensor::empty_like(from) : Tensor();
    if (from.device().is_cuda() && both && b.needs(0) && b.needs(1) && b.would_copy(0, 1))
      again = Tensor::empty_like(from);
    dropped = wants_dropped ? Tensor::empty_like(from) : Tensor();
    dweight = parameter_target(b, parameters, from);
    dbias = parameter_target(b, parameters + 1, from);
    if (dweight.grad.defined() && dbias.grad.defined() && dweight.grad.dtype() != dbias.grad.dtype()) {
      const DType wide = sum_dtype(from.dtype());
      GradTarget& other = dweight.grad.dtype() == wide ? dbias : dweight;
      other = {Tensor::empty({from.size(-1)}, wide, from.device()), false};
    }
    const Tensor &mean = kept.mean.get(), &rstd = kept.rstd.get();
    NormBackward norm{dx,    again, dropped, dweight.grad, dbias.grad,     dy, dsum, from,
                      scale, mean,  rstd,    drop,         kept.mask.get()};
    if constexpr (kCuda) {
      const bool waits = may_wait(b, parameters, dweight) && may_wait(b, parameters + 1, dbias);
      if (from.device().is_cuda() && waits) norm.later = &b.at_end<NormSums>();
    }
    const bool sums_dropped = wants_dropped && b.wants_column_sums(1);
    if (sums_dropped && norm_sums_dresidual(from, mean.defined())) norm.dresidual_sums = &dropped_sums;
    if (from.device().is_cpu()) {
      norm_backward_cpu(norm);
      if (sums_dropped) dropped_sums = column_sums(dropped).reshape({1, dropped.row_length()});
    } else if constexpr (kCuda) {
      norm_backward_cuda(norm);
    }
  } else if (wants_dropped) {
    dropped = masked(dsum, *drop);
  }
  if (again.defined()) {
    b.give(0, std::move(dx));
    b.give(1, std::move(again));
  } else if (dx.defined() && made) {
    both ? b.give({0, 1}, std::move(dx)) : b.give(0, std::move(dx));
  } else if (dx.defined()) {
    both ? b.pass(0, {0, 1}) : b.pass(0, {0});
  }
  if (dropped_sums.defined()) {
    b.give_summed(1, std::move(dropped), dropped_sums);
  } else if (dropped.defined()) {
    b.give(1, std::move(dropped));
  }
  if (dweight.grad.defined()) b.written(parameters, dweight);
  if (dbias.grad.defined()) b.written(parameters + 1, dbias);
}

void check_residual(const char* name, const Residual& residual, const Tensor& x) {
  const Tensor& tensor = residual.tensor;
  check(tensor.defined(), name, ": residual is undefined");
  check(tensor.shape() == x.shape() && tensor.dtype() == x.dtype() && tensor.device() == x.device(), name,
        ": residual is ", describe(tensor), ", but x is ", describe(x), "; they must agree");
  const auto& [p, rng] = residual.dropout;
  check(p >= 0 && p < 1, name, ": dropout is ", p, "; expected 0 <= p < 1");
  check(p == 0 || rng, name, ": dropout needs a source of random numbers (rng)");
}

AddNorm apply(const char* name, const Tensor& x, const Residual* residual, const Tensor& weight,
              const Tensor& bias, double eps, bool centred, Site site) {
  const CallScope call(site);
  check(x.defined(), name, ": x is undefined");
  check(x.rank() > 0, name, ": x is ", describe(x), ", of rank 0; expected [..., C]");
  check(eps >= 0, name, ": eps is ", eps, "; expected 0 or more");
  if (residual) check_residual(name, *residual, x);
  check_parameter(name, "weight", weight, x);
  check_parameter(name, "bias", bias, x);
  AddNorm results{residual ? Tensor::empty_like(x) : Tensor(), Tensor::empty_like(x)};
  const Tensor added = residual ? residual->tensor : Tensor();
  Tape* const tape = Tape::recording(x, added, weight, bias);
  Tensor mean, rstd;  // a GPU writes them only for backward
  if (tape || x.device().is_cpu()) {
    rstd = Tensor::empty({x.rows()}, sum_dtype(x.dtype()), x.device());
    if (centred) mean = Tensor::empty_like(rstd);
  }
  std::optional<DropoutMask> drop;
  if (residual && residual->dropout.p > 0)
    drop = DropoutMask::of(residual->dropout.p, residual->dropout.rng->reserve(x.device()));
  Tensor mask;
  if (drop && tape && x.device().is_cuda()) mask = Tensor::empty_packed(mask_shape(x), DType::u8, x.device());
  {
    const Tensor from = x.with_rows(), other = rows_of(added), scale = rows_of(weight), shift = rows_of(bias);
    const NormForward norm{
        results.y, results.sum, mean, rstd, from, other, scale, shift, centred, eps, drop ? &*drop : nullptr,
        mask};
    if (x.device().is_cpu()) {
      norm_forward_cpu(norm);
    } else if constexpr (kCuda) {
      norm_forward_cuda(norm);
    }
  }
  const auto keep = [&](const Tensor& from) {
    return Kept{Saved(from), Saved(weight), Saved(mean), Saved(rstd), drop, Saved(mask)};
  };
  if (tape && residual) {
    tape->record(name, {&x, &residual->tensor, &weight, &bias}, {&results.sum, &results.y},
                 [kept = keep(results.sum)](Backward& b) { backward(b, true, kept); });
  } else if (tape) {
    tape->record(name, {&x, &weight, &bias}, {&results.y},
                 [kept = keep(x)](Backward& b) { backward(b, false, kept); });
  }
  return results;
}

}  // namespace

bool norm_sums_dresidual(const Tensor& x, bool centred) {
  return x.device().is_cuda() && centred && size_of(x.dtype()) == 2 && x.row_length() >= 8 &&
         x.row_length() <= 1024;
}

Shape mask_shape(const Tensor& x) {
  const int64_t pack = 16 / int64_t(size_of(x.dtype()));
  return {x.rows(), ceil_div(x.row_length(), pack)};
}

Tensor layernorm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps, Site site) {
  return apply("layernorm", x, nullptr, weight, bias, eps, true, site).y;
}

Tensor rmsnorm(const Tensor& x, const Tensor& weight, double eps, Site site) {
  return apply("rmsnorm", x, nullptr, weight, {}, eps, false, site).y;
}

AddNorm add_layernorm(const Tensor& x, const Tensor& residual, const Tensor& weight, const Tensor& bias,
                      double eps, ResidualDropout dropout, Site site) {
  const Residual added{residual, dropout};
  return apply("add_layernorm", x, &added, weight, bias, eps, true, site);
}

AddNorm add_rmsnorm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps,
                    ResidualDropout dropout, Site site) {
  const Residual added{residual, dropout};
  return apply("add_rmsnorm", x, &added, weight, {}, eps, false, site);
}

}  // namespace tessera::ops
