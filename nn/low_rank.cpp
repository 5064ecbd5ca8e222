#include "nn/low_rank.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "nn/init.h"
#include "ops/factor/factor.h"
#include "ops/gather/gather.h"
#include "ops/linear/sparse_low_rank.h"
#include "ops/matmul/matmul.h"
#include "ops/pointwise/pointwise.h"
#include "ops/shape/shape.h"
#include "runtime/philox.h"
#include "runtime/text.h"

namespace tessera::nn {
namespace {

constexpr const char* kKinds[] = {"dense", "low_rank", "cola", "sltrain", "lost"};
constexpr const char* kInits[] = {"drawn", "svd", "blank"};
constexpr const char* kChoices[] = {"random", "gradient", "residual"};

/// That many different numbers below n, ascending, each set as likely as any other. By what is left out where
/// that is less.
std::vector<int32_t> choose(int64_t n, int64_t count, const Rng& rng) {
  const RandomStream stream = rng.reserve(Device::cpu());
  const bool leaves_out = count > n / 2;
  std::vector<bool> marked(static_cast<size_t>(n));
  int64_t left = leaves_out ? n - count : count;
  for (uint64_t i = 0; left > 0; ++i) {
    const Uint4 random = philox(stream.seed, stream.offset(), i);
    const uint64_t bits = uint64_t(random.word[0]) << 32 | random.word[1];
    const auto place = size_t((static_cast<unsigned __int128>(bits) * uint64_t(n)) >> 64);
    if (marked[place]) continue;
    marked[place] = true;
    left -= 1;
  }
  std::vector<int32_t> chosen;
  for (int64_t i = 0; i < n; ++i)
    if (marked[size_t(i)] != leaves_out) chosen.push_back(int32_t(i));
  return chosen;
}

/// The `count` columns of a matrix with the largest norm, ascending; of equal ones the first.
std::vector<int32_t> largest_columns(const Tensor& matrix, int64_t count) {
  const std::vector<double> values = matrix.to(Device::cpu()).to(DType::f64).packed().to_vector<double>();
  const int64_t columns = matrix.size(1);
  std::vector<double> squares(static_cast<size_t>(columns));
  for (size_t i = 0; i < values.size(); ++i) squares[i % size_t(columns)] += values[i] * values[i];
  std::vector<int32_t> order(static_cast<size_t>(columns));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t i, int32_t j) { return squares[size_t(i)] > squares[size_t(j)]; });
  order.resize(size_t(count));
  std::sort(order.begin(), order.end());
  return order;
}

int64_t count_columns(const FactorOptions& options, int64_t in) {
  return std::clamp<int64_t>(std::llround(options.column_share * double(in)), 1, in);
}

int64_t count_stored(const FactorOptions& options, int64_t rows, int64_t in) {
  return std::llround(options.density * double(rows) * double(in));
}

void check_rank(const std::string& what, const FactorOptions& options, int64_t rows, int64_t in) {
  check(options.rank >= 1 && options.rank <= std::min(rows, in), what, ": the rank (--rank) is ",
        options.rank, "; a matrix of ", rows, " x ", in, " takes 1 to ", std::min(rows, in));
}

/// Of one part, in f32 (f64) on the weight's device.
struct MadePart {
  Tensor a, b;
  std::vector<int32_t> places;  // of the support, or of the columns
  Tensor rest;                  // the values at the support, or the columns [rows, n]
};

class Maker {
 public:
  Maker(const FactorOptions& options, const Rng& rng) : options_(options), rng_(rng) {}

  MadePart part(const Tensor& weight, const Tensor& gradient) {
    const int64_t rows = weight.size(0), in = weight.size(1), rank = options_.rank;
    MadePart made{.a = Tensor::empty({rank, in}, weight.dtype(), weight.device()),
                  .b = Tensor::empty({rows, rank}, weight.dtype(), weight.device())};
    if (options_.init == FactorInit::svd)
      from_weight(made, weight, gradient);
    else if (options_.init == FactorInit::drawn)
      draw(made, rows, in);
    else
      leave_blank(made, rows, in);
    return made;
  }

