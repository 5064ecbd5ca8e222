#pragma once

#include <map>
#include <string>

#include "nn/prefill_scope.h"
#include "sparsity/gated_block.h"
#include "sparsity/update.h"
#include "sparsity/walk.h"

/// Gate-aware pruning (DuoGPT, arXiv:2506.20194): the layer's squared error compares its outputs on gated
/// inputs with those of the dense model. With x the layer's inputs in the dense model, and x~ those that it
/// gets after pruned and gated layers and after its own gate, pruning minimises ||V x~ - W x||^2. The paper
/// passes the residual W (x - x~) on column by column; here the best dense V for x~ is found first, in closed
/// form, and the sweep over columns starts from it: its error grows by that of the same Hessian, x~ x~^T.

namespace tessera::sparsity {

/// Sums over the rows x [tokens, in] of the dense model and x~ of the gated one, d = x - x~, for one linear
/// module: q, k and v read the same inputs, but after different gates.
class GatedStatistics {
 public:
  /// Both [tokens, in], of the same tokens in the same order.
  void add(const Tensor& gated, const Tensor& dense);

  const InputStatistics& inputs() const { return inputs_; }  // of x~, with X~^T X~
  /// d^T x~ and d^T d: [in, in], f64 on the CPU, f32 on a GPU.
  const Tensor& cross() const { return cross_; }
  const Tensor& lost() const { return lost_; }

 private:
  InputStatistics inputs_{InputStatistics::Sums::products};
  Tensor cross_, lost_;
};

/// The V [rows, in] that minimises ||V x~ - W x||^2 + damping ||V - W||^2, the damping and the 1 of dead
/// inputs as in the factor: W + W d^T x~ (X~^T X~ + damping)^-1. f32 -> f32; computed in the factor's dtype.
Tensor correct_for_gates(const Tensor& weight, const GatedStatistics& statistics,
                         const HessianFactor& factor);

/// ||V x~ - W x||^2 / ||W x||^2 over the samples; 0 if W x is 0.
double gated_output_error(const Tensor& dense, const Tensor& pruned, const GatedStatistics& statistics);

/// Two passes of the samples through a model, block by block: one of the dense blocks, and one of the blocks
/// as they are when it leaves them, under their gates.
class GatedWalk {
 public:
  /// `gates` must outlive the walk.
  GatedWalk(models::LanguageRef model, const Samples& samples, int64_t batch, const PruneGates& gates)
      : model_(model), gates_(gates), dense_(model, samples, batch), gated_(model, samples, batch) {}

  /// Collects the statistics of the next block's modules that `wanted` accepts, by their names in
  /// transformers. The block must be dense.
  std::map<std::string, GatedStatistics> collect(const std::function<bool(const std::string&)>& wanted);
  /// Takes the dense pass through the next block, which must still be dense.
  void advance_dense() { dense_.advance(); }
  /// Takes the gated pass through the next block, as it is now.
  void advance() {
    const auto modules = modules_of_block(model_, gated_.next());
    GatedBlock block(modules, gates_.gates.column_norms, gates_.prefill);
    block.set(gates_of(gates_, modules));
    gated_.advance();
  }

 private:
  models::LanguageRef model_;
  const PruneGates& gates_;
  BlockWalk dense_, gated_;
};

inline std::map<std::string, GatedStatistics> GatedWalk::collect(
    const std::function<bool(const std::string&)>& wanted) {
  const auto modules = modules_of_block(model_, gated_.next());
  GatedBlock block(modules, gates_.gates.column_norms, gates_.prefill);
  block.set(gates_of(gates_, modules));
  std::map<std::string, Tensor> dense;  // inputs of a batch, by our names of the layers
  std::map<std::string, GatedStatistics> statistics;
  const auto observed = [](auto&& forward, const BlockWalk& walk, int64_t batch) {
    const nn::Observe scope = walk.observe(forward);
    walk.run(batch);
  };
  for (int64_t batch = 0; batch < gated_.batches(); ++batch) {
    block.pause();
    observed([&](const nn::LinearCall& call) { dense[call.name] = call.input.detach().clone(); }, dense_,
             batch);
    block.resume();
    observed(
        [&](const nn::LinearCall& call) {
          for (size_t i = 0; i < modules.size(); ++i)
            if (modules[i].ours == call.name && wanted(modules[i].name))
              statistics[modules[i].name].add(
                  nn::gated_inputs(call.input.detach(), block.gate(i), gates_.prefill), dense.at(call.name));
        },
        gated_, batch);
  }
  return statistics;
}

}  // namespace tessera::sparsity
