#include "sparsity/greedy.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "nn/prefill_scope.h"
#include "ops/pointwise/pointwise.h"
#include "ops/reduce/reduce.h"
#include "sparsity/gated_block.h"

namespace tessera::sparsity {
namespace {

/// The stream in f32.
Tensor stream_of(const models::Residual& x) {
  return ops::add(x.sum.detach().to(DType::f32), x.branch.detach().to(DType::f32));
}

/// The errors of a block's output under gates. They are measured on the last quarter of each sample, so the
/// feed-forward network runs on those rows alone. Attention does not depend on the gates of the feed-forward
/// network, so its output is an argument, which callers compute once for all trials that share it.
class BlockErrors {
 public:
  BlockErrors(models::LanguageRef model, const BlockWalk& walk, int64_t samples)
      : model_(model), number_(walk.next()) {
    walk.visit(samples, [&](const models::Residual& x, const nn::AttentionPass& pass) {
      batches_.push_back({x, pass});
      const Tensor whole = stream_of(model.block(number_, x, pass));
      for (const auto& [begin, end] : tails(pass)) dense_.push_back(whole.slice(0, begin, end).clone());
    });
  }

  /// What attention makes of each batch under the gates as they are.
  std::vector<models::Residual> attention() const {
    check_interrupt();
    std::vector<models::Residual> streams;
    for (const Batch& batch : batches_) {
      const nn::PrefillScope texts(&batch.pass.sequences);
      streams.push_back(model_.visit([&](const auto& model) {
        return model.blocks[size_t(number_)].attend(batch.x, batch.pass, number_);
      }));
    }
    return streams;
  }
  /// The error under the gates as they are; `attended`: what attention() returns under them.
  double error(const std::vector<models::Residual>& attended) const {
    check_interrupt();
    const nn::PrefillScope every_row(nullptr);
    double squares = 0;
    size_t next = 0;
    for (size_t i = 0; i < batches_.size(); ++i)
      for (const auto& [begin, end] : tails(batches_[i].pass)) {
        const models::Residual rows{attended[i].sum.slice(0, begin, end),
                                    attended[i].branch.slice(0, begin, end)};
        const models::Residual fed =
            model_.visit([&](const auto& model) { return model.blocks[size_t(number_)].feed(rows); });
        const Tensor difference = ops::sub(stream_of(fed), dense_[next++]);
        squares += ops::sum(ops::mul(difference, difference)).item();
      }
    const double found = std::sqrt(squares);
    check(std::isfinite(found), "calibrate: the output of block ", number_, " is not finite under gates");
    return found;
  }

 private:
  struct Batch {
    models::Residual x;
    nn::AttentionPass pass;
  };
  static std::vector<std::pair<int64_t, int64_t>> tails(const nn::AttentionPass& pass) {
    std::vector<std::pair<int64_t, int64_t>> rows;
    int64_t end = 0;
    for (const int64_t length : pass.sequences.lengths) {
      end += length;
      rows.emplace_back(end - std::max<int64_t>(1, length / 4), end);
    }
    return rows;
  }
  models::LanguageRef model_;
  int64_t number_;
  std::vector<Batch> batches_;
  std::vector<Tensor> dense_;
};

}  // namespace

GreedyBlock distribute_greedily(models::LanguageRef model, const BlockWalk& walk,
                                const Calibration& calibration, const std::vector<CalibratedLayer>& layers,
                                const GateOptions& options) {
  const NoTape no_tape;
  GreedyBlock result;
  double weights = 0;
  for (const CalibratedLayer& layer : layers) {
    result.layers.push_back(layer.name);
    weights += double(layer.rows) * double(layer.columns);
  }
  const double width = std::visit([](const auto& config) { return double(config.d_model); }, model.config());
  const double unit = width * width;
  BlockErrors errors(model, walk, options.greedy_samples);
  const auto modules = modules_of_block(model, walk.next());
  GatedBlock gated(modules, calibration.column_norms, calibration.prefill);
  const auto set = [&](const std::vector<double>& shares) {
    std::vector<ops::Gate> gates;
    for (size_t i = 0; i < layers.size(); ++i) gates.push_back(calibration.gate(layers[i], shares[i]));
    gated.set(gates);
  };
  const auto is_of_feed = [&](size_t i) { return modules[i].ours.find(".mlp.") != std::string::npos; };
  const auto sparsity_of = [&](const std::vector<double>& shares) {
    double sum = 0;
    for (size_t i = 0; i < layers.size(); ++i)
      sum += shares[i] * double(layers[i].rows) * double(layers[i].columns);
    return sum / weights;
  };
  std::vector<double> shares(layers.size(), 0);
  result.steps.push_back({.sparsity = 0, .error = 0, .baseline = 0, .shares = shares});
  set(shares);
  std::vector<models::Residual> attended = errors.attention();  // under the gates of `shares`
  while (result.steps.back().sparsity < options.most - 1e-9) {
    double least = 0;
    std::vector<double> best;
    std::vector<models::Residual> best_attended;
    for (size_t i = 0; i < layers.size(); ++i) {
      if (shares[i] >= kMostShare) continue;
      std::vector<double> trial = shares;
      const double cost = double(layers[i].rows) * double(layers[i].columns) / unit;
      trial[i] = std::min(kMostShare, trial[i] + options.step / cost);
      set(trial);
      const std::vector<models::Residual> streams = is_of_feed(i) ? attended : errors.attention();
      const double found = errors.error(streams);
      if (best.empty() || found < least) least = found, best = std::move(trial), best_attended = streams;
    }
    if (best.empty()) break;
    shares = std::move(best), attended = std::move(best_attended);
    const double sparsity = sparsity_of(shares);
    set(std::vector<double>(layers.size(), sparsity));
    result.steps.push_back({sparsity, least, errors.error(errors.attention()), shares});
  }
  return result;
}

}  // namespace tessera::sparsity