 private:
  void leave_blank(MadePart& made, int64_t rows, int64_t in) {
    made.a.fill(0), made.b.fill(0);
    const bool stores = options_.kind == FactorKind::sltrain, has_columns = options_.kind == FactorKind::lost;
    if (!stores && !has_columns) return;
    const int64_t count = stores ? count_stored(options_, rows, in) : count_columns(options_, in);
    made.places.resize(size_t(count));
    std::iota(made.places.begin(), made.places.end(), 0);
    made.rest = Tensor::zeros(stores ? Shape{count} : Shape{rows, count}, made.a.dtype(), made.a.device());
  }

  void draw(MadePart& made, int64_t rows, int64_t in) {
    const double bound = 1 / std::sqrt(double(in));
    if (options_.kind == FactorKind::sltrain) {
      init::uniform(made.a, rng_, -bound, bound);
      init::zeros(made.b);
      made.places = choose(rows * in, count_stored(options_, rows, in), rng_);
      made.rest = Tensor::empty_packed({int64_t(made.places.size())}, made.a.dtype(), made.a.device());
      init::uniform(made.rest, rng_, -bound, bound);
      return;
    }
    const bool squares =
        options_.kind == FactorKind::cola && options_.activation == ops::Activation::relu_squared;
    const double deviation =
        (squares ? 0.5 : 1.0) * std::pow(double(options_.rank), -0.25) * std::pow(double(in + rows), -0.25);
    init::normal(made.a, rng_, 0, deviation);
    init::normal(made.b, rng_, 0, deviation);
  }

  void from_weight(MadePart& made, const Tensor& weight, const Tensor& gradient) {
    const int64_t rank = options_.rank, rows = weight.size(0), in = weight.size(1);
    const ops::SvdFactors all = ops::svd(weight);
    const auto product = [&](int64_t triples) {
      return ops::matmul(ops::mul(all.u.slice(1, 0, triples), all.s.slice(0, 0, triples)),
                         all.vt.slice(0, 0, triples));
    };
    const double factor = options_.kind == FactorKind::sltrain ? options_.alpha / double(rank)
                          : options_.kind == FactorKind::lost  ? options_.gamma
                                                               : 1.0;
    const Tensor root = ops::sqrt(ops::scale(all.s.slice(0, 0, rank), 1 / factor));
    made.b.copy_from(ops::mul(all.u.slice(1, 0, rank), root));
    made.a.copy_from(ops::mul(all.vt.slice(0, 0, rank), ops::reshape(root, {rank, 1})));
    if (options_.kind == FactorKind::sltrain) {
      const Tensor rest = ops::sub(weight, product(rank));
      made.places = choose(rows * in, count_stored(options_, rows, in), rng_);
      made.rest = at_places(rest, made.places);
    }
    if (options_.kind == FactorKind::lost) {
      const Tensor rest = ops::sub(weight, product(rank));
      const int64_t left_out = options_.residual_rank ? options_.residual_rank : rank,
                    count = count_columns(options_, in);
      if (options_.columns == ColumnChoice::random)
        made.places = choose(in, count, rng_);
      else if (options_.columns == ColumnChoice::gradient)
        made.places = largest_columns(gradient, count);
      else
        made.places = largest_columns(
            left_out == rank ? rest : ops::sub(weight, product(std::min(left_out, all.s.count()))), count);
      const Tensor columns = Tensor::from(made.places, {count}, weight.device());
      made.rest = ops::scale(ops::transpose(ops::gather_rows(ops::transpose(rest, 0, 1), columns), 0, 1),
                             1 / (1 - options_.gamma));
    }
  }

  static Tensor at_places(const Tensor& matrix, const std::vector<int32_t>& places) {
    const Tensor flat = matrix.packed().reshape({matrix.count(), 1});
    return ops::gather_rows(flat, Tensor::from(places, {int64_t(places.size())}, matrix.device()))
        .packed()
        .reshape({int64_t(places.size())});
  }

  const FactorOptions& options_;
  const Rng& rng_;
};

}  // namespace

const char* name_of(FactorKind kind) {
  return kKinds[size_t(kind)];
}
FactorKind parse_factor_kind(std::string_view name) {
  return parse_name<FactorKind>("low_rank: there is no form", kKinds, name);
}
FactorInit parse_factor_init(std::string_view name) {
  return parse_name<FactorInit>("low_rank: there is no start of factors", kInits, name);
}
ColumnChoice parse_column_choice(std::string_view name) {
  return parse_name<ColumnChoice>("low_rank: there is no choice of columns", kChoices, name);
}

