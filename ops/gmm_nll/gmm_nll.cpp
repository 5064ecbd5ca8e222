#include "ops/gmm_nll/gmm_nll.h"

#include "autograd/tape.h"
#include "ops/gmm_nll/gmm_nll_kernels.h"
#include "ops/op.h"

namespace tessera::ops {
namespace {

void check_arguments(const Tensor& params, const Tensor& y) {
  check(params.defined() && y.defined(), "gmm_nll: ", params.defined() ? "y" : "params", " is undefined");
  check(params.rank() >= 2 && params.size(-1) == 3 && params.size(-2) >= 1, "gmm_nll: params is ",
        describe(params), "; expected [..., K, 3] with K >= 1 and (logit, mu, log_sigma) innermost");
  check(params.shape().without(-1).without(-1) == y.shape(), "gmm_nll: y is ", describe(y),
        ", but params is ", describe(params), "; expected y of shape ",
        params.shape().without(-1).without(-1));
  const bool mixed = y.dtype() == DType::f32 && is_floating(params.dtype()) && size_of(params.dtype()) == 2;
  check((params.dtype() == y.dtype() || mixed) && params.device() == y.device(), "gmm_nll: y is ",
        describe(y), ", but params is ", describe(params),
        "; expected y of the same dtype, or f32 next to bf16 or f16, on ", "one device");
}

Problem problem(const Dims& d, const Attrs&) {
  const int64_t count = d.at("T"), components = d.at("K");
  const double n = double(count) * double(components);
  return {.inputs = {{.shape = {count, components, 3}, .scale = 0.7}, {.shape = {count}}},
          // A component: three exponentials and ten operations; backward those again and twelve more.
          .forward_flops = 13 * n,
          .backward_flops = 28 * n,
          .forward_elements = 3 * n + double(count),
          .backward_elements = 6 * n + 2 * double(count)};
}

Tensor packed_like(const Tensor& like) {
  return Tensor::empty_packed(like.shape(), like.dtype(), like.device());
}

}  // namespace

Tensor gmm_nll(const Tensor& params, const Tensor& y, Reduction reduction, Site site) {
  const CallScope call(site);
  check_arguments(params, y);
  const Tensor theta = params.packed(), target = y.packed();
  Tensor loss = Tensor::empty_packed(reduction == Reduction::none ? y.shape() : Shape{},
                                     sum_dtype(params.dtype()), y.device());
  Tape* const tape = Tape::recording(params, y);
  Tensor dparams, dy;  // for a dloss of `scale` (undefined: 1); undefined unless forward makes them
  const Tensor scale = tape ? tape->initial_gradient(loss.dtype(), loss.device()) : Tensor();
  if (y.device().is_cpu()) {
    gmm_nll_forward_cpu(loss, theta, target, reduction);
  } else if constexpr (kCuda) {
    if (tape && reduction != Reduction::none) {
      if (requires_grad(params)) dparams = packed_like(theta);
      if (requires_grad(y)) dy = packed_like(target);
    }
    gmm_nll_forward_cuda(loss, dparams, dy, scale, theta, target, reduction);
  }
  if (tape)
    tape->record("gmm_nll", {&params, &y}, {&loss},
                 [params = Saved(params), y = Saved(y), dparams, dy, scale, reduction](Backward& b) mutable {
                   const Tensor theta = params.get().packed(), target = y.get().packed(),
                                dloss = b.grad().packed();
                   const bool made = dparams.defined() || dy.defined();
                   if (b.needs(0) && !made) dparams = packed_like(theta);
                   if (b.needs(1) && !made) dy = packed_like(target);
                   if (target.device().is_cpu()) {
                     gmm_nll_backward_cpu(dparams, dy, dloss, theta, target, reduction);
                   } else if constexpr (kCuda) {
                     gmm_nll_backward_cuda(dparams, dy, dloss, theta, target, reduction, made, scale);
                   }
                   b.give(0, std::move(dparams));
                   b.give(1, std::move(dy));
                 });
  return loss;
}

std::vector<OpSpec> gmm_nll_specs() {
  const auto reduced = [](const char* word) { return Attrs{{"reduction", std::string(word)}}; };
  return {{
      .name = "gmm_nll",
      .summary = "-log sum_k softmax(w)_k N(y; mu_k, exp(s_k)), with params_k = (w, mu, s)",
      .inputs = {{"params", "[..., K, 3]"}, {"y", "[...]"}},
      .attrs = {{"reduction", std::string("mean"), "how the losses become one", {"mean", "sum", "none"}}},
      .outputs = {{.name = "loss", .shape = "[] or as y", .dtypes = sum_dtypes()}},
      .run =
          [](const std::vector<Tensor>& in, const Attrs& attrs) {
            return std::vector{gmm_nll(in[0], in[1], parse_reduction(attrs.word("reduction")))};
          },
      .problem = problem,
      .cases = {{.dims = {{"T", 7}, {"K", 10}}},
                {.dims = {{"T", 5}, {"K", 3}}, .attrs = reduced("none")},
                {.dims = {{"T", 11}, {"K", 2}}, .attrs = reduced("sum")},
                {.dims = {{"T", 1}, {"K", 1}}},
                {.dims = {{"T", 6}, {"K", 1}}, .attrs = reduced("none")},
                {.dims = {{"T", 0}, {"K", 4}}, .attrs = reduced("none")},
                {.dims = {{"T", 0}, {"K", 4}}, .attrs = reduced("sum")},
                {.dims = {{"T", 5}, {"K", 4}}, .attrs = reduced("none"), .placement = Placement::strided},
                {.dims = {{"T", 5}, {"K", 4}}, .placement = Placement::transposed},
                // A warp works on 32 elements; kernels hold up to 4, 10 or 20 components in registers, more
                // components are a warp's.
                {.dims = {{"T", 127}, {"K", 10}}, .gradcheck = false},
                {.dims = {{"T", 97}, {"K", 7}}, .attrs = reduced("none"), .gradcheck = false},
                {.dims = {{"T", 64}, {"K", 20}}, .attrs = reduced("sum"), .gradcheck = false},
                {.dims = {{"T", 33}, {"K", 21}}, .attrs = reduced("none"), .gradcheck = false},
                {.dims = {{"T", 31}, {"K", 13}}, .gradcheck = false},
                {.dims = {{"T", 257}, {"K", 10}}, .attrs = reduced("none"), .gradcheck = false},
                {.dims = {{"T", 128}, {"K", 31}}, .gradcheck = false},
                {.dims = {{"T", 131}, {"K", 32}}, .attrs = reduced("sum"), .gradcheck = false},
                {.dims = {{"T", 130}, {"K", 67}}, .attrs = reduced("none"), .gradcheck = false},
                // More tiles than warps are on the GPU at once.
                {.dims = {{"T", 135169}, {"K", 1}}, .gradcheck = false}},
      .benches = {{.dims = {{"T", 32000}, {"K", 10}}},
                  {.dims = {{"T", 1048576}, {"K", 10}}},
                  {.dims = {{"T", 8388608}, {"K", 10}}}},
      .sweep =
          [](Draw& draw) {
            const int64_t components = draw.chance(0.5) ? 10 : draw.size(1, 64);
            return Case{.dims = {{"T", draw.size(1, 4000000)}, {"K", components}}};
          },
  }};
}

}  // namespace tessera::ops
