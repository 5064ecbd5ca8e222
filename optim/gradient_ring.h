#pragma once

#include <memory>
#include <vector>

#include "optim/sharding.h"

namespace tessera::optim {

/// The memory of sharded gradients (ZeRO stage 2, Rajbhandari et al., section 5.2). A backward pass fills the
/// buckets in order; each occupies one of a few slots until its sum over ranks has been written to this
/// rank's part, and then the slot is reused. dist::DataParallel controls this.
///
/// Buckets that are not filled in the order of the arena cannot share slots: a token table that is also the
/// LM head's weight gets its first gradient at the beginning of the pass and its last one at the end. They
/// are "kept": they have permanent memory from the first pass on in which that happens.
class GradientRing {
 public:
  /// Three: one bucket is being filled, the one before it is being sent, and gradients of the next one may
  /// arrive early, since the order within a block is not quite that of the arena.
  static constexpr size_t kSlots = 3;

  /// Makes the slots the buffers of the parameters' gradients. `buckets` have ends.
  GradientRing(std::shared_ptr<const Packing> packing, std::vector<Bucket> buckets, int part);

  /// This rank's parts of all buckets, in the order of the arena.
  const Tensor& own() const { return own_; }
  /// This rank's part of a bucket, in own().
  Tensor own(size_t bucket) const;
  /// Where the gradients of a bucket lie, [end - begin].
  Tensor memory(size_t bucket) const;
  /// A parameter's gradient there.
  Tensor view(size_t parameter) const;
  /// Whether elements of the bucket belong to no parameter: they must be zeros when it is summed.
  bool has_pads(size_t bucket) const { return pads_[bucket]; }
  size_t slot(size_t bucket) const { return bucket % kSlots; }
  bool keeps(size_t bucket) const { return kept_[bucket].defined(); }
  /// Gives the bucket memory of its own; no gradient of it may have arrived since zero_grad().
  void keep(size_t bucket);

  /// After a pass: removes the gradients from the parameters (own() holds their sums), and notes whether
  /// there were any.
  void release();
  bool arrived() const { return arrived_; }
  /// Whether own() holds sums that no step has used; unknown for replayed passes.
  bool holds_sums() const { return holds_sums_; }
  void use_sums() { holds_sums_ = false; }
  void forget() { arrived_ = holds_sums_ = false; }
  size_t bytes() const;

 private:
  std::shared_ptr<const Packing> packing_;
  std::vector<Bucket> buckets_;
  std::vector<size_t> bucket_of_;  // by parameter
  std::vector<bool> pads_;
  std::vector<int64_t> own_at_, own_end_;  // by bucket, in own_
  std::vector<Tensor> slots_, kept_;       // kept_: by bucket, undefined for those that take turns
  Tensor own_;
  bool arrived_ = false, holds_sums_ = false;
};

}  // namespace tessera::optim
