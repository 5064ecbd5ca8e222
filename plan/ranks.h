#pragma once

#include <cstdint>
#include <vector>

#include "plan/plan.h"

namespace tessera::plan {

/// How ranks that train together are connected, and the communication of a step. Rates were measured on
/// H200s, and predict other GPUs and links only as far as they are similar.
struct RankOptions {
  int64_t ranks = 1;
  int64_t zero = 0;           // stage: what is spread over the ranks (optim::Sharding)
  int64_t micro_batches = 1;  // of a step, of each rank
  double bucket_mb = 32;      // 0: all gradients are summed after the backward pass; of stage 2: 32
  bool global_order = true;   // sums of micro-batches by a tree (dist::GradientTree)
  bool copies = true;  // copies between GPUs sum gradients that are not spread (comm::PeerSums), not NCCL
  /// Bus bandwidth in bytes per second, as defined by nccl-tests: here of a 1 GiB all-reduce between two
  /// H200s with 18 NVLinks, NCCL 2.28. For ranks on several hosts that of the slowest link.
  double bus = 327e9;
  /// Seconds of a call however small: an all-reduce of 1 MiB there. A call takes the larger of the two times,
  /// which was within 21 % of 16 MiB (0.078 ms) and 9 % of 256 MiB (0.898 ms).
  double latency = 62e-6;
  /// Seconds of one rank's micro-batches and update without communication, if they were measured; 0: by
  /// `rate` of the FLOPs.
  double compute = 0;
  /// Bytes that each rank sends within the passes of a micro-batch, which wait for them: those of attention,
  /// where several ranks share a task (count_attention_bytes).
  double within = 0;
  /// FLOPs per second that whole steps reach: GPT-2 124M, 64 x 1024 in bf16, 100.1 ms on an H200.
  double rate = 0;
};

/// What each rank holds and sends, and how long a step takes.
struct RankPlan {
  Memory memory;           // of one rank
  double sent = 0;         // bytes that leave each rank in a step, over its link
  double compute = 0;      // seconds
  double communicate = 0;  // seconds in which calls run, hidden or not
  double exposed = 0;      // seconds of communication that no computation hides
  double step() const { return compute + exposed; }
  /// Of one rank's throughput on the same micro-batches, without communication.
  double efficiency = 1;
};

/// Elements of the parameters in the order of an optimizer's arena, as far as buckets depend on them: norms
/// and biases are left out, and the matrices of a block that has no dense weights are one.
struct ArenaSizes {
  std::vector<double> elements;
  bool tied = false;  // the first is the LM head's weight, too: its gradient comes first and last
};
ArenaSizes arena_sizes(const LanguageConfig& config, const Forms& forms = {});
ArenaSizes arena_sizes(const models::TnpConfig& config);
ArenaSizes arena_sizes(const models::BertConfig& config, const BertStep& step);

/// Bytes that gradients, `whole` on one rank that adds micro-batches in place, take on each rank: with stage
/// 2 its part of them, the slots of optim::GradientRing and the buckets that it keeps; and the sums of
/// micro-batches that wait for others.
double gradient_bytes(double whole, const ArenaSizes& sizes, const RankOptions& options);

/// `memory` and `flops` of one rank that trains alone, on one micro-batch.
RankPlan plan_ranks(const Memory& memory, double flops, const ArenaSizes& sizes, const RankOptions& options);

/// The rate of whole steps of these models, from one measurement each; see RankOptions::rate.
double measured_rate(const LanguageConfig&);
double measured_rate(const models::TnpConfig&);
double measured_rate(const models::BertConfig&);

}  // namespace tessera::plan
