#include "ops/mlp/hidden_gradient24.h"

#include "ops/linear/linear_activation_kernels.h"
#include "ops/mlp/hidden_gradient24_kernels.h"
#include "ops/sparse24/sparse24_kernels.h"
#include "runtime/call_site.h"
#include "runtime/has_cuda.h"

namespace tessera::ops {
namespace {

/// The elements of da at the places of `pattern`, times the slopes there.
Sparse24 gather_slopes(const Tensor& da, const Sparse24& pattern, Activation kind) {
  Sparse24 made = compress24_like(da, pattern);
  activation_gradient_of_result(made.values, made.values, pattern.values, kind);
  return made;
}

HiddenGradient24 run_separate(const HiddenGradient24Call& call) {
  const auto& [da, kept, kind] = call;
  HiddenGradient24 made;
  made.act_by_tokens = compress24(decompress24(kept), Along24::tokens);
  made.dh = gather_slopes(da, kept, kind);
  made.dh_by_tokens = gather_slopes(da, made.act_by_tokens, kind);
  return made;
}

Reason fused_lacks(const HiddenGradient24Call& call, const Gpu&) {
  return size_of(call.da.dtype()) == 2 ? "" : "bf16 or f16";
}

HiddenGradient24 run_fused(const HiddenGradient24Call& call) {
  const auto& [da, kept, kind] = call;
  const auto empty = [&](Along24 along) {
    return Sparse24::empty(kept.tokens, kept.features, along, kept.dtype(), kept.device());
  };
  HiddenGradient24 made{kept, empty(Along24::tokens), {}};
  made.dh.values = Tensor::empty_like(kept.values);
  made.dh_by_tokens = made.act_by_tokens;
  made.dh_by_tokens.values = Tensor::empty_like(made.act_by_tokens.values);
  if (da.count() == 0) return made;
  if constexpr (kCuda) hidden_gradient24_cuda(made, call);
  return made;
}

using Run = HiddenGradient24(const HiddenGradient24Call&);
constexpr Variant<HiddenGradient24Call, Run> kVariants[] = {
    {"fused", fused_lacks, is_preferred<HiddenGradient24Call>, run_fused},
    {"separate", lacks_nothing<HiddenGradient24Call>, is_otherwise<HiddenGradient24Call>, run_separate}};

}  // namespace

std::string describe_problem(const HiddenGradient24Call& call) {
  return text_of("2:4 gradients of ", name_of(call.kind), " of ", describe(call.da));
}

std::vector<std::string> hidden_gradient24_variants() {
  return names_of(kVariants);
}

HiddenGradient24 hidden_gradient24(const Tensor& da, const Sparse24& kept, Activation kind, Site site) {
  const CallScope call(site);
  validate(kept, "hidden_gradient24");
  check(kept.along == Along24::features, "hidden_gradient24: the activations lie along ", name_of(kept.along),
        "; expected features");
  check(da.defined() && da.shape() == Shape{kept.tokens, kept.features} && da.dtype() == kept.dtype() &&
            da.device() == kept.device(),
        "hidden_gradient24: da is ", describe(da), "; expected ", kept.dtype(), " [", kept.tokens, ", ",
        kept.features, "] on ", kept.device().name(), ", as the activations");
  check(kind == Activation::relu || kind == Activation::relu_squared, "hidden_gradient24: the activation is ",
        name_of(kind), "; expected relu or relu_squared");
  const HiddenGradient24Call problem{da.detach(), kept, kind};
  if (da.device().is_cpu()) return run_separate(problem);
  return choose("hidden_gradient24", kVariants, problem, Gpu(da.device())).launch(problem);
}

}  // namespace tessera::ops
