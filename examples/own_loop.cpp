/// A training loop of your own with data of your own: batches made in the background, weights in bf16 or f16,
/// the whole state in one file, and going on from it to the same bits.

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <numbers>

#include "tessera.h"

using namespace tessera;

/// Points on two spirals, and which one each lies on. A source says how many items it has and makes the batch
/// of some of them; several threads call it at once.
struct Spirals {
  struct Batch {
    Tensor points, labels;
    void fields(auto&& visit) { visit("points", points), visit("labels", labels); }
  };
  int64_t size() const { return 1000; }
  Batch batch(std::span<const int64_t> items) const {
    const auto count = int64_t(items.size());
    // Packed: rows of Tensor::empty may be padded, and elements() refuses those.
    const Batch made{Tensor::empty_packed({count, 2}, DType::f32, Device::cpu()),
                     Tensor::empty_packed({count}, DType::i64, Device::cpu())};
    const std::span<float> points = made.points.elements<float>();
    const std::span<int64_t> labels = made.labels.elements<int64_t>();
    for (size_t i = 0; i < items.size(); ++i) {
      labels[i] = items[i] % 2;
      const double radius = double(items[i] + 1) / double(size());
      const double angle = std::numbers::pi * (3 * radius + double(labels[i]));
      points[2 * i] = float(radius * std::cos(angle)), points[2 * i + 1] = float(radius * std::sin(angle));
    }
    return made;
  }
};

/// Everything that training changes, and what it reads. The loader refers to the source: such a struct stays
/// where it is.
struct Run {
  explicit Run(DType dtype)
      : model{nn::Linear(2, 64, rng, device, {.dtype = dtype}),
              nn::Gelu{},
              nn::Linear(64, 64, rng, device, {.dtype = dtype}),
              nn::Gelu{},
              nn::Dropout(0.05, rng),
              nn::Linear(64, 2, rng, device, {.dtype = dtype})},
        optimizer(nn::parameters(model), {.lr = 1e-2, .loss_scale = scale_for(dtype)}),
        dtype(dtype) {}
  Run(const Run&) = delete;
  /// f16 needs a loss scale, so that small gradients do not underflow to 0; bf16 has the range of f32.
  static std::optional<optim::LossScale> scale_for(DType dtype) {
    return dtype == DType::f16 ? std::optional(optim::LossScale{}) : std::nullopt;
  }
  /// What a later process needs to go on.
  void fields(auto&& visit) {
    visit("model", model), visit("optimizer", optimizer);  // the optimizer has f32 masters and moments
    visit("rng", rng), visit("loader", loader), visit("step", step);
  }

  double train(int64_t last) {
    double mean = 0;
    for (; step < last; ++step) {
      const Spirals::Batch batch = loader.next();  // all epochs, each in an order of its own
      Tape tape({.loss_scale = optimizer.loss_scale()});
      const Tensor logits = model(batch.points.to(device).to(dtype));
      const Tensor loss = ops::cross_entropy(logits, batch.labels.to(device));
      tape.backward(loss);
      optimizer.step();
      optimizer.zero_grad();
      mean = 0.9 * mean + 0.1 * loss.item();
    }
    return mean;
  }

  Device device = Device::best();
  Rng rng{1};  // initial weights, the order of the data, dropout
  Spirals source;
  nn::Sequential<nn::Linear, nn::Gelu, nn::Linear, nn::Gelu, nn::Dropout, nn::Linear> model;
  optim::AdamW optimizer;
  datasets::Loader<Spirals> loader{source, {.size = 50, .shuffle = &rng, .workers = 2}};
  int64_t step = 0;
  DType dtype;
};

int main() {
  const std::string path = std::filesystem::temp_directory_path() / "tessera-own-loop.safetensors";
  bool fine = true;
  for (const DType dtype : {DType::bf16, DType::f16}) {
    Run straight(dtype);
    const double loss = straight.train(600);

    Run first(dtype);
    first.train(250);
    io::save(path, first);
    Run second(dtype);  // as in another process
    io::load(path, second);
    second.train(600);

    bool same = true;
    const auto ours = nn::parameters(straight.model), theirs = nn::parameters(second.model);
    for (size_t i = 0; i < ours.size(); ++i)
      same &= ours[i].tensor.detach().to_vector<float>() == theirs[i].tensor.detach().to_vector<float>();

    // The model alone: the rest of the file is left.
    io::Checkpoint::read(path).part("model").restore(second.model);

    std::printf("%s: cross entropy %.4f; saved and continued: %s\n", dtype == DType::bf16 ? "bf16" : "f16",
                loss, same ? "the same bits" : "differs");
    fine &= same && loss < 0.2;  // guessing would give 0.69
  }
  std::filesystem::remove(path);
  return fine ? 0 : 1;
}