void FactorOptions::validate() const {
  if (kind == FactorKind::dense) return;
  check(rank >= 1, name_of(kind), ": the rank (--rank) is ", rank, "; expected 1 or more");
  check(kind != FactorKind::cola || activation == ops::Activation::silu ||
            activation == ops::Activation::relu_squared,
        "cola: the activation between the factors is ", ops::name_of(activation),
        "; expected silu or relu_squared");
  check(kind != FactorKind::cola || init != FactorInit::svd,
        "cola: no dense weight computes what factors with an activation between them do, so they cannot "
        "start from one; draw them (--factor-init drawn)");
  check(
      kind != FactorKind::lost || init != FactorInit::drawn,
      "lost: its columns are what the leading singular triples of a dense weight leave, so its factors begin "
      "with those triples; choose the init svd (--factor-init svd)");
  check(std::isfinite(alpha) && alpha > 0, name_of(kind), ": alpha (--alpha) is ", alpha,
        "; expected more than 0");
  check(density >= 0 && density <= 1, name_of(kind), ": density (--density) is ", density,
        "; expected 0 to 1");
  check(column_share >= 0 && column_share <= 1, name_of(kind), ": the share of columns (--column-share) is ",
        column_share, "; expected 0 to 1");
  check(gamma > 0 && gamma < 1, name_of(kind), ": gamma (--gamma) is ", gamma,
        "; expected more than 0 and less than 1");
  check(residual_rank >= 0, name_of(kind), ": the rank of the residual (--residual-rank) is ", residual_rank,
        "; it must not be negative");
}

FactorCounts count_factors(const FactorOptions& options, int64_t rows, int64_t in) {
  const double dense = double(rows) * double(in), rank = double(options.rank);
  if (options.kind == FactorKind::dense) return {dense, dense, 0};
  check_rank(name_of(options.kind), options, rows, in);
  const double both = rank * double(rows + in);
  switch (options.kind) {
    case FactorKind::sltrain:
      return {both + double(count_stored(options, rows, in)), dense, 0};
    case FactorKind::lost: {
      const double columns = double(count_columns(options, in));
      return {both + columns * double(rows), both + columns * double(rows), rank + columns};
    }
    default:
      return {both, both, options.kind == FactorKind::cola ? 2 * rank : rank};
  }
}

void factorize(Linear& layer, const std::vector<int64_t>& rows, const FactorOptions& options, const Rng& rng,
               const Tensor& gradient) {
  const NoTape no_tape;
  const char* const kind = name_of(options.kind);
  options.validate();
  check(options.kind != FactorKind::dense, "factorize: the kind is dense; leave the layer as it is");
  check(is_dense(layer.form) && layer.weight.defined(), kind, ": the layer is ",
        is_dense(layer.form) ? "tied" : name_of(layer.form),
        "; only a dense weight of its own becomes factors");
  check(std::accumulate(rows.begin(), rows.end(), int64_t{0}) == layer.out, kind,
        ": the rows of the parts do not add up to ", layer.out);
  const bool by_gradient = options.kind == FactorKind::lost && options.init == FactorInit::svd &&
                           options.columns == ColumnChoice::gradient;
  check(!by_gradient || (gradient.defined() && gradient.shape() == layer.weight.shape()), kind,
        ": columns by their gradient need that of the weight ", layer.weight.shape());
  for (const int64_t each : rows) check_rank(kind, options, each, layer.in);
  check(options.kind != FactorKind::sltrain || layer.out <= std::numeric_limits<int32_t>::max() / layer.in,
        kind, ": a weight of ", layer.out, " x ", layer.in, " elements; its places are counted in 31 bits");

  const Tensor weight = layer.weight.detach();
  const DType dtype = weight.dtype(), wide = dtype == DType::f64 ? dtype : DType::f32;
  const Device device = weight.device();
  const int64_t parts = int64_t(rows.size()), rank = options.rank, out = layer.out;
  Factors factors{.a = Tensor::empty({parts * rank, layer.in}, dtype, device),
                  .b = Tensor::empty({out, rank}, dtype, device),
                  .rows = rows};
  Maker maker(options, rng);
  std::vector<int32_t> places;
  std::vector<Tensor> rest;
  int64_t row = 0;
  for (int64_t p = 0; p < parts; ++p) {
    const int64_t end = row + rows[size_t(p)];
    const MadePart made = maker.part(weight.slice(0, row, end).to(wide),
                                     by_gradient ? gradient.detach().slice(0, row, end) : Tensor());
    factors.a.slice(0, p * rank, (p + 1) * rank).copy_from(made.a);
    factors.b.slice(0, row, end).copy_from(made.b);
    const bool counts_elements = options.kind == FactorKind::sltrain;
    for (const int32_t place : made.places)
      places.push_back(int32_t(place + (counts_elements ? row * layer.in : 0)));
    if (made.rest.defined()) rest.push_back(made.rest);
    row = end;
  }
  // Such a layer begins as zeros, since b does, and layers of zeros around it get no gradients.
  check(options.kind != FactorKind::sltrain || options.init != FactorInit::drawn || !places.empty(),
        "sltrain: a density (--density) of ", options.density, " leaves no element of a weight of ", out,
        " x ", layer.in, ", which would never learn; give a density of ",
        1 / (double(*std::ranges::max_element(rows)) * double(layer.in)), " or more");
  make_parameter(factors.a), make_parameter(factors.b);
  Tensor joined = rest.empty() ? Tensor() : ops::concat(rest, 0).to(dtype).packed();
  if (joined.defined()) make_parameter(joined);
  const Tensor index = Tensor::from(places, {int64_t(places.size())}, device);
  switch (options.kind) {
    case FactorKind::cola:
      layer.form = Cola{factors, options.activation};
      break;
    case FactorKind::sltrain:
      layer.form = SparsePlusLowRank{factors, joined, index, options.alpha / double(rank)};
      break;
    case FactorKind::lost:
      layer.form = ColumnsPlusLowRank{factors, joined, index, options.gamma};
      break;
    default:
      layer.form = LowRank{factors};
  }
  layer.weight = Tensor();
}

