#include "optim/gradient_ring.h"

#include <algorithm>
#include <utility>

#include "runtime/allocator.h"
#include "runtime/capture.h"

namespace tessera::optim {

GradientRing::GradientRing(std::shared_ptr<const Packing> packing, std::vector<Bucket> buckets, int part)
    : packing_(std::move(packing)),
      buckets_(std::move(buckets)),
      bucket_of_(packing_->parameters().size()),
      own_at_(buckets_.size()),
      own_end_(buckets_.size()),
      kept_(buckets_.size()) {
  int64_t own = 0;
  for (size_t b = buckets_.size(); b-- > 0;) {  // buckets begin at the end of the arena
    const Bucket& bucket = buckets_[b];
    own_at_[b] = own;
    own += bucket.ends[size_t(part)] - (part == 0 ? bucket.begin : bucket.ends[size_t(part - 1)]);
    own_end_[b] = own;
  }
  int64_t sizes[kSlots] = {};
  for (size_t b = 0; b < buckets_.size(); ++b) {
    const Bucket& bucket = buckets_[b];
    int64_t elements = 0;
    for (const size_t parameter : bucket.parameters) {
      bucket_of_[parameter] = b;
      elements += packing_->parameters()[parameter].tensor.count();
    }
    pads_.push_back(elements != bucket.end - bucket.begin);
    sizes[slot(b)] = std::max(sizes[slot(b)], bucket.end - bucket.begin);
  }
  const auto made = [&](int64_t elements) {
    return Tensor::zeros({elements}, packing_->compute_dtype(), packing_->device());
  };
  own_ = made(own);
  for (const int64_t size : sizes) slots_.push_back(made(size));
  for (size_t i = 0; i < bucket_of_.size(); ++i) set_grad_buffer(packing_->parameters()[i].tensor, view(i));
}

Tensor GradientRing::own(size_t bucket) const {
  return own_.slice(0, own_at_[bucket], own_end_[bucket]);
}

Tensor GradientRing::memory(size_t bucket) const {
  return keeps(bucket) ? kept_[bucket]
                       : slots_[slot(bucket)].slice(0, 0, buckets_[bucket].end - buckets_[bucket].begin);
}

Tensor GradientRing::view(size_t parameter) const {
  const size_t bucket = bucket_of_[parameter];
  return packing_->view(memory(bucket), parameter, buckets_[bucket].begin);
}

void GradientRing::keep(size_t bucket) {
  const MemoryTag tag("optimizer");
  kept_[bucket] = Tensor::zeros({buckets_[bucket].end - buckets_[bucket].begin}, packing_->compute_dtype(),
                                packing_->device());
  for (const size_t parameter : buckets_[bucket].parameters)
    set_grad_buffer(packing_->parameters()[parameter].tensor, view(parameter));
}

void GradientRing::release() {
  for (const nn::NamedParameter& parameter : packing_->parameters()) {
    arrived_ = arrived_ || grad(parameter.tensor).defined();
    zero_grad(parameter.tensor);
  }
  holds_sums_ = !CaptureSession::current();  // what is captured has not run
}

size_t GradientRing::bytes() const {
  size_t bytes = own_.bytes();
  for (const auto* list : {&slots_, &kept_})
    for (const Tensor& tensor : *list) bytes += tensor.defined() ? tensor.bytes() : 0;
  return bytes;
}

}  // namespace tessera::optim
