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
}

void Weights24Settings::check_given(const Given& given) const {
  for (const char* const flag : {"--weights-24-every", "--weights-24-decay"})
    check(on() || !given.contains(flag), flag, " needs --weights-24; add --weights-24 attn,mlp, or leave ",
          flag, " out");
}

bool Weights24Settings::takes(const std::string& name) const {
  const auto is_of = [&](const char* part) { return name.find(part) != std::string::npos; };
  return name.starts_with("blocks.") &&
         ((in_attention() && is_of(".attention.")) || (in_mlp() && is_of(".mlp.")));
}

std::string Weights24Settings::description() const {
  std::string text = fmt::format("2:4 in {}: masks every {} steps", layers, every);
  return decay > 0 ? text + fmt::format(", decay {:g}", decay) : text;
}

std::string Weights24Settings::variants(int64_t tokens, int64_t in, int64_t out, DType dtype, Device device) {
  const auto taken = [&](ops::Along24 along) {
    const ops::Sparse24 weight = ops::Sparse24::empty(out, in, along, dtype, device);
    const Tensor b = Tensor::empty({tokens, weight.k()}, dtype, device),
                 d = Tensor::empty({tokens, weight.m()}, dtype, device);
    return ops::multiply24_variant(d.transpose(0, 1), weight, b.transpose(0, 1));
  };
  return fmt::format("forward by {}, input gradient by {}", taken(ops::Along24::features),
                     taken(ops::Along24::tokens));
}

}  // namespace tessera::train
