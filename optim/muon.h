#pragma once

#include "optim/optimizer.h"

namespace tessera::optim {

/// The scale of the orthogonal direction of a matrix [rows, columns].
enum class MuonScale : uint8_t {
  spectral,  // sqrt(max(1, rows / columns)): changes of one size of the layer's output, whatever its shape
  adamw  // 0.2 sqrt(max(rows, columns)): the root mean square of AdamW's updates, so that its learning rate
         // and weight decay serve both (Liu et al., arXiv:2502.16982, section 2.2)
};

struct MuonOptions {
  double lr = 0.02;
  double momentum = 0.95;
  bool nesterov = true;
  MuonScale scale = MuonScale::spectral;
  int iterations = 5;  // of Newton-Schulz
  std::optional<DType> compute =
      {};                     // of Newton-Schulz; default: bf16 on a GPU, on the CPU f32 (f64 for f64)
  double weight_decay = 0;    // decoupled, where the no-decay rule allows it
  double max_grad_norm = 0;   // clips the norm of all gradients; 0: no clipping
  double adamw_lr_scale = 1;  // learning rate of the parameters that AdamW updates, times lr
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8;  // of AdamW
  /// A group may say .rule = "muon" or "adamw"; else is_hidden_matrix() decides.
  std::vector<Group> groups = {};
  std::optional<LossScale> loss_scale = {};  // for f16; the tape needs loss_scale() then
};

/// Muon (Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024) for the matrices of
/// hidden layers, AdamW for all other parameters. A matrix W with gradient G:
///   M = momentum M + (1 - momentum) G;  D = (1 - momentum) G + momentum M   (Nesterov; else D = M)
///   X = D / |D|_F;  5 times:  A = X X^T,  P = a I + b A + c A^2,  X = P X,
///     (a, b, c) = (3.4445, -4.7750, 2.0315)
///   W = W - lr (scale X + weight_decay W)
/// X is D with its singular values moved to 0.68 to 1.20 (those above 0.002 of the norm; smaller ones get
/// as far as they come), close to the nearest orthogonal matrix. D, M and W are f32 (f64 for f64), norms are
/// summed in f64, X in `compute` with sums of GEMMs in f32 and the last X not rounded. A tall matrix is
/// handled through X^T X. Of a parameter [groups, rows, columns] each group is a matrix; a fused weight
/// (q, k and v; gate and up) is one.
///
/// Equal shapes are batched into one GEMM each. FLOPs of an iteration, with m = min(rows, columns) and n the
/// other: 4 m^2 n + 2 m^3; see docs/optimizers.md. See Optimizer for the rest of a step.
class Muon : public Optimizer {
 public:
  static constexpr const char* kName = "muon";
  Muon(std::vector<nn::NamedParameter> parameters, const MuonOptions& options = {});
  /// As commands make it (optim/bundled.h); in MuonScale::adamw, so that lr and weight decay have
  /// AdamW's sizes.
  static Muon from(std::vector<nn::NamedParameter> parameters, const BundledOptions& options);
};

/// Elements of the scratch that Newton-Schulz takes for the largest of batches of equal matrices.
struct MuonScratch {
  int64_t matrices = 0, squares = 0;  // in `compute`, two of each
  int64_t parts = 0;                  // in f64
  /// Counts the batches of so many matrices [rows, columns].
  void fit(int64_t count, int64_t rows, int64_t columns, DType compute);
  double bytes(DType compute) const {
    return double(2 * (matrices + squares)) * double(size_of(compute)) + double(parts) * 8;
  }
};
/// MuonOptions::compute where it is not given: `dtype` is that of the optimizer's arenas.
inline DType muon_compute(DType dtype, Device device) {
  return device.is_cpu() ? dtype : DType::bf16;
}

/// The rule "muon" with the state "momentum", for optimizers of several rules; of MuonOptions it reads
/// momentum, nesterov, scale, iterations and compute. Throws if one is out of range.
std::shared_ptr<Rule> muon_rule(const MuonOptions& options = {});

}  // namespace tessera::optim
