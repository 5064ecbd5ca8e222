#pragma once

#include <map>

#include "optim/optimizer.h"

namespace tessera::optim {

/// The row ranges of fused parameters that are separate matrices (q, k and v; gate and up): the rows of
/// each, from the top, by the parameter's name. Those that are not listed are one matrix.
using MatrixRows = std::map<std::string, std::vector<int64_t>>;

/// From which side GaLore projects a gradient [rows, columns].
enum class GaloreProjection : uint8_t {
  std,  // the shorter one: from the right (columns become the rank) if rows >= columns, else from the left
  reverse_std,  // the longer one
  right,
  left,
  full  // from both
};
const char* name_of(GaloreProjection projection);                 // "reverse_std"
GaloreProjection parse_galore_projection(std::string_view name);  // throws, naming the choices

/// How the singular vectors are computed: exactly (ops::svd), or by a random sketch (ops::truncated_svd with
/// a range finder), which for ranks far below the sizes takes a small part of the time.
enum class GaloreSvd : uint8_t { exact, sketch };
GaloreSvd parse_galore_svd(std::string_view name);  // throws, naming the choices

struct GaloreOptions {
  double lr = 1e-2;
  int64_t rank = 128;
  int64_t every = 200;  // steps between factorisations
  double scale = 0.25;  // of the projected direction
  GaloreProjection projection = GaloreProjection::std;
  GaloreSvd svd = GaloreSvd::exact;
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8;
  double weight_decay = 0;     // decoupled, where the no-decay rule allows it
  double max_grad_norm = 0;    // clips the norm of all gradients; 0: no clipping
  double adamw_lr_scale = 1;   // learning rate of the parameters that AdamW updates, times lr
  int64_t momentum_reset = 0;  // period of resets of the moments, in steps; 0: never
  MatrixRows matrices = {};
  /// A group may say .rule = "galore" or "adamw"; else is_hidden_matrix() decides.
  std::vector<Group> groups = {};
  std::optional<LossScale> loss_scale = {};  // for f16; the tape needs loss_scale() then
};

/// GaLore (Zhao et al., arXiv:2403.03507) for the matrices of hidden layers, AdamW for all other parameters.
/// For a matrix W with gradient G, at the first step and then every `every` steps:
///
///   G = U diag(s) V^T,  P = U[:, :rank],  Q = V[:, :rank]
///
/// and at every step:
///
///   left:   R = P^T G,    D = P N
///   right:  R = G Q,      D = N Q^T
///   full:   R = P^T G Q,  D = P N Q^T
///   N = Adam(R):  m = beta1 m + (1 - beta1) R, v likewise of R^2,
///                 N = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)
///   W = W - lr (scale D + weight_decay W)
///
/// The moments stay as they are when the projection changes, as in the original. A gradient of zeros, as one
/// that does not arrive, has any vectors as P and Q: where branches are dropped (nn::DropBP), leave them in
/// at these steps. The clip factor of all gradients is applied to R. Moments and projections are f32 (f64),
/// in which the GEMMs are; of 16-bit weights on a GPU in TF32.
///
/// States: "projection.left.<matrix>" [rows, rank], "projection.right.<matrix>" [rank, columns], "galore.m"
/// and "galore.v" of all matrices, and the countdowns. Of a parameter [groups, rows, columns] each group is a
/// matrix. A matrix is named after its parameter, with ".0", ".1", ... if that has several. Scratch: R of all
/// matrices and D of the largest one. Throws if the rank is larger than a matrix.
class Galore : public Optimizer {
 public:
  static constexpr const char* kName = "galore";
  Galore(std::vector<nn::NamedParameter> parameters, const GaloreOptions& options = {});
  /// As commands make it (optim/bundled.h).
  static Galore from(std::vector<nn::NamedParameter> parameters, const BundledOptions& options);
};

/// The rule "galore", for optimizers of several rules. Throws if an option is out of range.
std::shared_ptr<Rule> galore_rule(const GaloreOptions& options = {});

}  // namespace tessera::optim
