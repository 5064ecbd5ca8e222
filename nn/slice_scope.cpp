#include "nn/slice_scope.h"

#include <utility>

#include "nn/attention.h"

namespace tessera::nn {

constinit thread_local SliceScope* SliceScope::current_ = nullptr;

SliceScope::SliceScope(const AttentionPass* pass, std::shared_ptr<ops::SharedRows> shared)
    : outer_(std::exchange(current_, this)), pass_(pass), shared_(std::move(shared)) {}

SliceScope SliceScope::of_shared_rows() {
  return {current_ ? current_->pass_ : nullptr, std::make_shared<ops::SharedRows>()};
}

Slice SliceScope::completed(const Slice& slice) {
  Slice whole = slice;
  if (!current_) return whole;
  if (current_->pass_) whole.valid = current_->pass_->valid_rows();
  whole.shared = current_->shared_;
  return whole;
}

}  // namespace tessera::nn
