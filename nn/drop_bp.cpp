#include "nn/drop_bp.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "autograd/tape.h"
#include "runtime/capture.h"
#include "runtime/philox.h"

namespace tessera::nn {
namespace {

/// The objects that live on this thread.
std::vector<const DropBP*>& living() {
  static thread_local std::vector<const DropBP*> all;
  return all;
}

// A share of FLOPs that is short of its target by rounding alone has reached it.
constexpr double kRounding = 1e-12;

/// FLOPs of the dropped branches, as a share of those of all.
double share_of(const std::vector<bool>& dropped, const std::vector<double>& flops) {
  double all = 0, gone = 0;
  for (size_t i = 0; i < flops.size(); ++i) {
    all += flops[i];
    if (dropped[i]) gone += flops[i];
  }
  return gone / all;
}

}  // namespace

void DropBP::add(const std::string& name, const void* layer, double flops) {
  branches_.push_back({name, flops});
  layers_.push_back(layer);
}

void DropBP::enter() {
  check(!branches_.empty(),
        "nn::DropBP: the model has no residual branch to drop: neither an attention layer nor "
        "a feed-forward network");
  rates_.assign(size(), 0);
  dropped_.assign(size(), false);
  living().push_back(this);
  active_ = true;
}

DropBP::~DropBP() {
  std::erase(living(), this);
  active_ = !living().empty();
}

bool DropBP::finds(const void* layer) {
  for (const DropBP* each : living()) {
    const auto found = std::ranges::find(each->layers_, layer);
    if (found == each->layers_.end()) continue;
    check(!CaptureSession::current(), "nn::DropBP: the call of ",
          each->branches_[size_t(found - each->layers_.begin())].name,
          " is being captured, and replays would drop the same branches in every step; run the step eagerly");
    if (each->dropped_[size_t(found - each->layers_.begin())]) return true;
  }
  return false;
}

Tensor DropBP::pass_residual(Tensor y, const Tensor& residual) {
  if (Tape* const tape = residual.defined() ? Tape::recording(residual) : nullptr)
    tape->record("drop_bp", {&residual}, {&y}, [](Backward& b) { b.pass(0, {0}); });
  return y;
}

double DropBP::flops_of(const SelfAttention& attention, int64_t tokens) {
  const double products = 4 * double(tokens) * double(attention.heads * attention.head_dim);
  return attention.qkv.flops(1) + attention.out.flops(1) + products;
}

double DropBP::flops_of(const Mlp& mlp) {
  return mlp.up.flops(1) + mlp.down.flops(1);
}

void DropBP::set_rates(std::vector<double> rates) {
  check(rates.size() == size(), "nn::DropBP: ", rates.size(), " rates for ", size(), " branches");
  for (size_t i = 0; i < size(); ++i)
    check(rates[i] >= 0 && rates[i] <= 1, "nn::DropBP: the rate of ", branches_[i].name, " is ", rates[i],
          "; expected a number from 0 to 1");
  rates_ = std::move(rates);
}

void DropBP::set_dropped(std::vector<bool> dropped) {
  check(dropped.size() == size(), "nn::DropBP: ", dropped.size(), " decisions for ", size(), " branches");
  dropped_ = std::move(dropped);
}

std::vector<double> DropBP::flops() const {
  std::vector<double> each;
  for (const Branch& branch : branches_) each.push_back(branch.flops);
  return each;
}

double DropBP::dropped_share() const {
  return share_of(dropped_, flops());
}

void DropBP::draw(double least, uint64_t seed, uint64_t step) {
  dropped_ = draw_branches(rates_, flops(), least, seed, step);
}

std::vector<bool> draw_branches(const std::vector<double>& rates, const std::vector<double>& flops,
                                double least, uint64_t seed, uint64_t step) {
  check(least >= 0 && least <= 1, "nn::DropBP: at least ", least, " of the FLOPs; expected 0 to 1");
  const auto word = [&](uint64_t purpose, size_t i) {
    return philox(seed, step, purpose << 32 | i / 4).word[i % 4];
  };
  std::vector<size_t> order(rates.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::vector<bool> dropped;
  for (const size_t i : order) dropped.push_back(double(word(0, i)) < rates[i] * 4294967296.0);
  // In a fixed order the first of equal rates would be forced in nearly every step, the last in none.
  std::ranges::stable_sort(order, [&](size_t a, size_t b) {
    return std::pair(-rates[a], word(1, a)) < std::pair(-rates[b], word(1, b));
  });
  for (const size_t i : order) {
    if (share_of(dropped, flops) >= least - kRounding) break;
    dropped[i] = true;
  }
  return dropped;
}

std::vector<int> allocate_drop_rates(const std::vector<double>& sensitivities,
                                     const std::vector<double>& flops, double target) {
  const size_t count = flops.size();
  check(count > 0 && sensitivities.size() == count, "allocate_drop_rates: ", sensitivities.size(),
        " sensitivities and the FLOPs of ", count, " branches; expected one of each per branch");
  check(target >= 0 && target <= 0.9 + kRounding, "allocate_drop_rates: a target of ", target,
        " of the FLOPs; expected 0 to 0.9, what rates of at most 0.9 reach");
  for (size_t i = 0; i < count; ++i)
    check(std::isfinite(sensitivities[i]) && sensitivities[i] >= 0 && flops[i] > 0,
          "allocate_drop_rates: branch ", i, " has sensitivity ", sensitivities[i], " and ", flops[i],
          " FLOPs; expected a finite number of at least 0, and more than 0 FLOPs");
  std::vector<int> tenths(count, target >= 0.1 ? 1 : 0);
  const double all = std::accumulate(flops.begin(), flops.end(), 0.0);
  const auto dropped = [&] {
    double sum = 0;
    for (size_t i = 0; i < count; ++i) sum += flops[i] * tenths[i];
    return sum;
  };
  while (dropped() < 10 * all * (target - kRounding)) {
    size_t best = count;
    const auto harm = [&](size_t i) { return sensitivities[i] * (tenths[i] + 1); };
    for (size_t i = 0; i < count; ++i)
      if (tenths[i] < 9 && (best == count || harm(i) < harm(best))) best = i;
    check(best < count, "allocate_drop_rates: rates of 0.9 do not reach ", target);
    ++tenths[best];
  }
  return tenths;
}

}  // namespace tessera::nn
