#include "optim/clip.h"

#include "ops/pointwise/pointwise.h"
#include "optim/kernels.h"

namespace tessera::optim {

Tensor clip_grad_norm(const std::vector<nn::NamedParameter>& parameters, double max_grad_norm) {
  check(max_grad_norm > 0, "clip_grad_norm: max_grad_norm = ", max_grad_norm, " must be positive");
  check(!parameters.empty(), "clip_grad_norm: there is no parameter");
  std::vector<nn::NamedParameter> gradients;
  for (const auto& [name, tensor] : parameters) {
    check(requires_grad(tensor), "clip_grad_norm: ", name, " ", describe(tensor), " requires no gradient");
    if (const Tensor gradient = grad(tensor); gradient.defined()) gradients.push_back({name, gradient});
  }
  const Device device = parameters[0].tensor.device();
  const Tensor status = Tensor::zeros({kStatusSlots}, DType::f64, device);
  if (gradients.empty()) return status.at({kNorm});
  const NoTape off;
  Packing packing("clip_grad_norm", gradients);
  packing.upload();
  const Tensor arena = packing.make_arena();
  for (size_t i = 0; i < gradients.size(); ++i) packing.view(arena, i).copy_from(gradients[i].tensor);
  const auto blocks = int64_t(packing.norm_blocks().size());
  const Tensor counts = Tensor::zeros({kCountSlots}, DType::i64, device),
               partials = Tensor::empty({blocks}, DType::f64, device);
  StepArgs args;
  args.gradients = arena.raw();
  args.norm_blocks = packing.norm_block_table();
  args.norm_block_count = args.norm_slots = blocks;
  args.status = status.data<double>();
  args.counts = counts.data<int64_t>();
  PrepareOptions options;
  options.max_grad_norm = max_grad_norm;
  measure(device, packing.compute_dtype(), args, partials.data<double>(), options);
  const Tensor factor = status.at({kClip}).to(packing.compute_dtype());
  for (size_t i = 0; i < gradients.size(); ++i)
    gradients[i].tensor.copy_from(ops::mul(packing.view(arena, i), factor));
  return status.at({kNorm});
}

}  // namespace tessera::optim
