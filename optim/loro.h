#pragma once

#include "optim/optimizer.h"

namespace tessera::optim {

/// The two factors of a weight W = b a, by the names of their parameters: a [parts * rank, in], b [out,
/// rank]; `rows` of each part of b, whose factor a is its own (nn::Factors).
struct FactorNames {
  std::string a, b;
  std::vector<int64_t> rows;
};

/// What to do if a factor is singular, so that the step on the product does not exist.
enum class SingularFactor : uint8_t {
  error,  // the step throws and changes no factor
  cheap   // that part takes the cheap step; counted, and told by Optimizer::report()
};
SingularFactor parse_singular_factor(std::string_view name);  // throws, naming the choices

/// Which moments begin at zero again after an exact step.
enum class LoroMoments : uint8_t {
  reset,     // those of the factors, which have other bases
  keep,      // none
  reset_all  // those of all parameters, as in the published runs
};
LoroMoments parse_loro_moments(std::string_view name);  // throws, naming the choices

struct LoroOptions {
  double lr = 1e-2;
  int64_t every = 500;   // period of exact steps; 0: none
  double lr_scale = -1;  // of cheap steps, times lr; -1: rank / min(in, out of the largest part)
  LoroMoments moments = LoroMoments::reset;
  int64_t refactor_every = 0;  // steps after which the factors are balanced; 0: never
  int64_t momentum_reset = 0;  // period of resets of the moments, in steps; 0: never
  SingularFactor singular = SingularFactor::error;
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8;
  double weight_decay = 0;    // decoupled, where the no-decay rule allows it
  double max_grad_norm = 0;   // clips the norm of all gradients; 0: no clipping
  double adamw_lr_scale = 1;  // learning rate of the parameters that AdamW updates, times lr
  std::vector<FactorNames> pairs = {};
  std::vector<Group> groups = {};
  std::optional<LossScale> loss_scale = {};  // for f16; the tape needs loss_scale() then
};

/// LORO (Mo, Huang, Pan, ICLR 2025: "Parameter and memory efficient pretraining via low-rank Riemannian
/// optimization") for weights W = b a made of two factors, AdamW for all other parameters. With N(g) = m / (1
/// - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps), Adam's direction of each factor's gradient:
///
///   cheap   b = b - lr lr_scale (N(db) + weight_decay b), likewise a
///   exact   every `every` steps, on the manifold of matrices of that rank. With b = Q_b R_b and a^T = Q_a
///   R_a, and
///           Y = N(db) R_a^-1, Z = R_b^-T N(da), the tangent vector
///             X = (I - Q_b Q_b^T) Y Q_a^T + Q_b Z
///           and W - lr (X + weight_decay W) is brought back to the rank by its singular value decomposition,
///           of a core of 2 rank x 2 rank; it becomes b = U sqrt(S), a = sqrt(S) V^T. Were N the identity, X
///           would be the projection of dW onto the tangent space.
///   then    moments begin at zero again (`moments`)
///
/// Refactorisation (arXiv:2505.22922, section 4) is the last part alone: the product stays, its factors
/// become U sqrt(S) and sqrt(S) V^T, and the moments are reset. With every = 0 and lr_scale = 1 it is AdamW
/// on factors, with it.
///
/// A factor is singular if the smallest element of R's diagonal is at most 1e-6 of the largest. Factors and
/// moments are f32 (f64), in which all of this is computed. The exact step and the balancing run on the
/// host's command (see Rule::every).
class Loro : public Optimizer {
 public:
  static constexpr const char* kName = "loro";
  /// Throws if there are no pairs, or if a parameter of one is missing or of another shape.
  Loro(std::vector<nn::NamedParameter> parameters, const LoroOptions& options);
  /// As commands make it (optim/bundled.h).
  static Loro from(std::vector<nn::NamedParameter> parameters, const BundledOptions& options);
};

/// The rule "loro" for the factors of options.pairs alone, whose parameters' learning rates have
/// options.lr_scale in them already, as Loro's groups give them.
std::shared_ptr<Rule> loro_rule(const LoroOptions& options);

}  // namespace tessera::optim
