#include "optim/loro.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <set>
#include <utility>

#include "ops/factor/factor.h"
#include "ops/matmul/matmul.h"
#include "ops/pointwise/pointwise.h"
#include "ops/shape/shape.h"
#include "optim/adamw.h"
#include "optim/bundled.h"
#include "optim/options_internal.h"
#include "runtime/text.h"

namespace tessera::optim {
namespace {

constexpr double kSingular = 1e-6;

/// The factor of cheap steps of a pair.
double cheap_scale(const LoroOptions& options, const FactorNames& pair, int64_t rank, int64_t in) {
  if (options.lr_scale >= 0) return options.lr_scale;
  return double(rank) / double(std::min(in, *std::max_element(pair.rows.begin(), pair.rows.end())));
}

/// x with r x = y (of the upper triangle r), column by column: back substitution in f64 on the host. Small:
/// [rank, n].
Tensor solve_upper(const Tensor& r, const Tensor& y) {
  const int64_t k = r.size(0), n = y.size(1);
  const std::vector<double> upper = r.to(Device::cpu()).to(DType::f64).packed().to_vector<double>();
  std::vector<double> x = y.to(Device::cpu()).to(DType::f64).packed().to_vector<double>();
  for (int64_t i = k - 1; i >= 0; --i) {
    for (int64_t j = i + 1; j < k; ++j)
      for (int64_t c = 0; c < n; ++c) x[size_t(i * n + c)] -= upper[size_t(i * k + j)] * x[size_t(j * n + c)];
    for (int64_t c = 0; c < n; ++c) x[size_t(i * n + c)] /= upper[size_t(i * k + i)];
  }
  return Tensor::from(x, {k, n}).to(y.dtype()).to(y.device());
}

/// The inverse of an upper triangle; the GEMMs with it are on the device.
Tensor inverse_upper(const Tensor& r) {
  const int64_t k = r.size(0);
  std::vector<double> identity(size_t(k * k));
  for (int64_t i = 0; i < k; ++i) identity[size_t(i * k + i)] = 1;
  return solve_upper(r, Tensor::from(identity, {k, k}).to(r.dtype()).to(r.device()));
}

bool is_singular(const Tensor& r) {
  const int64_t k = r.size(0);
  const std::vector<double> values = r.to(Device::cpu()).to(DType::f64).packed().to_vector<double>();
  double least = INFINITY, most = 0;
  for (int64_t i = 0; i < k; ++i) {
    least = std::min(least, std::abs(values[size_t(i * k + i)]));
    most = std::max(most, std::abs(values[size_t(i * k + i)]));
  }
  return !(least > kSingular * most);
}

/// New factors of a core [k, l] between orthonormal `left` [rows, k] and `right` [in, l], balanced; the
/// element of the largest magnitude in each column of b is positive, so that the factors are a function of
/// the product.
std::pair<Tensor, Tensor> balanced(const Tensor& left, const Tensor& core, const Tensor& right,
                                   int64_t rank) {
  const ops::SvdFactors parts = ops::truncated_svd(core, rank);
  const Tensor root = ops::sqrt(parts.s), b = ops::matmul(left, ops::mul(parts.u, root)),
               a = ops::matmul(ops::mul(parts.vt, ops::reshape(root, {rank, 1})), right, false, true);
  const std::vector<double> values = b.to(Device::cpu()).to(DType::f64).packed().to_vector<double>();
  std::vector<double> signs(size_t(rank), 1), most(size_t(rank), -1);
  for (size_t i = 0; i < values.size(); ++i)
    if (const size_t column = i % size_t(rank); std::abs(values[i]) > most[column])
      most[column] = std::abs(values[i]), signs[column] = values[i] < 0 ? -1 : 1;
  const Tensor sign = Tensor::from(signs, {rank}).to(b.dtype()).to(b.device());
  return {ops::mul(b, sign), ops::mul(a, ops::reshape(sign, {rank, 1}))};
}

class LoroRule : public Rule {
 public:
  explicit LoroRule(const LoroOptions& options)
      : options_(options), formula_{options.beta1, options.beta2, options.eps} {}
  const char* name() const override { return "loro"; }
  Betas betas() const override { return {options_.beta1, options_.beta2}; }

