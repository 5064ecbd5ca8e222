#include "optim/galore.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "ops/factor/factor.h"
#include "ops/gemm/gemm.h"
#include "optim/adamw.h"
#include "optim/bundled.h"
#include "optim/options_internal.h"
#include "optim/projected_kernels.h"
#include "runtime/f32_math.h"
#include "runtime/has_cuda.h"
#include "runtime/text.h"

namespace tessera::optim {
namespace {

constexpr const char* kProjections[] = {"std", "reverse_std", "right", "left", "full"};
constexpr const char* kSvds[] = {"exact", "sketch"};

/// Of the sketches; which matrix, and which factorisation, are added to it.
constexpr uint64_t kSketchSeed = 0x6A10'0000'0000'0000u;

/// One matrix with its projections; low and the moments are parts of those of all matrices.
struct Projected {
  std::string name;
  Tensor weight, master, gradient;
  double lr_scale, weight_decay;
  Tensor left, right;  // [rows, rank], [rank, columns]; undefined: not from this side
  Tensor low;
  int64_t first = 0;  // of low in the arena
};

class GaloreRule : public Rule {
 public:
  explicit GaloreRule(const GaloreOptions& options) : options_(options) {}
  const char* name() const override { return "galore"; }
  Betas betas() const override { return {options_.beta1, options_.beta2}; }

  void begin() override {
    int64_t elements = 0, largest = 0, widest = 0;
    for (const RuleParameter& parameter : parameters()) add(parameter);
    for (Projected& one : matrices_) {
      const int64_t rows = one.weight.size(0), columns = one.weight.size(1);
      one.first = elements;
      elements +=
          (one.left.defined() ? options_.rank : rows) * (one.right.defined() ? options_.rank : columns);
      largest = std::max(largest, rows * columns);
      widest = std::max(widest, options_.rank * columns);
    }
    const auto zeros = [&](int64_t count) { return Tensor::zeros({count}, compute_dtype(), device()); };
    m_ = zeros(elements), v_ = zeros(elements);
    low_ = scratch(elements, compute_dtype());
    direction_ = scratch(largest, compute_dtype());
    if (options_.projection == GaloreProjection::full) half_ = scratch(widest, compute_dtype());
    keep("galore.m", m_), keep("galore.v", v_);
    for (Projected& one : matrices_) {
      if (one.left.defined()) keep("projection.left." + one.name, one.left);
      if (one.right.defined()) keep("projection.right." + one.name, one.right);
      one.low = part(low_, one.first, one.left.defined() ? options_.rank : one.weight.size(0),
                     one.right.defined() ? options_.rank : one.weight.size(1));
    }
    refresh_ = every("galore.refresh_in", options_.every, 0);
    reset_ = restarts_every("galore.reset_in", options_.momentum_reset);
    factorised_ = Tensor::zeros({1}, DType::i64, Device::cpu());
    keep("galore.factorised", factorised_);
  }

  void step() override {
    if (due(refresh_) && applies()) {
      refresh();
      done(refresh_);
    }
    const bool narrow = !parameters().empty() && size_of(parameters()[0].weight.dtype()) == 2;
    const F32MathScope math(narrow && device().is_cuda() ? F32Math::tf32 : f32_math());
    for (const Projected& one : matrices_) project(one);
    const ProjectedAdam adam{options_.beta1, options_.beta2, options_.eps, number()};
    if (device().is_cpu()) {
      projected_adam_cpu(low_, m_, v_, status(), adam);
    } else {
      if constexpr (kCuda) projected_adam_cuda(low_, m_, v_, status(), adam);
    }
    for (const Projected& one : matrices_) descend_along(one);
    restart_if_due(reset_, {m_, v_});
  }

 private:
  static Tensor part(const Tensor& memory, int64_t first, int64_t rows, int64_t columns) {
    return memory.slice(0, first, first + rows * columns).reshape({rows, columns});
  }

  void add(const RuleParameter& parameter) {
    const Tensor& whole = parameter.weight;
    check(whole.rank() >= 2, name(), ": ", parameter.name, " ", describe(whole),
          " is no matrix; put it into a group with the rule adamw");
    std::vector<Projected> found;
    const auto take = [&](const Tensor& weight, const Tensor& master, const Tensor& gradient) {
      found.push_back({.weight = weight,
                       .master = master,
                       .gradient = gradient,
                       .lr_scale = parameter.lr_scale,
                       .weight_decay = parameter.weight_decay});
    };
    const auto fused = options_.matrices.find(parameter.name);
    if (whole.rank() > 2) {
      const auto matrices = [](const Tensor& t) {
        return t.reshape({t.count() / std::max<int64_t>(1, t.size(-1) * t.size(-2)), t.size(-2), t.size(-1)});
      };
      const Tensor weights = matrices(whole), masters = matrices(parameter.master),
                   gradients = matrices(parameter.gradient);
      for (int64_t i = 0; i < weights.size(0); ++i)
        take(weights.select(0, i), masters.select(0, i), gradients.select(0, i));
    } else if (fused != options_.matrices.end()) {
      check(std::accumulate(fused->second.begin(), fused->second.end(), int64_t{0}) == whole.size(0), name(),
            ": the rows of the matrices of ", parameter.name, " do not add up to ", describe(whole));
      int64_t row = 0;
      for (const int64_t rows : fused->second) {
        const auto range = [&](const Tensor& t) { return t.slice(0, row, row + rows); };
        take(range(whole), range(parameter.master), range(parameter.gradient));
        row += rows;
      }
    } else {
      take(whole, parameter.master, parameter.gradient);
    }
    for (size_t i = 0; i < found.size(); ++i) {
      Projected& one = found[i];
      one.name = parameter.name + (found.size() > 1 ? "." + std::to_string(i) : "");
      const int64_t rows = one.weight.size(0), columns = one.weight.size(1);
      check(options_.rank <= std::min(rows, columns), name(), ": the rank (--galore-rank) is ", options_.rank,
            ", but ", one.name, " has ", rows, " x ", columns, " elements; expected at most ",
            std::min(rows, columns), ", or a group with the rule adamw");
      const bool tall = rows >= columns;
      const GaloreProjection side = options_.projection;
      const bool both = side == GaloreProjection::full;
      const bool from_right = side == GaloreProjection::right || (side == GaloreProjection::std && tall) ||
                              (side == GaloreProjection::reverse_std && !tall);
      if (both || from_right) one.right = Tensor::zeros({options_.rank, columns}, compute_dtype(), device());
      if (both || !from_right) one.left = Tensor::zeros({rows, options_.rank}, compute_dtype(), device());
      matrices_.push_back(std::move(one));
    }
  }

