#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "autograd/tape.h"
#include "models/language_model.h"
#include "nn/observe.h"
#include "runtime/interrupt.h"
#include "sparsity/calibration.h"
#include "sparsity/statistics.h"

/// Passing samples through a language model block by block, so that the inputs of one block only are kept,
/// and a block can be changed before the next one sees what it makes.

namespace tessera::sparsity {

/// The model must outlive the walk and stay where it is; nothing is recorded.
class BlockWalk {
 public:
  /// Embeds all samples; `batch` of them are passed through a block at a time. Memory: two tensors
  /// [samples x length, d_model] of the model's dtype.
  BlockWalk(models::LanguageRef model, const Samples& samples, int64_t batch) : model_(model) {
    check(batch >= 1, "calibration: ", batch, " samples at a time; expected 1 or more");
    const NoTape no_tape;
    const Device device = model.device();
    for (int64_t begin = 0; begin < samples.count(); begin += batch) {
      check_interrupt();
      const int64_t count = std::min(batch, samples.count() - begin);
      const auto ids =
          std::span(samples.tokens).subspan(size_t(begin * samples.length), size_t(count * samples.length));
      const Tensor tokens = Tensor::from(ids, {int64_t(ids.size())}, device);
      nn::AttentionPass pass = model.begin(tokens, nn::Sequences::uniform(count, samples.length));
      models::Residual x = model.embed(tokens, pass);
      batches_.push_back({std::move(pass), std::move(x)});
    }
  }

  int64_t blocks() const { return model_.blocks(); }
  /// The block whose inputs are at hand; blocks() after the last.
  int64_t next() const { return next_; }

  /// How many batches the samples make.
  int64_t batches() const { return int64_t(batches_.size()); }
  /// Runs the next block on a batch and forgets what it makes: for observers.
  void run(int64_t batch) const {
    const NoTape no_tape;
    check_interrupt();
    const Batch& one = batches_[size_t(batch)];
    model_.block(next_, one.x, one.pass);
  }
  /// The same on all samples.
  void run() const {
    for (int64_t batch = 0; batch < batches(); ++batch) run(batch);
  }
  /// Passes the inputs of the next block to `take`, batch by batch, for at least the first `samples` samples.
  void visit(int64_t samples,
             const std::function<void(const models::Residual&, const nn::AttentionPass&)>& take) const {
    for (const Batch& batch : batches_) {
      if (samples <= 0) break;
      take(batch.x, batch.pass);
      samples -= batch.pass.sequences.count();
    }
  }
  /// Runs the next block as it is now; what it makes are the inputs of the one after it.
  void advance() {
    const NoTape no_tape;
    for (Batch& batch : batches_) {
      check_interrupt();
      batch.x = model_.block(next_, batch.x, batch.pass);
    }
    ++next_;
  }
  /// While it lives, `forward` sees the calls of the linear layers in the next block.
  nn::Observe observe(const std::function<void(const nn::LinearCall&)>& forward) const {
    return model_.visit([&](const auto& model) {
      return nn::Observe(model.blocks[size_t(next_)], {.forward = forward},
                         "blocks." + std::to_string(next_));
    });
  }
  /// The statistics of the inputs of those linear layers of the next block that `wanted` accepts, by our
  /// names of the layers ("blocks.3.attention.qkv").
  std::map<std::string, InputStatistics> collect(
      InputStatistics::Sums sums, const std::function<bool(const std::string&)>& wanted) const {
    std::map<std::string, InputStatistics> statistics;
    const nn::Observe scope = observe([&](const nn::LinearCall& call) {
      if (wanted(call.name)) statistics.try_emplace(call.name, sums).first->second.add(call.input);
    });
    run();
    return statistics;
  }

 private:
  struct Batch {
    nn::AttentionPass pass;
    models::Residual x;
  };
  models::LanguageRef model_;
  std::vector<Batch> batches_;
  int64_t next_ = 0;
};

}  // namespace tessera::sparsity
