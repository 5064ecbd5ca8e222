#include "ops/sparse24/weight24.h"

#include "autograd/tape.h"
#include "ops/bits/bits.h"
#include "ops/gemm/gemm.h"
#include "ops/linear/linear_kernels.h"
#include "ops/pointwise/pointwise.h"
#include "ops/reduce/reduce.h"
#include "ops/sparse24/weight24_kernels.h"
#include "ops/sparse24/weight_gradient24_internal.h"
#include "ops/sum_dtype.h"
#include "runtime/has_cuda.h"

namespace tessera::ops {
namespace {

void check_mask(const char* op, const Tensor& weight, const Tensor& mask) {
  const Shape expected{weight.size(0), bit_words(weight.size(1))};
  check(mask.defined() && mask.dtype() == DType::i32 && mask.shape() == expected &&
            mask.device() == weight.device(),
        op, ": the mask is ", describe(mask), "; expected i32 ", expected, " on ", weight.device().name(),
        ", of the weight ", describe(weight));
}

/// M . weight
Tensor masked(const Tensor& weight, const Tensor& mask) {
  return mul(weight.detach(), unpack_bits(mask, weight.size(1), weight.dtype()));
}

/// (1 - M) . weight, in the dtype of sums
Tensor pruned(const Tensor& weight, const Tensor& mask) {
  return sub(weight.detach(), masked(weight, mask)).to(sum_dtype(weight.dtype()));
}

/// d = x (M . weight)^T or, along tokens, d = x (M . weight), by the transposed GEMM, whose first operand is
/// the sparse one.
void multiply_weight(const Tensor& d, const Tensor& x, const Tensor& weight, const Tensor& mask,
                     Along24 along, const Multiply24Options& options = {}) {
  const Sparse24 compressed = compress24(masked(weight, mask), along);
  multiply24(d.transpose(0, 1), compressed, x.transpose(0, 1), options);
}

}  // namespace

Tensor transposable24(const Tensor& weight, Site site) {
  const CallScope call(site);
  check(weight.defined() && weight.rank() == 2 && is_floating(weight.dtype()),
        "transposable24: the weight is ", describe(weight), "; expected a floating matrix [R, C]");
  const Tensor mask =
      Tensor::empty_packed({weight.size(0), bit_words(weight.size(1))}, DType::i32, weight.device());
  if (mask.count() == 0) return mask;
  if (weight.device().is_cpu()) {
    transposable24_cpu(mask, weight.detach());
  } else if constexpr (kCuda) {
    transposable24_cuda(mask, weight.detach());
  }
  return mask;
}

Tensor weight24_linear(const Tensor& x, const Tensor& weight, const Tensor& mask, const Tensor& bias,
                       const Tensor& residual, const std::optional<Rng>& mvue, Site site) {
  const CallScope call(site);
  constexpr const char* kOp = "weight24_linear";
  const Shape shape = check_linear_call(kOp, x, weight, bias, residual);
  check_mask(kOp, weight, mask);
  const auto rows = [](const Tensor& given) { return flatten_leading(given, 1).detach(); };
  Tensor y = Tensor::empty(shape, x.dtype(), x.device());
  Multiply24Options options;
  if (bias.defined()) options.bias = bias.detach().reshape({bias.size(0), 1});
  if (residual.defined()) options.residual = rows(residual).transpose(0, 1);
  multiply_weight(rows(y), rows(x), weight, mask, Along24::features, options);
  Tape* const tape = Tape::recording(x, weight, bias, residual);
  if (!tape) return y;
  std::optional<Selection24> drawn;
  if (mvue && requires_grad(weight)) drawn = Selection24::mvue(*mvue, x.device(), site);
  tape->record(kOp, {&x, &weight, &bias, &residual}, {&y},
               [x = requires_grad(weight) ? Saved(x) : Saved(), weight = Saved(weight), mask = Saved(mask),
                x_shape = x.shape(), drawn](Backward& b) {
                 const Tensor dy = flatten_leading(b.grad(), 1);
                 const Tensor tokens = b.needs(1) ? flatten_leading(x.get(), 1) : Tensor();
                 if (drawn && b.needs(1)) {
                   give_weight_gradient24(b, 1, weight.get(), [&](const Tensor& d, bool accumulate) {
                     multiply24(d, compress24(dy, Along24::tokens, *drawn), tokens,
                                {.accumulate = accumulate});
                   });
                   bias_gradient(b, 2, dy);
                 } else {
                   linear_parameter_gradients(b, 1, 2, weight.get(), tokens, dy);
                 }
                 Tensor dx;
                 if (b.needs(0)) {
                   dx = Tensor::empty(x_shape, dy.dtype(), dy.device());
                   multiply_weight(flatten_leading(dx, 1), dy, weight.get(), mask.get(), Along24::tokens);
                 }
                 // Before dx, which is added to dy where x is the residual, and after everything that reads
                 // dy.
                 b.pass(0, {3});
                 if (dx.defined()) b.give(0, std::move(dx));
               });
  return y;
}

Tensor masked_decay24(const Tensor& weight, const Tensor& mask, Site site) {
  const CallScope call(site);
  constexpr const char* kOp = "masked_decay24";
  check(weight.defined() && weight.rank() == 2 && is_floating(weight.dtype()), kOp, ": the weight is ",
        describe(weight), "; expected a floating matrix [R, C]");
  check_mask(kOp, weight, mask);
  const Tensor rest = pruned(weight, mask);
  Tensor decay = scale(sum_to(mul(rest, rest), {}, rest.dtype()), 0.5);
  Tape* const tape = Tape::recording(weight);
  if (!tape) return decay;
  tape->record(kOp, {&weight}, {&decay}, [weight = Saved(weight), mask = Saved(mask)](Backward& b) {
    b.give(0, mul(pruned(weight.get(), mask.get()), b.grad()));
  });
  return decay;
}

}  // namespace tessera::ops
