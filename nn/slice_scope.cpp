#include "nn/slice_scope.h"

#include "nn/attention.h"

namespace tessera::nn {

SliceScope SliceScope::of_shared_rows() {
  return {current_ ? current_->pass_ : nullptr, std::make_shared<ops::SharedRows>()};
}

SlicedBackward SliceScope::completed(const SlicedBackward& slice) {
  SlicedBackward whole = slice;
  if (!current_) return whole;
  if (current_->pass_) whole.valid = current_->pass_->valid_rows();
  whole.shared = current_->shared_;
  return whole;
}

}  // namespace tessera::nn