  void begin() override {
    m_ = arena("m"), v_ = arena("v");
    std::map<std::string, size_t> index;
    for (size_t i = 0; i < parameters().size(); ++i) index.emplace(parameters()[i].name, i);
    for (const FactorNames& names : options_.pairs) {
      const auto a = index.find(names.a), b = index.find(names.b);
      check(a != index.end() && b != index.end(), name(), ": the factors ", names.a, " and ", names.b,
            " are not both updated by this rule");
      pairs_.push_back({a->second, b->second, &names});
    }
    exact_ = every("loro.exact_in", options_.every, options_.every - 1);
    refactor_ = every("loro.refactor_in", options_.refactor_every, options_.refactor_every - 1);
    reset_ = restarts_every("loro.reset_in", options_.momentum_reset);
    if (options_.every > 0 || options_.refactor_every > 0) restarts();
    counts_ = Tensor::zeros({2}, DType::i64, Device::cpu());
    keep("loro.counts", counts_);
  }

  void step() override {
    if (due(exact_) && applies()) {
      step_exactly();
      done(exact_);
    } else {
      apply(formula_, {m_, v_});
    }
    if (due(refactor_) && applies()) {
      refactor();
      done(refactor_);
    }
    restart_if_due(reset_, {m_, v_});
  }

  std::string report() const override {
    const int64_t* const counts = counts_.data<int64_t>();
    if (counts[kCheap] == 0) return "";
    return "loro: " + std::to_string(counts[kCheap]) + " of " + std::to_string(counts[kExact]) +
           " exact steps of a matrix were cheap ones instead, because a factor was singular";
  }

 private:
  enum Count : int { kExact, kCheap };
  struct Pair {
    size_t a, b;
    const FactorNames* names;
  };
  /// A part's new factors.
  struct Update {
    Tensor a, b, new_a, new_b;  // views of masters, and what they become
  };

  template <class F>
  void for_each_part(F&& f) {
    for (const Pair& pair : pairs_) {
      const int64_t rank = parameters()[pair.b].master.size(1);
      int64_t row = 0;
      for (size_t p = 0; p < pair.names->rows.size(); ++p) {
        const int64_t rows = pair.names->rows[p], factor = int64_t(p) * rank;
        const auto of_a = [&](const Tensor& t) { return t.slice(0, factor, factor + rank); };
        const auto of_b = [&](const Tensor& t) { return t.slice(0, row, row + rows); };
        f(pair, p, of_a, of_b);
        row += rows;
      }
    }
  }

  /// Masters, then the weights rounded of them.
  void write(const std::vector<Update>& updates) const {
    for (const Update& update : updates) update.a.copy_from(update.new_a), update.b.copy_from(update.new_b);
    for (const RuleParameter& parameter : parameters())
      if (parameter.master.raw() != parameter.weight.raw()) parameter.weight.copy_from(parameter.master);
  }

  /// Adam's direction of a part.
  static Tensor direction(const Tensor& m, const Tensor& v, const std::pair<double, double>& bias,
                          double eps) {
    const Tensor root = ops::scale(ops::sqrt(v.clone()), 1 / bias.second);
    return ops::div(ops::scale(m.clone(), 1 / bias.first),
                    ops::add(root, Tensor::full({}, eps, m.dtype(), m.device())));
  }

