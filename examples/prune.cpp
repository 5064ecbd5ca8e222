/// Pruning a language model of one's own: SparseGPT in the pattern 2:4, with the samples that calibrate it,
/// and the masks that come out.

#include "sparsity/prune.h"

#include <cstdio>

#include "tessera.h"

using namespace tessera;

int main() {
  Rng rng(1);
  const Device device = Device::best();
  models::Gpt model({.vocabulary = 64, .positions = 32, .d_model = 32, .d_ff = 64, .heads = 2, .layers = 2},
                    rng, device);

  std::vector<int64_t> text;  // counts in steps of 3, which a model of this size learns at once
  for (int64_t i = 0; i < 2000; ++i) text.push_back(3 * i % 64);
  const std::span<const int64_t> tokens(text);
  const Tensor inputs = Tensor::from(tokens.first(512), {16, 32}, device),
               targets = Tensor::from(tokens.subspan(1, 512), {16, 32}, device);
  optim::AdamW optimizer(nn::parameters(model), {.lr = 1e-2});
  for (int step = 0; step < 60; ++step) {
    Tape tape;
    tape.backward(model.loss(inputs, targets));
    optimizer.step();
    optimizer.zero_grad();
  }

  const double before = model.loss(inputs, targets).item();
  const sparsity::Samples samples = sparsity::choose_samples(text, {.count = 16, .length = 32, .seed = 0});
  const sparsity::Pruned pruned = sparsity::prune(model, samples,
                                                  {.score = sparsity::Score::sparsegpt,
                                                   .update = sparsity::Update::obs,
                                                   .pattern = {.zeros = 2, .group = 4}});
  const double after = model.loss(inputs, targets).item();
  for (const sparsity::PrunedMatrix& matrix : pruned.matrices)
    std::printf("%-30s %3lld x %-3lld sparsity %.3f, relative error of its outputs %.4f\n",
                matrix.name.c_str(), static_cast<long long>(matrix.rows),
                static_cast<long long>(matrix.columns), matrix.sparsity(), *matrix.error);
  std::printf("loss %.4f before, %.4f after; a model that knows nothing has %.4f\n", before, after, 4.1589);
  const sparsity::Mask& mask = pruned.masks.at("transformer.h.0.mlp.c_fc");
  return mask.ones() * 2 == mask.count() && before < 0.5 && after < 2 ? 0 : 1;
}
