#include <cstdio>

#include "tessera.h"

using namespace tessera;

/// Re-equips a finished BERT: its feed-forward layers multiply a quarter of their rows in backward, drawn by
/// the norms of the gradient's rows and scaled so that the gradient is right on average.
int main() {
  Rng rng(1), draws(2);
  models::Bert model({.vocabulary = 99,
                      .d_model = 32,
                      .d_ff = 64,
                      .heads = 2,
                      .layers = 2,
                      .head = models::BertHead::classify},
                     rng, Device::best());
  const nn::SlicedBackward slice{.rows = ops::SelectMode::importance, .share = 0.25, .rng = draws};
  const auto layers =
      pretrained::set_form(pretrained::linear_modules(model),
                           "encoder.layer.*.intermediate.dense,encoder.layer.*.output.dense", slice);
  optim::AdamW optimizer(nn::parameters(model), {.lr = 2e-3});
  std::vector<int64_t> words, classes;  // the first word decides the class
  for (int64_t i = 0; i < 512; ++i) words.push_back(i % 16 ? 2 + i * 37 % 97 : 2 + i / 16 % 2);
  for (int64_t i = 0; i < 32; ++i) classes.push_back(i % 2);
  const models::BertBatch batch{.tokens = Tensor::from(words, {512}, Device::best()),
                                .sequences = nn::Sequences::uniform(32, 16)};
  const Tensor targets = Tensor::from(classes, {32}, Device::best());
  double loss = 0;
  for (int step = 0; step < 60; ++step) {
    Tape tape;
    const Tensor mean = model.loss(batch, targets);
    tape.backward(mean);
    optimizer.step();
    optimizer.zero_grad();
    loss = mean.item();
  }
  std::printf("%zu sliced layers; loss after 60 steps: %.4f\n", layers.size(), loss);
  return layers.size() == 4 && loss < 0.1 ? 0 : 1;  // ln 2 = 0.69 at the beginning
}