  void step_exactly() {
    apply(MomentsRule{options_.beta1, options_.beta2}, {m_, v_});
    const std::pair<double, double> bias = bias_corrections();
    const double rate = status_of(kRate);
    std::vector<Update> updates;
    int64_t exact = 0, cheap = 0;
    for_each_part([&](const Pair& pair, size_t part, const auto& of_a, const auto& of_b) {
      const RuleParameter &first = parameters()[pair.a], &second = parameters()[pair.b];
      const Tensor a = of_a(first.master), b = of_b(second.master),
                   da = direction(of_a(view(m_, pair.a)), of_a(view(v_, pair.a)), bias, options_.eps),
                   db = direction(of_b(view(m_, pair.b)), of_b(view(v_, pair.b)), bias, options_.eps);
      const ops::QrFactors qa = ops::qr(a.transpose(0, 1)), qb = ops::qr(b);
      exact += 1;
      const bool b_is_singular = is_singular(qb.r);
      if (b_is_singular || is_singular(qa.r)) {
        const RuleParameter& bad = b_is_singular ? second : first;
        check(options_.singular == SingularFactor::cheap, "loro: the factor ", bad.name, " ",
              describe(bad.weight), ", part ", part,
              ", is singular, so the exact step does not exist; start from factors of full rank "
              "(--factor-init), lower "
              "the rank, or let such parts take the cheap step, counted (--loro-singular cheap)");
        cheap += 1;
        const auto stepped = [&](const Tensor& w, const Tensor& d, const RuleParameter& of) {
          return ops::sub(ops::scale(w.clone(), 1 - rate * of.lr_scale * of.weight_decay),
                          ops::scale(d, rate * of.lr_scale));
        };
        updates.push_back({a, b, stepped(a, da, first), stepped(b, db, second)});
        return;
      }
      const double s = cheap_scale(options_, *pair.names, b.size(1), a.size(1)),
                   lr = s > 0 ? rate * second.lr_scale / s : 0;
      updates.push_back(riemannian(a, b, da, db, qa, qb, lr, second.weight_decay));
    });
    write(updates);
    counts_.data<int64_t>()[kExact] += exact, counts_.data<int64_t>()[kCheap] += cheap;
    if (options_.moments != LoroMoments::keep) restart_moments({m_, v_});
  }

  static Update riemannian(const Tensor& a, const Tensor& b, const Tensor& da, const Tensor& db,
                           const ops::QrFactors& qa, const ops::QrFactors& qb, double lr,
                           double weight_decay) {
    const int64_t rank = b.size(1);
    const Tensor y = ops::matmul(db, inverse_upper(qa.r)), z = ops::matmul(inverse_upper(qb.r), da, true);
    // What lies outside of the spaces of the factors.
    const Tensor outer_y = ops::sub(y, ops::matmul(qb.q, ops::matmul(qb.q, y, true))),
                 zq = ops::matmul(z, qa.q), outer_z = ops::sub(z, ops::matmul(zq, qa.q, false, true));
    const ops::QrFactors q2 = ops::qr(outer_y), q3 = ops::qr(ops::transpose(outer_z, 0, 1));
    const int64_t more_rows = q2.q.size(1), more_columns = q3.q.size(1);
    const Tensor core = Tensor::zeros({rank + more_rows, rank + more_columns}, a.dtype(), a.device());
    const Tensor inner =
        ops::sub(ops::scale(ops::matmul(qb.r, qa.r, false, true), 1 - lr * weight_decay), ops::scale(zq, lr));
    core.slice(0, 0, rank).slice(1, 0, rank).copy_from(inner);
    core.slice(0, 0, rank)
        .slice(1, rank, rank + more_columns)
        .copy_from(ops::scale(ops::transpose(q3.r, 0, 1), -lr));
    core.slice(0, rank, rank + more_rows).slice(1, 0, rank).copy_from(ops::scale(q2.r, -lr));
    const auto [new_b, new_a] =
        balanced(ops::concat({qb.q, q2.q}, 1), core, ops::concat({qa.q, q3.q}, 1), rank);
    return {a, b, new_a, new_b};
  }

  void refactor() {
    std::vector<Update> updates;
    for_each_part([&](const Pair& pair, size_t, const auto& of_a, const auto& of_b) {
      const Tensor a = of_a(parameters()[pair.a].master), b = of_b(parameters()[pair.b].master);
      const ops::QrFactors qa = ops::qr(a.transpose(0, 1)), qb = ops::qr(b);
      const auto [new_b, new_a] = balanced(qb.q, ops::matmul(qb.r, qa.r, false, true), qa.q, b.size(1));
      updates.push_back({a, b, new_a, new_b});
    });
    write(updates);
    restart_moments({m_, v_});
  }

