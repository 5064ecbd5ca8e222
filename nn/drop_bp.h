#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "nn/attention.h"
#include "nn/mlp.h"
#include "nn/module.h"
#include "runtime/override.h"

namespace tessera::nn {

/// DropBP (Woo et al., arXiv:2402.17812): drops residual branches from the backward pass. The branches of a
/// model are its attention layers and its feed-forward networks, in the order of fields(). Forward is
/// unchanged, to the bit; a dropped branch runs off the tape, so it saves nothing, its parameters get no
/// gradient, and a gradient flows past it along the residual stream alone.
///
/// ```cpp
/// nn::DropBP drops(model, 128);               // texts of 128 tokens: branches count by their FLOPs
/// drops.set_rates(std::vector(drops.size(), 0.5));
/// for (int64_t step = 0; step < steps; ++step) {
///   drops.draw(0.5, 42, uint64_t(step));      // which branches this step drops, by the seed 42
///   Tape tape;
///   tape.backward(loss_of(model(batch)));
///   optimizer.step(), optimizer.zero_grad();
/// }
/// ```
///
/// It affects calls that its thread makes during its lifetime, also those of a checkpointed part recomputed
/// in backward. Meanwhile the model must not be moved and layers must not be added. Without a DropBP a layer
/// only reads one flag. The host decides which branches are dropped: a step that drops some cannot be
/// captured, and a layer called in a capture throws.
///
/// If every branch is dropped and what comes before the first and after the last has no parameters that
/// train, the loss has no gradient at all, and backward throws.
class DropBP {
 public:
  struct Branch {
    std::string name;  // in fields(): "blocks.3.attention"
    /// Of its forward pass, per token, with its layers in the forms that they have when the object is made.
    double flops = 0;
  };

  /// `tokens` of a text: attention's FLOPs grow with them.
  template <class Model>
  DropBP(const Model& model, int64_t tokens) {
    for_each_node(model, [&](const std::string& name, auto& node) {
      using Layer = std::remove_cvref_t<decltype(node)>;
      if constexpr (std::is_same_v<Layer, SelfAttention>) add(name, &node, flops_of(node, tokens));
      if constexpr (std::is_same_v<Layer, Mlp>) add(name, &node, flops_of(node));
    });
    enter();
  }
  ~DropBP();
  DropBP(const DropBP&) = delete;

  size_t size() const { return branches_.size(); }
  const std::vector<Branch>& branches() const { return branches_; }
  /// How likely each branch is to be dropped, in [0, 1]; all 0 at first.
  const std::vector<double>& rates() const { return rates_; }
  void set_rates(std::vector<double> rates);
  /// Those of the steps that follow; none at first.
  const std::vector<bool>& dropped() const { return dropped_; }
  void set_dropped(std::vector<bool> dropped);
  /// Draws the branches of a step: see draw_branches.
  void draw(double least, uint64_t seed, uint64_t step);
  /// FLOPs of the branches dropped now, as a share of those of all branches.
  double dropped_share() const;

  /// For layers: whether a call of this layer is that of a dropped branch.
  static bool drops(const void* layer) { return active_ && finds(layer); }
  /// The result of `branch()`, off the tape; its sum with `residual`, if that is defined, passes the gradient
  /// on to it.
  template <class F>
  static Tensor off_tape(const Tensor& residual, F&& branch) {
    Tensor y;
    {
      const Within scope;
      y = branch();
    }
    return pass_residual(std::move(y), residual);
  }

 private:
  /// Off the tape; the layer that calls itself in it is not dropped.
  struct Within {
    NoTape off;
    Override<bool> active{active_, false};
  };
  static double flops_of(const SelfAttention& attention, int64_t tokens);
  static double flops_of(const Mlp& mlp);
  static bool finds(const void* layer);
  static Tensor pass_residual(Tensor y, const Tensor& residual);
  std::vector<double> flops() const;
  void add(const std::string& name, const void* layer, double flops);
  void enter();

  static inline thread_local bool active_ = false;
  std::vector<Branch> branches_;
  std::vector<const void*> layers_;
  std::vector<double> rates_;
  std::vector<bool> dropped_;
};

/// The branches, of these rates and FLOPs, that one step drops: each with its rate; then, while the dropped
/// share of FLOPs is below `least`, further ones in order of decreasing rate, those of equal rates in an
/// order that is drawn, too. A function of the arguments only. Throws unless least is in [0, 1].
std::vector<bool> draw_branches(const std::vector<double>& rates, const std::vector<double>& flops,
                                double least, uint64_t seed, uint64_t step);

/// Rates of the branches in tenths, up to 9, such that the FLOPs that remain are at most 1 - target of all:
/// from a tenth each (or 0, if the target is less), the branch of the least S (rate + 0.1) gets another
/// tenth, of equal ones the first. `sensitivities` S and `flops` have an entry per branch. Throws unless
/// target is in [0, 0.9], what rates of at most 0.9 can reach.
std::vector<int> allocate_drop_rates(const std::vector<double>& sensitivities,
                                     const std::vector<double>& flops, double target);

}  // namespace tessera::nn
