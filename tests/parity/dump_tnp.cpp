#include <cstdio>
#include <cstring>
#include <string>

#include "io/safetensors.h"
#include "models/tnp.h"
#include "ops/random/random.h"
#include "optim/adamw.h"

using namespace tessera;

/// Trains a small TNP for 20 steps and writes what it saw and did, for another framework to repeat:
///   dump_tnp OUT.safetensors pre|post
///     batch.<step>.{xc,yc,xt,yt}   initial.<parameter>   gradient.<parameter> of step 0   loss [20]
///     final.<parameter>
/// The same run with activation checkpointing of every block, and of pairs of blocks, must give the same
/// bits.

namespace {

constexpr int kSteps = 20;

struct Record {
  std::vector<std::pair<std::string, Tensor>> tensors;
  void keep(const std::string& name, const Tensor& tensor) { tensors.emplace_back(name, tensor.clone()); }
};

Record train(bool pre_norm, int64_t checkpoint_every) {
  const Device cpu = Device::cpu();
  // Not every seed will do: Adam makes a step of an element whose gradient is lost in rounding, and from the
  // weights of some seeds PyTorch itself leaves the limits in f32.
  Rng rng(13), data(12);
  const models::TnpConfig config{.features = 3,
                                 .d_model = 24,
                                 .d_ff = 37,
                                 .heads = 3,
                                 .layers = 3,
                                 .components = 4,
                                 .embed_hidden = 19,
                                 .pre_norm = pre_norm,
                                 .checkpoint_every = checkpoint_every};
  const models::Tnp model(config, rng, cpu);
  const auto parameters = nn::parameters(model);
  optim::AdamW optimizer(parameters, {.lr = 1e-3, .weight_decay = 0.1});
  Record record;
  for (const auto& [name, tensor] : parameters) record.keep("initial." + name, tensor.detach());
  std::vector<double> losses;
  for (int step = 0; step < kSteps; ++step) {
    const auto draw = [&](const char* name, const Shape& shape) {
      const Tensor tensor = Tensor::empty(shape, DType::f32, cpu);
      ops::fill_normal(tensor, 0, 1, data);
      record.keep("batch." + std::to_string(step) + "." + name, tensor);
      return tensor;
    };
    const models::TnpBatch batch{.xc = draw("xc", {5, 13, 3}),
                                 .yc = draw("yc", {5, 13, 1}),
                                 .xt = draw("xt", {5, 7, 3}),
                                 .yt = draw("yt", {5, 7, 1})};
    optimizer.zero_grad();
    Tape tape;
    const Tensor loss = model.loss(batch);
    losses.push_back(loss.item());
    tape.backward(loss);
    if (step == 0)
      for (const auto& [name, tensor] : parameters) record.keep("gradient." + name, grad(tensor));
    optimizer.step();
  }
  record.keep("loss", Tensor::from(losses, {kSteps}));
  for (const auto& [name, tensor] : parameters) record.keep("final." + name, tensor.detach());
  return record;
}

/// The name of the first tensor that differs in a bit, or "".
std::string first_difference(const Record& a, const Record& b) {
  if (a.tensors.size() != b.tensors.size()) return "the number of tensors";
  for (size_t i = 0; i < a.tensors.size(); ++i) {
    const Tensor x = a.tensors[i].second.packed(), y = b.tensors[i].second.packed();
    if (x.bytes() != y.bytes() || std::memcmp(x.raw(), y.raw(), x.bytes()) != 0) return a.tensors[i].first;
  }
  return "";
}

}  // namespace

int main(int count, char** arguments) try {
  if (count != 3 || (std::strcmp(arguments[2], "pre") != 0 && std::strcmp(arguments[2], "post") != 0)) {
    std::fprintf(stderr, "usage: dump_tnp OUT.safetensors pre|post\n");
    return 2;
  }
  const bool pre_norm = std::strcmp(arguments[2], "pre") == 0;
  const Record plain = train(pre_norm, 0);
  for (const int64_t every : {1, 2}) {
    const std::string differs = first_difference(plain, train(pre_norm, every));
    if (differs.empty()) continue;
    std::fprintf(stderr, "checkpointing every %d blocks changes the bits of %s\n", int(every),
                 differs.c_str());
    return 1;
  }
  io::save_safetensors(arguments[1], plain.tensors);
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