  /// All projections are made before the first is replaced, so that a decomposition that fails changes
  /// nothing.
  void refresh() {
    std::vector<ops::SvdFactors> made;
    const auto count = uint64_t(factorised_.data<int64_t>()[0]);
    for (size_t i = 0; i < matrices_.size(); ++i) {
      const Projected& one = matrices_[i];
      try {
        if (options_.svd == GaloreSvd::exact) {
          made.push_back(ops::truncated_svd(one.gradient, options_.rank));
        } else {
          Rng rng(kSketchSeed ^ count << 24 ^ i);
          made.push_back(ops::truncated_svd(one.gradient, options_.rank, rng));
        }
      } catch (const Error& error) {
        fail_at(Site::here(), "galore: the gradient of ", one.name, ": ", error.message());
      }
    }
    for (size_t i = 0; i < matrices_.size(); ++i) {
      if (matrices_[i].left.defined()) matrices_[i].left.copy_from(made[i].u);
      if (matrices_[i].right.defined()) matrices_[i].right.copy_from(made[i].vt);
    }
    factorised_.data<int64_t>()[0] += 1;
  }

  /// low = R
  void project(const Projected& one) const {
    if (one.left.defined() && one.right.defined()) {
      const Tensor half = part(half_, 0, options_.rank, one.weight.size(1));
      ops::multiply(half, one.left.transpose(0, 1), one.gradient);
      ops::multiply(one.low, half, one.right.transpose(0, 1));
    } else if (one.left.defined()) {
      ops::multiply(one.low, one.left.transpose(0, 1), one.gradient);
    } else {
      ops::multiply(one.low, one.gradient, one.right.transpose(0, 1));
    }
  }

  void descend_along(const Projected& one) const {
    const int64_t rows = one.weight.size(0), columns = one.weight.size(1);
    const Tensor direction = part(direction_, 0, rows, columns);
    const double scale = options_.scale;
    if (one.left.defined() && one.right.defined()) {
      const Tensor half = part(half_, 0, options_.rank, columns);
      ops::multiply(half, one.low, one.right);
      ops::multiply(direction, one.left, half, {.alpha = scale});
    } else if (one.left.defined()) {
      ops::multiply(direction, one.left, one.low, {.alpha = scale});
    } else {
      ops::multiply(direction, one.low, one.right, {.alpha = scale});
    }
    const Descent descent{one.lr_scale, one.weight_decay};
    if (device().is_cpu()) {
      descend_cpu(one.weight, one.master, direction, status(), descent);
    } else {
      if constexpr (kCuda) descend_cuda(one.weight, one.master, direction, status(), descent);
    }
  }

  GaloreOptions options_;
  std::vector<Projected> matrices_;
  Tensor low_, m_, v_, direction_, half_, factorised_;
  size_t refresh_ = 0, reset_ = 0;
};

}  // namespace

const char* name_of(GaloreProjection projection) {
  return kProjections[size_t(projection)];
}
GaloreProjection parse_galore_projection(std::string_view name) {
  return parse_name<GaloreProjection>("galore: there is no projection", kProjections, name);
}
GaloreSvd parse_galore_svd(std::string_view name) {
  return parse_name<GaloreSvd>("galore: there is no way to decompose", kSvds, name);
}

std::shared_ptr<Rule> galore_rule(const GaloreOptions& options) {
  check(options.rank >= 1, "GaLore: the rank (--galore-rank) is ", options.rank, "; expected 1 or more");
  check(options.every >= 1, "GaLore: ", options.every,
        " steps between two factorisations (--galore-every); expected 1 or more");
  check(options.momentum_reset >= 0, "GaLore: momentum_reset = ", options.momentum_reset,
        " must not be negative");
  check(std::isfinite(options.scale) && options.scale > 0, "GaLore: the scale (--galore-scale) is ",
        options.scale, "; expected more than 0");
  adamw_rule(options.beta1, options.beta2, options.eps);  // checks these
  return std::make_shared<GaloreRule>(options);
}

Galore::Galore(std::vector<nn::NamedParameter> parameters, const GaloreOptions& options)
    : Optimizer("GaLore", std::move(parameters), shared_options(options),
                {{.rule = galore_rule(options), .takes = is_hidden_matrix},
                 {.rule = adamw_rule(options.beta1, options.beta2, options.eps, options.momentum_reset),
                  .lr_scale = options.adamw_lr_scale}}) {}

Galore Galore::from(std::vector<nn::NamedParameter> parameters, const BundledOptions& options) {
  GaloreOptions own = options.galore;
  copy_shared_options(own, options);
  own.matrices = options.structure.matrices;
  return Galore(std::move(parameters), own);
}

}  // namespace tessera::optim
