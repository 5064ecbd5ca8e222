#include "nn/mlp.h"

#include "nn/compressed_internal.h"
#include "nn/drop_bp.h"
#include "nn/hidden_l1.h"
#include "nn/observe.h"
#include "nn/slice_scope.h"
#include "nn/sparse24.h"
#include "ops/grouped_mlp/grouped_mlp.h"
#include "ops/linear/linear.h"
#include "ops/linear/linear_swiglu.h"
#include "ops/mlp/mlp.h"
#include "ops/pointwise/pointwise.h"
#include "ops/shape/shape.h"
#include "ops/swiglu/swiglu.h"

namespace tessera::nn {

namespace {

/// The slice that both layers carry, or null.
const SlicedBackward* common_slice(const Linear& up, const Linear& down) {
  const auto* const one = std::get_if<SlicedBackward>(&up.form);
  const auto* const other = std::get_if<SlicedBackward>(&down.form);
  return one && other && *one == *other ? one : nullptr;
}

/// Gate and up of a compressed layer of two equal parts, if one operator can take both; or null.
const ops::SparsePart* gate_and_up(const Linear& up, const Tensor& x) {
  const auto* const form = std::get_if<Compressed>(&up.form);
  const bool fits = form && form->parts.size() == 2 && 2 * form->parts[0].weight.out == up.out;
  return fits && !up.bias.defined() && !Observe::sees(&up) && !spares_rows(*form, x) ? form->parts.data()
                                                                                     : nullptr;
}

}  // namespace

Mlp::Mlp(int64_t in, int64_t hidden, const Rng& rng, Device device, MlpOptions options)
    : up(in, (options.gated ? 2 : 1) * hidden, rng, device,
         {.bias = options.bias, .dtype = options.dtype, .init = options.init}),
      down(hidden, options.out ? options.out : in, rng, device,
           {.bias = options.bias, .dtype = options.dtype, .init = options.init}),
      activation(options.activation),
      gated(options.gated) {}

Tensor Mlp::sparse24(const Tensor& x, const Tensor& residual, const Sparse24& form) const {
  note_form(up.form), note_form(down.form);
  const auto network = [&](const Tensor& in, const Tensor& first, const Tensor& second, const auto&... rest) {
    const ops::MlpSparse24Result result =
        run_sparse24(form, HiddenL1::wanted(), in, first, second, up.bias, rest...);
    if (result.l1.defined()) HiddenL1::add(result.l1);
    return result.y;
  };
  const auto* const factored = std::get_if<LowRank>(&up.form);
  if (!factored) {
    if (!Tape::recording(x, up.weight, down.weight, up.bias, down.bias, residual))
      return ops::mlp(x, up.weight, down.weight, activation, up.bias, down.bias, residual);
    return network(x, up.weight, down.weight, down.bias, residual);
  }
  // The inner factors are the weights of a network from rank to rank, the outer ones GEMMs around it.
  const Factors &one = factored->factors, &other = std::get<LowRank>(down.form).factors;
  if (!Tape::recording(x, one.a, one.b, other.a, other.b, up.bias, down.bias, residual))
    return down(hidden(x), residual);
  return ops::linear(network(ops::linear(x, one.a), one.b, other.a), other.b, down.bias, residual);
}

Tensor Mlp::with_l1(const Tensor& x, const Tensor& residual) const {
  check(!gated,
        "mlp: the L1 penalty is on activations that are not negative; a gated network's have any sign");
  check(!run_separately(up, down), "mlp: the L1 penalty needs dense layers that are not observed; up is ",
        name_of(up.form), " and down ", name_of(down.form));
  ops::MlpSparse24 how = dense_call(activation);
  how.l1 = true;
  const ops::MlpSparse24Result result =
      ops::mlp_sparse24(x, up.weight, down.weight, how, up.bias, down.bias, residual);
  HiddenL1::add(result.l1);
  return result.y;
}

Tensor Mlp::operator()(const Tensor& x, const Tensor& residual, Site site) const {
  if (DropBP::drops(this)) return DropBP::off_tape(residual, [&] { return (*this)(x, residual, site); });
  const LayerCall call(*this, site);
  if (const auto* const form = sparse24_of(*this); form && !Observe::sees(&up) && !Observe::sees(&down))
    return sparse24(x, residual, *form);
  if (HiddenL1::wanted()) return with_l1(x, residual);
  if (!gated && !run_separately(up, down))
    return ops::mlp(x, up.weight, down.weight, activation, up.bias, down.bias, residual);
  const SlicedBackward* const slice = common_slice(up, down);
  if (!slice) return down(hidden(x), residual);
  if (!gated && !Observe::sees(&up) && !Observe::sees(&down))
    return ops::mlp(x, up.weight, down.weight, activation, up.bias, down.bias, residual,
                    SliceScope::completed(*slice));
  const SliceScope together = SliceScope::of_shared_rows();
  return down(hidden(x), residual);
}

Tensor Mlp::hidden(const Tensor& x) const {
  const bool is_swiglu = gated && activation == ops::Activation::silu;
  if (is_swiglu && !up.bias.defined() && !run_separately(up)) return ops::linear_swiglu(x, up.weight);
  if (const auto* const slice = std::get_if<SlicedBackward>(&up.form);
      slice && is_swiglu && !up.bias.defined() && !Observe::sees(&up))
    return ops::linear_swiglu(x, up.weight, SliceScope::completed(*slice));
  if (const ops::SparsePart* const parts = is_swiglu ? gate_and_up(up, x) : nullptr) {
    const LayerCall call(up, Site::here());
    note_form(up.form);
    return ops::sparse_linear_swiglu(x, parts[0], parts[1]);
  }
  const Tensor rows = up(x);
  if (is_swiglu) return ops::swiglu(rows);
  if (!gated) return ops::activation(rows, activation);
  const int last = rows.rank() - 1;
  const int64_t width = rows.size(last) / 2;
  const Tensor gate = ops::activation(ops::slice(rows, last, 0, width), activation);
  return ops::mul(gate, ops::slice(rows, last, width, 2 * width));
}

GroupedMlp::GroupedMlp(int64_t groups, int64_t in, int64_t hidden, int64_t out, const Rng& rng, Device device,
                       GroupedMlpOptions options)
    : up(groups, in, hidden, rng, device,
         {.bias = options.bias, .dtype = options.dtype, .init = options.init}),
      down(groups, hidden, out, rng, device,
           {.shared = false, .bias = options.bias, .dtype = options.dtype, .init = options.init}),
      activation(options.activation) {}

Tensor GroupedMlp::operator()(const Tensor& x, Site site) const {
  const LayerCall call(*this, site);
  if (!up.bias.defined() && !down.bias.defined() && !run_separately(up, down))
    return ops::grouped_mlp(x, up.weight, down.weight, activation);
  return down(ops::activation(up(x), activation));
}

}  // namespace tessera::nn
