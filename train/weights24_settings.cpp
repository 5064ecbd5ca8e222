#include "train/weights24_settings.h"

#include <fmt/format.h>

#include "ops/sparse24/sparse24.h"
#include "runtime/error.h"

namespace tessera::train {

void Weights24Settings::add_to(SettingList& list) {
  const Weights24Settings usual;
  constexpr int64_t kMost = int64_t{1} << 30;
  list.group("Training");
  list.add("weights24", layers,
           "Layers of the blocks to train with 2:4 weights, under masks that are 2:4 also when transposed")
      .named("--weights-24")
      .one_of({"none", "attn", "mlp", "attn,mlp"})
      .absent_means(usual.layers);
  list.add("weights24_every", every, "--weights-24: steps between updates of the masks")
      .named("--weights-24-every")
      .range(int64_t{1}, kMost)
      .absent_means(usual.every);
  list.add("weights24_decay", decay,
           "--weights-24: decay of pruned weights; this times the weight is added to its gradient")
      .named("--weights-24-decay")
      .range(0.0, 1e6)
      .absent_means(usual.decay);
  list.add("weights24_gradient", gradient,
           "--weights-24: gradients of the weights of all tokens (dense), or of two of every four, drawn so "
           "that they are right on average (mvue)")
      .named("--weights-24-gradient")
      .one_of({"dense", "mvue"})
      .absent_means(usual.gradient);
}

void Weights24Settings::check_given(const Given& given) const {
  check_needs(given, {"--weights-24-every", "--weights-24-decay", "--weights-24-gradient"}, on(),
              "--weights-24", "--weights-24 attn,mlp");
}

bool Weights24Settings::takes(const std::string& name) const {
  const auto is_of = [&](const char* part) { return name.find(part) != std::string::npos; };
  return name.starts_with("blocks.") &&
         ((in_attention() && is_of(".attention.")) || (in_mlp() && is_of(".mlp.")));
}

std::string Weights24Settings::description() const {
  std::string text = fmt::format("2:4 in {}: masks every {} steps", layers, every);
  if (decay > 0) text += fmt::format(", decay {:g}", decay);
  return draws() ? text + ", gradients by mvue" : text;
}

std::string Weights24Settings::variants(int64_t tokens, int64_t in, int64_t out, DType dtype,
                                        Device device) const {
  const auto matrix = [&](int64_t rows, int64_t columns) {
    return Tensor::empty({rows, columns}, dtype, device);
  };
  const auto taken = [&](ops::Along24 along) {
    const ops::Sparse24 weight = ops::Sparse24::empty(out, in, along, dtype, device);
    return ops::multiply24_variant(matrix(tokens, weight.m()).transpose(0, 1), weight,
                                   matrix(tokens, weight.k()).transpose(0, 1));
  };
  std::string text = fmt::format("forward by {}, input gradient by {}", taken(ops::Along24::features),
                                 taken(ops::Along24::tokens));
  if (!draws()) return text;
  const ops::Sparse24 dy = ops::Sparse24::empty(tokens, out, ops::Along24::tokens, dtype, device);
  const Tensor gradient = Tensor::empty({out, in}, DType::f32, device);
  return text + ", weight gradient by " + ops::multiply24_variant(gradient, dy, matrix(tokens, in));
}

}  // namespace tessera::train
