#include "plan/ranks.h"

#include <algorithm>
#include <bit>
#include <numeric>

#include "comm/peer_sums.h"
#include "models/tnp.h"

namespace tessera::plan {
namespace {

constexpr size_t kSlots = 3;  // optim::GradientRing::kSlots

/// Bytes of buckets of gradients that are `whole` together, in the order in which they travel
/// (optim::buckets_of).
std::vector<double> buckets_of(double whole, const ArenaSizes& sizes, double bucket_mb) {
  const double most = bucket_mb * (1 << 20);
  const double element = whole / std::accumulate(sizes.elements.begin(), sizes.elements.end(), 0.0);
  std::vector<double> buckets;
  for (size_t i = sizes.elements.size(); i-- > 0;) {
    if (buckets.empty() || buckets.back() >= most) buckets.push_back(0);
    buckets.back() += sizes.elements[i] * element;
  }
  return buckets;
}

double bucket_mb(const RankOptions& options) {
  return options.bucket_mb > 0 ? options.bucket_mb : 32;
}

}  // namespace

ArenaSizes arena_sizes(const models::TnpConfig& c) {
  const double d = double(c.d_model), f = double(c.d_ff);
  ArenaSizes sizes;
  sizes.elements = {double(c.features + 1) * double(c.embed_hidden), double(c.embed_hidden) * d};
  for (int64_t i = 0; i < c.layers; ++i) {
    for (const double matrix : {d * d, 2 * d * d, d * d, d * f, f * d}) sizes.elements.push_back(matrix);
  }
  for (const double in : {d, 3.0}) sizes.elements.push_back(double(c.components) * f * in);
  return sizes;
}

double gradient_bytes(double whole, const ArenaSizes& sizes, const RankOptions& options) {
  const bool spreads = options.ranks > 1 && options.zero > 1;
  const double part = spreads ? whole / double(options.ranks) : whole;
  // Sums of 1, 2, 4, ... micro-batches that wait; stage 2 forms them in either order.
  const bool tree = options.micro_batches > 1 && (spreads || options.global_order);
  double bytes = part * (1 + (tree ? double(std::bit_width(uint64_t(options.micro_batches - 1))) : 0));
  if (!spreads) return bytes;
  const std::vector<double> buckets = buckets_of(whole, sizes, bucket_mb(options));
  double slots[kSlots] = {};
  for (size_t b = 0; b < buckets.size(); ++b) slots[b % kSlots] = std::max(slots[b % kSlots], buckets[b]);
  for (const double slot : slots) bytes += slot;
  // The last bucket, which holds a tied table, comes before its turn.
  return bytes + (sizes.tied && buckets.size() > kSlots ? buckets.back() : 0);
}

RankPlan plan_ranks(const Memory& memory, double flops, const ArenaSizes& sizes, const RankOptions& options) {
  const double ranks = double(options.ranks), around = (ranks - 1) / ranks, gradients = memory.gradients;
  const bool spreads_states = options.ranks > 1 && options.zero > 0,
             spreads = spreads_states && options.zero > 1;
  RankPlan plan{.memory = memory};
  plan.memory.gradients = gradient_bytes(gradients, sizes, options);
  if (spreads_states) plan.memory.optimizer /= ranks;
  const double passes = double(options.micro_batches);
  plan.compute = options.compute > 0 ? options.compute : passes * flops / options.rate;
  const double alone = plan.compute;
  if (options.ranks == 1) return plan;
  if (options.copies && !spreads) plan.memory.transient += comm::PeerSums::kReceived;

  const double summed = gradients * (spreads ? passes : 1);
  plan.sent = spreads_states ? around * (summed + memory.parameters) : 2 * around * summed;
  const auto call = [&](double bytes) { return std::max(options.latency, bytes / options.bus); };
  // Of a bucket: bytes on the bus.
  const double factor = (spreads_states ? 1 : 2) * around;
  const double buckets_mb = spreads_states ? bucket_mb(options) : options.bucket_mb;
  if (buckets_mb == 0) {
    plan.communicate = plan.exposed = call(factor * gradients);
  } else {
    // Buckets fill while the backward pass, two thirds of a micro-batch, goes on; a tied table at its end.
    const std::vector<double> buckets = buckets_of(gradients, sizes, buckets_mb);
    const double backward = 2.0 / 3 * plan.compute / passes, held = sizes.tied ? buckets.back() : 0;
    double filled = 0, free = 0;
    for (const double bucket : buckets) {
      filled += bucket;
      const double ready = backward * std::min(1.0, filled / std::max(1.0, gradients - held));
      free = std::max(free, ready) + call(factor * bucket);
      plan.communicate += call(factor * bucket);
    }
    // With spread gradients every micro-batch sends its own.
    const double times = spreads ? passes : 1;
    plan.communicate *= times;
    plan.exposed = times * std::max(0.0, free - backward);
  }
  if (spreads_states) {
    // After the update: the sums of squares, a small call, and the weights.
    const double after = options.latency + call(around * memory.parameters);
    plan.communicate += after;
    plan.exposed += after;
    // The update of the rest is the other ranks'. AdamW reads gradient, moments and master and writes all but
    // the gradient: 7 f32 streams and the weight, at the 4.28 TB/s of an H200's copies.
    constexpr double kCopy = 4.281e12;
    if (options.compute == 0)
      plan.compute = std::max(0.5 * alone, alone - around * (7 * gradients + memory.parameters) / kCopy);
  }
  plan.sent += passes * options.within;
  plan.communicate += passes * options.within / options.bus;
  plan.exposed += passes * options.within / options.bus;
  plan.efficiency = alone / plan.step();
  return plan;
}

double measured_rate(const LanguageConfig&) {
  models::GptConfig gpt2;  // 124M
  gpt2.dtype = DType::bf16;
  return count_flops(gpt2, 64, 1024).step() / 100.1e-3;
}

double measured_rate(const models::TnpConfig&) {
  models::TnpConfig tnp;
  tnp.dtype = DType::bf16;
  return count_flops(tnp, 64, 64, 500).step() / 16.23e-3;
}

double measured_rate(const models::BertConfig&) {
  models::BertConfig base;  // 16 x 512, a classifier
  base.head = models::BertHead::classify, base.dtype = DType::bf16;
  return step_flops(base, 16 * 512, 512) / 11.16e-3;
}

}  // namespace tessera::plan
