#include <algorithm>
#include <chrono>
#include <map>

#include "nn/module.h"
#include "ops/matmul/matmul.h"
#include "plan/plan.h"
#include "runtime/integers.h"
#include "sparsity/gate_aware.h"
#include "sparsity/prune.h"
#include "sparsity/targets.h"
#include "sparsity/walk.h"

namespace tessera::sparsity {
namespace {

/// Seconds of the second of two calls: the first one fills caches.
template <class F>
double timed(Device device, F&& f) {
  f();
  device.synchronize();
  const auto begin = std::chrono::steady_clock::now();
  f();
  device.synchronize();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

/// GEMMs [rows, in] x [in, in] that an update of a matrix is worth: SparseGPT's sweep is half a GEMM, the
/// error of the outputs two, ADMM one per iteration and one before; with gates the correction is three, and
/// errors are found three times from five sums.
double update_gemms(const PruneOptions& options) {
  if (!options.needs_products()) return 0;
  return (options.gates ? 3 + 15 : 2) + (options.update == Update::obs ? 0.5 : 0) +
         (options.update == Update::admm ? double(options.iterations) + 1 : 0);
}

/// What one block takes: forward passes over the samples, and X^T X.
struct BlockWork {
  double statistics_bytes = 0, gemm_flops = 0;
  int64_t layers = 0, widest = 0;
};

BlockWork work_of(const std::vector<const Target*>& own, const PruneOptions& options, Device device,
                  double tokens) {
  // Gates: each module has its own, and sums of its own.
  const bool products = options.needs_products();
  const double sums = options.gates ? 3 : 1;
  std::map<std::string, int64_t> inputs;
  for (const Target* target : own)
    inputs[options.gates ? target->module.name : target->module.ours] = target->module.layer->in;
  BlockWork work{.layers = int64_t(inputs.size())};
  for (const auto& [layer, in] : inputs) {
    const double bytes = device.is_cpu() ? 8 : 4;
    work.statistics_bytes += bytes * double(in) * (products ? 1 + sums * double(in) : 1);
    if (products) work.gemm_flops += sums * 2 * tokens * double(in) * double(in);
    work.widest = std::max(work.widest, in);
  }
  return work;
}

class Planner {
 public:
  Planner(models::LanguageRef model, const Samples& samples, const PruneOptions& options)
      : model_(model),
        samples_(samples),
        options_(options),
        targets_(targets_of(model, options)),
        device_(model.device()),
        tokens_(double(samples.count()) * double(samples.length)) {
    if (options.gates) check_gates_fit(model, *options.gates);
  }

  PrunePlan plan() {
    for (const nn::NamedParameter& parameter : parameters_of(model_))
      plan_.model_bytes += double(parameter.tensor.bytes());
    std::map<int64_t, std::vector<const Target*>> blocks;
    double update_flops = 0, matrix_bytes = 0;
    for (const Target& target : targets_) {
      blocks[target.block].push_back(&target);
      const double rows = double(target.module.rows), in = double(target.module.layer->in);
      plan_.matrices += 1, plan_.weights += int64_t(rows * in);
      update_flops += 2 * rows * in * in * update_gemms(options_);
      // The matrix in f32, and its scores while they are made; a Hessian's factor in f64 and f32 next to
      // them.
      const double factor = options_.needs_products() ? 12 * in * in : 0;
      matrix_bytes = std::max(matrix_bytes, 5 * 4 * rows * in + factor);
    }
    if (!options_.needs_samples()) {
      plan_.transient_bytes = matrix_bytes;
      return plan_;
    }
    const double size = double(size_of(model_.dtype()));
    const models::LanguageConfig config = model_.config();
    const double width = std::visit([](const auto& one) { return double(one.d_model); }, config);
    const double streams = options_.gates ? 2 : 1;  // gates: one of them dense
    plan_.sample_bytes = streams * 2 * tokens_ * width * size;
    double gemm_flops = 0;
    int64_t widest = 0, passes = targets_.back().block;  // to get from block to block
    for (const auto& [block, own] : blocks) {
      const BlockWork work = work_of(own, options_, device_, tokens_);
      plan_.statistics_bytes = std::max(plan_.statistics_bytes, work.statistics_bytes);
      gemm_flops += work.gemm_flops;
      widest = std::max(widest, work.widest);
      passes += options_.sequential ? work.layers : 1;
    }
    if (options_.allocation == Allocation::owl) passes += targets_.back().block + 1;
    // Within a block: its widest activations, their gated halves and the residual; statistics read them as
    // f32 (f64).
    const double batch_tokens = double(std::min(options_.batch, samples_.count())) * double(samples_.length);
    const double activations =
        batch_tokens * (4 * double(widest) * size + 2 * double(widest) * (device_.is_cpu() ? 8 : 4));
    plan_.transient_bytes = std::max(activations, matrix_bytes);
    if (options_.gates)  // they are applied to copies of a block's weights
      for (const pretrained::LinearModule& module : modules_of_block(model_, targets_.front().block))
        plan_.transient_bytes += size * double(module.rows) * double(module.layer->in);
    const plan::Flops forward = plan::count_flops(config, samples_.count(), samples_.length);
    const double pass_flops = (forward.gemms + forward.attention) / double(model_.blocks());
    plan_.flops = streams * pass_flops * double(passes) + gemm_flops + update_flops;
    plan_.seconds = estimate(double(passes), double(blocks.size()), update_flops);
    return plan_;
  }

 private:
  double estimate(double passes, double blocks, double update_flops) const {
    const NoTape no_tape;
    Samples first = samples_;
    const int64_t count = std::min(options_.batch, samples_.count());
    first.begins.resize(size_t(count));
    first.tokens.resize(size_t(count * first.length));
    const BlockWalk walk(model_, first, options_.batch);
    const double batches = double(ceil_div(samples_.count(), count));
    const auto sums =
        options_.needs_products() ? InputStatistics::Sums::products : InputStatistics::Sums::squares;
    const auto all = [](const std::string&) { return true; };
    double plain = timed(device_, [&] { walk.run(); }), observed = 0;
    if (options_.gates) {
      plain *= 2;
      GatedWalk gated(model_, first, options_.batch, *options_.gates);
      observed = timed(device_, [&] { gated.collect(all); }) + plain;  // and on to the next block
    } else {
      observed = timed(device_, [&] { walk.collect(sums, all); });
    }
    double seconds = batches * (plain * (passes - blocks) + observed * blocks);
    if (update_flops > 0) {
      const int64_t in = targets_.front().module.layer->in, rows = targets_.front().module.rows;
      const Tensor weight = weight_of(targets_.front().module).to(DType::f32);
      const Tensor square = Tensor::zeros({in, in}, DType::f32, device_);
      const double gemm = timed(device_, [&] { ops::matmul(weight, square); });
      seconds += gemm * update_flops / (2 * double(rows) * double(in) * double(in));
    }
    return seconds;
  }

  models::LanguageRef model_;
  const Samples& samples_;
  const PruneOptions& options_;
  std::vector<Target> targets_;
  Device device_;
  double tokens_;
  PrunePlan plan_;
};

}  // namespace

PrunePlan plan_pruning(models::LanguageRef model, const Samples& samples, const PruneOptions& options) {
  return Planner(model, samples, options).plan();
}

}  // namespace tessera::sparsity