bool merges(const Form& form) {
  return is_dense(form) || (factors_of(form) && !std::holds_alternative<Cola>(form));
}

const Factors* factors_of(const Form& form) {
  return std::visit(
      [](const auto& one) -> const Factors* {
        if constexpr (requires { one.factors; })
          return &one.factors;
        else
          return nullptr;
      },
      form);
}

std::vector<FactorPair> pairs_of(const Factors& factors) {
  std::vector<FactorPair> pairs;
  const Tensor a = factors.a.detach(), b = factors.b.detach();
  int64_t row = 0;
  for (const int64_t rows : factors.rows) {
    const int64_t factor = int64_t(pairs.size()) * factors.rank();
    pairs.push_back({b.slice(0, row, row + rows), a.slice(0, factor, factor + factors.rank())});
    row += rows;
  }
  return pairs;
}

Tensor merged_weight(const Linear& layer) {
  const NoTape no_tape;
  check(merges(layer.form), "merged_weight: the layer is ", name_of(layer.form), "; it has no dense weight");
  if (is_dense(layer.form)) return layer.weight;
  const Factors& factors = *factors_of(layer.form);
  const DType dtype = factors.a.dtype(), wide = dtype == DType::f64 ? dtype : DType::f32;
  if (const auto* const sparse = std::get_if<SparsePlusLowRank>(&layer.form)) {
    const ops::SparseLowRank w = sparse->weight();
    return ops::sparse_low_rank_weight({w.a.detach().to(wide), w.b.detach().to(wide),
                                        w.values.detach().to(wide), w.support, w.rows, w.scale})
        .to(dtype);
  }
  const Tensor merged = Tensor::empty({layer.out, layer.in}, dtype, factors.a.device());
  const auto* const lost = std::get_if<ColumnsPlusLowRank>(&layer.form);
  int64_t row = 0, part = 0;
  for (const FactorPair& pair : pairs_of(factors)) {
    const int64_t end = row + pair.b.size(0);
    Tensor product = ops::matmul(pair.b.to(wide), pair.a.to(wide));
    if (lost) {
      const int64_t count = lost->c.size(1);
      const Tensor columns =
          ops::scatter_rows(ops::transpose(lost->c.detach().slice(0, row, end).to(wide), 0, 1),
                            lost->columns.slice(0, part * count, (part + 1) * count), layer.in);
      product = ops::add(ops::scale(product, lost->gamma),
                         ops::scale(ops::transpose(columns, 0, 1), 1 - lost->gamma));
    }
    merged.slice(0, row, end).copy_from(product);
    row = end, part += 1;
  }
  return merged;
}

}  // namespace tessera::nn
