#include "eval/activation_sparsity.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "nn/low_rank.h"
#include "ops/linear/linear.h"
#include "ops/select/select.h"

namespace tessera::eval {
namespace {

/// The matrix on the host, in f32, and which columns stand apart.
struct Activations {
  int64_t tokens, columns;
  std::vector<float> at;

  explicit Activations(const Tensor& a)
      : tokens(a.count() / std::max<int64_t>(1, a.size(-1))),
        columns(a.size(-1)),
        at(a.detach().to(Device::cpu()).to_vector<float>()) {}
  float operator()(int64_t token, int64_t column) const { return at[size_t(token * columns + column)]; }

  std::vector<int64_t> counts() const {
    std::vector<int64_t> found(size_t(columns), 0);
    for (size_t i = 0; i < at.size(); ++i) found[i % size_t(columns)] += at[i] != 0;
    return found;
  }
  double energy() const {
    double sum = 0;
    for (const float value : at) sum += double(value) * value;
    return sum;
  }
};

/// The two of four that are kept, as bits: of equal ones the first.
template <class At>
int keep_two(At&& at) {
  int kept = 0;
  for (int turn = 0; turn < 2; ++turn) {
    int best = -1;
    for (int i = 0; i < 4; ++i)
      if (!(kept >> i & 1) && (best < 0 || std::abs(at(i)) > std::abs(at(best)))) best = i;
    kept |= 1 << best;
  }
  return kept;
}

struct Dropped {
  double features = 0, both = 0;  // energy
};
Dropped dropped_energy(const Activations& a, const std::vector<bool>& apart) {
  Dropped dropped;
  const auto value = [&](const std::vector<float>& of, int64_t token, int64_t column) {
    return token < a.tokens && column < a.columns && !apart[size_t(column)]
               ? of[size_t(token * a.columns + column)]
               : 0.0f;
  };
  std::vector<float> kept = a.at;
  for (int64_t token = 0; token < a.tokens; ++token)
    for (int64_t first = 0; first < a.columns; first += 4) {
      const auto at = [&](int i) { return value(a.at, token, first + i); };
      const int keeps = keep_two(at);
      for (int i = 0; i < 4; ++i)
        if (!(keeps >> i & 1) && at(i) != 0) {
          dropped.features += double(at(i)) * at(i);
          kept[size_t(token * a.columns + first + i)] = 0;
        }
    }
  dropped.both = dropped.features;
  for (int64_t first = 0; first < a.tokens; first += 4)
    for (int64_t column = 0; column < a.columns; ++column) {
      const auto at = [&](int i) { return value(kept, first + i, column); };
      const int keeps = keep_two(at);
      for (int i = 0; i < 4; ++i)
        if (!(keeps >> i & 1)) dropped.both += double(at(i)) * at(i);
    }
  return dropped;
}

/// Columns by falling counts, of equal ones the first.
std::vector<int64_t> from_the_densest(const std::vector<int64_t>& counts) {
  std::vector<int64_t> order(counts.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t l, int64_t r) { return counts[size_t(l)] > counts[size_t(r)]; });
  return order;
}

std::vector<bool> densest(const std::vector<int64_t>& counts, int64_t columns) {
  std::vector<bool> apart(counts.size(), false);
  const std::vector<int64_t> order = from_the_densest(counts);
  for (int64_t i = 0; i < columns; ++i) apart[size_t(order[size_t(i)])] = true;
  return apart;
}

double neighbour_correlation(const Activations& a, const std::vector<int64_t>& counts) {
  if (a.tokens < 2) return 0;
  double together = 0, most = 0;
  for (int64_t column = 0; column < a.columns; ++column) {
    int64_t both = 0;
    for (int64_t token = 0; token + 1 < a.tokens; ++token)
      both += a(token, column) != 0 && a(token + 1, column) != 0;
    const double p = double(counts[size_t(column)]) / double(a.tokens);
    together += double(both) / double(a.tokens - 1) - p * p;
    most += p * (1 - p);
  }
  return most > 0 ? together / most : 0;
}

}  // namespace

double ActivationSparsity::zeros() const {
  const double all = double(tokens) * double(counts.size());
  return all > 0 ? 1 - double(std::accumulate(counts.begin(), counts.end(), int64_t{0})) / all : 0;
}

double ActivationSparsity::column_zeros(double q) const {
  if (counts.empty() || tokens == 0) return 0;
  std::vector<int64_t> sorted = counts;
  std::sort(sorted.begin(), sorted.end(), std::greater<>());
  const auto at = size_t(std::lround(q * double(sorted.size() - 1)));
  return 1 - double(sorted[at]) / double(tokens);
}

ActivationSparsity activation_sparsity(const Tensor& a, double dense_share) {
  check(a.defined() && is_floating(a.dtype()) && a.rank() >= 1, "activation_sparsity: a is ", describe(a),
        "; expected floating activations [..., columns]");
  check(dense_share >= 0 && dense_share <= 1, "activation_sparsity: dense_share is ", dense_share,
        "; expected 0 to 1");
  const Activations all(a);
  ActivationSparsity result{.tokens = all.tokens, .counts = all.counts()};
  const double energy = all.energy();
  result.neighbours = neighbour_correlation(all, result.counts);
  if (energy <= 0) return result;
  const auto share = [&](double dropped) { return dropped / energy; };
  const Dropped whole = dropped_energy(all, std::vector<bool>(result.counts.size(), false));
  result.dropped_features = share(whole.features), result.dropped_both = share(whole.both);
  const int64_t columns = dense_share > 0 ? ops::share_of_rows(all.columns, dense_share) : 0;
  const Dropped split = columns > 0 ? dropped_energy(all, densest(result.counts, columns)) : whole;
  result.dropped_features_split = share(split.features), result.dropped_both_split = share(split.both);
  return result;
}

int64_t dense_columns_for(const Tensor& a, double dropped) {
  const Activations all(a);
  const std::vector<int64_t> counts = all.counts();
  const double most = dropped * all.energy();
  // What is dropped falls with the columns set apart, but for what leaves a group: bisection finds a bound.
  int64_t enough = all.columns, few = -1;
  while (enough - few > 1) {
    const int64_t middle = few + (enough - few) / 2;
    (dropped_energy(all, densest(counts, middle)).both <= most ? enough : few) = middle;
  }
  return enough;
}

void ActivationMeter::see(const nn::LinearCall& call) {
  if (const auto found = cola_.find(call.name); found != cola_.end()) {
    const std::vector<nn::FactorPair> pairs = nn::pairs_of(found->second->factors);
    for (size_t p = 0; p < pairs.size(); ++p)
      measure(pairs.size() == 1 ? call.name : call.name + "." + std::to_string(p),
              ops::activation(ops::linear(call.input, pairs[p].a), found->second->activation));
  }
  constexpr std::string_view kSecond = ".mlp.down", kLayer = ".down";
  if (!call.name.ends_with(kSecond)) return;
  const std::string network = call.name.substr(0, call.name.size() - kLayer.size());
  if (!left_out_.contains(network)) measure(network, call.input);
}

void ActivationMeter::measure(const std::string& name, const Tensor& activations) {
  if (!networks_.contains(name)) networks_.emplace(name, activation_sparsity(activations, dense_share_));
}

std::vector<std::string> ActivationMeter::names() const {
  std::vector<std::string> list;
  for (const auto& [name, measured] : networks_) list.push_back(name);
  std::stable_sort(list.begin(), list.end(),
                   [](const std::string& l, const std::string& r) { return l.size() < r.size(); });
  return list;
}

}  // namespace tessera::eval
