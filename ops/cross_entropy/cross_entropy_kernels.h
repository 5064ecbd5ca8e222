#pragma once

#include "ops/cross_entropy/cross_entropy.h"

namespace tessera::ops {

/// logits has rows; targets is packed; top (the row's maximum) and log_sum (log of the sum of exp(x - top))
/// are [rows]; count, of one element, is the number of rows not ignored. Those three and loss are in
/// sum_dtype; loss is packed, of the shape of targets for Reduction::none, else of rank 0.
struct CrossEntropyForward {
  const Tensor &loss, &top, &log_sum, &count, &logits, &targets;
  const CrossEntropyOptions& options;
};
void cross_entropy_forward_cpu(const CrossEntropyForward& args);
void cross_entropy_forward_cuda(const CrossEntropyForward& args);
/// Forward for one loss, and over the logits their gradients for dloss (of rank 0; undefined: 1); top and
/// log_sum are not used.
void cross_entropy_in_place_cpu(const CrossEntropyForward& args, const Tensor& dloss);
void cross_entropy_in_place_cuda(const CrossEntropyForward& args, const Tensor& dloss);
/// dlogits, which has rows, times dloss / made_for, of one element each (made_for undefined: 1); nothing if
/// that is 1.
void cross_entropy_scale_cpu(const Tensor& dlogits, const Tensor& dloss, const Tensor& made_for);
void cross_entropy_scale_cuda(const Tensor& dlogits, const Tensor& dloss, const Tensor& made_for);

/// dlogits has rows and may be logits; dloss, as loss, is packed.
struct CrossEntropyBackward {
  const Tensor &dlogits, &dloss, &top, &log_sum, &count, &logits, &targets;
  const CrossEntropyOptions& options;
};
void cross_entropy_backward_cpu(const CrossEntropyBackward& args);
void cross_entropy_backward_cuda(const CrossEntropyBackward& args);

}  // namespace tessera::ops