  LoroOptions options_;
  AdamWRule formula_;
  std::vector<Pair> pairs_;
  Tensor m_, v_, counts_;
  size_t exact_ = 0, refactor_ = 0, reset_ = 0;
};

/// The options with groups of the factors, which carry the scale of cheap steps, before their own.
OptimizerOptions with_scales(const std::vector<nn::NamedParameter>& parameters, const LoroOptions& options) {
  std::vector<Group> groups;
  std::map<std::string, Tensor> by_name;
  for (const nn::NamedParameter& parameter : parameters) by_name.emplace(parameter.name, parameter.tensor);
  for (const FactorNames& pair : options.pairs) {
    const auto a = by_name.find(pair.a), b = by_name.find(pair.b);
    check(a != by_name.end() && b != by_name.end(), "LORO: there are no parameters ", pair.a, " and ",
          pair.b);
    const Tensor &left = b->second, &right = a->second;
    const int64_t rows = std::accumulate(pair.rows.begin(), pair.rows.end(), int64_t{0});
    check(left.rank() == 2 && right.rank() == 2 && !pair.rows.empty() && rows == left.size(0) &&
              right.size(0) == left.size(1) * int64_t(pair.rows.size()),
          "LORO: ", pair.a, " ", describe(right), " and ", pair.b, " ", describe(left),
          " are not the factors of ", pair.rows.size(), " parts of ", rows, " rows");
    const double scale = cheap_scale(options, pair, left.size(1), right.size(1));
    for (const std::string& name : {pair.a, pair.b}) {
      const nn::NamedParameter parameter{name, by_name.at(name)};
      Group own{.lr_scale = scale};
      for (const Group& given : options.groups)
        if (given.fits(parameter)) {
          own.lr_scale *= given.lr_scale, own.weight_decay = given.weight_decay, own.rule = given.rule;
          break;
        }
      own.matches = [name](const nn::NamedParameter& p) { return p.name == name; };
      groups.push_back(std::move(own));
    }
  }
  groups.insert(groups.end(), options.groups.begin(), options.groups.end());
  OptimizerOptions made = shared_options(options);
  made.groups = std::move(groups);
  return made;
}

std::function<bool(const nn::NamedParameter&)> is_factor(const LoroOptions& options) {
  std::set<std::string> names;
  for (const FactorNames& pair : options.pairs) names.insert(pair.a), names.insert(pair.b);
  return [names = std::move(names)](const nn::NamedParameter& p) { return names.contains(p.name); };
}

}  // namespace

SingularFactor parse_singular_factor(std::string_view name) {
  return parse_name<SingularFactor>("loro: there is no way to go on with a singular factor",
                                    {"error", "cheap"}, name);
}

LoroMoments parse_loro_moments(std::string_view name) {
  return parse_name<LoroMoments>("loro: there is no treatment of moments", {"reset", "keep", "reset_all"},
                                 name);
}

std::shared_ptr<Rule> loro_rule(const LoroOptions& options) {
  check(!options.pairs.empty(),
        "LORO: there are no weights made of two factors; give the model some (--form low_rank)");
  check(options.every >= 0 && options.refactor_every >= 0 && options.momentum_reset >= 0,
        "LORO: every = ", options.every, ", refactor_every = ", options.refactor_every,
        " and momentum_reset = ", options.momentum_reset, " must not be negative");
  check(options.lr_scale == -1 || options.lr_scale > 0,
        "LORO: the scale of cheap steps (--loro-lr-scale) is ", options.lr_scale,
        "; expected more than 0, or -1: rank / size");
  check(options.moments != LoroMoments::reset_all || options.momentum_reset == 0,
        "LORO: moments = reset_all and momentum_reset = ", options.momentum_reset,
        " both say when all moments are reset; give one");
  adamw_rule(options.beta1, options.beta2, options.eps);  // checks these
  return std::make_shared<LoroRule>(options);
}

Loro::Loro(std::vector<nn::NamedParameter> parameters, const LoroOptions& options)
    : Optimizer("LORO", parameters, with_scales(parameters, options),
                {{.rule = loro_rule(options), .takes = is_factor(options)},
                 {.rule = adamw_rule(
                      options.beta1, options.beta2, options.eps,
                      options.moments == LoroMoments::reset_all ? options.every : options.momentum_reset),
                  .lr_scale = options.adamw_lr_scale}}) {}

Loro Loro::from(std::vector<nn::NamedParameter> parameters, const BundledOptions& options) {
  LoroOptions own = options.loro;
  copy_shared_options(own, options);
  own.pairs = options.structure.pairs;
  return Loro(std::move(parameters), own);
}

}  // namespace tessera::optim
