#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "pretrained/check_gates.h"
#include "pretrained/fingerprint.h"
#include "sparsity/modules.h"
#include "sparsity/prune_options.h"

/// Gates on a dense model for a while: for calibration, which changes them many times, and for pruning.

namespace tessera::sparsity {

/// While it lives, the linear layers of a block multiply with columns of their dense weights
/// (nn::Compressed), so that they can have gates; then they are dense again, with the weights as they were.
/// The columns are copies: weights are not to be changed meanwhile.
class GatedBlock {
 public:
  /// `modules`: those of the block, in the model's order, dense. There are no gates yet. With `column_norms`
  /// gates compare |x_j| times the norm of column j; `prefill`: nn::Compressed::prefill.
  GatedBlock(const std::vector<pretrained::LinearModule>& modules, bool column_norms, double prefill);
  ~GatedBlock();
  GatedBlock(const GatedBlock&) = delete;

  /// One gate per module, without scales.
  void set(const std::vector<ops::Gate>& gates);
  /// That of module i, with its scales.
  const ops::Gate& gate(size_t i) const;
  /// Makes the layers dense until the next set() or resume().
  void pause();
  void resume();

 private:
  struct Changed {
    nn::Linear* layer;
    Tensor weight;
    nn::Form dense;
    nn::Compressed gated;
  };
  std::vector<Changed> changed_;
  std::vector<std::pair<size_t, size_t>> parts_;  // of each module: which of changed_, which part of it
  std::vector<Tensor> scales_;                    // of each module, or none
};

/// The gates of a block's modules, in their order. Throws, naming the layer, if one does not fit.
std::vector<ops::Gate> gates_of(const PruneGates& gates,
                                const std::vector<pretrained::LinearModule>& modules);

/// Throws, naming what does not fit, unless the gates are of this model, one for each module of its blocks,
/// and no other.
inline void check_gates_fit(models::LanguageRef model, const PruneGates& gates) {
  const std::vector<pretrained::LinearModule> modules = block_modules(model);
  const bool knows = !gates.gates.fingerprint.empty();
  pretrained::check_gates(gates.gates, modules, knows ? pretrained::fingerprint_of(model) : "");
  gates_of(gates, modules);
}

/// Gates on all blocks of a dense model, while what is returned lives.
inline std::vector<std::unique_ptr<GatedBlock>> gate_blocks(models::LanguageRef model,
                                                            const PruneGates& gates) {
  std::vector<std::unique_ptr<GatedBlock>> blocks;
  for (int64_t i = 0; i < model.blocks(); ++i) {
    const auto modules = modules_of_block(model, i);
    blocks.push_back(std::make_unique<GatedBlock>(modules, gates.gates.column_norms, gates.prefill));
    blocks.back()->set(gates_of(gates, modules));
  }
  return blocks;
}

}  // namespace tessera::sparsity
