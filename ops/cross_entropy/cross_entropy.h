#pragma once

#include "ops/reduction.h"
#include "tensor/tensor.h"

namespace tessera::ops {

struct CrossEntropyOptions {
  int64_t ignore_index = -100;  // rows with this target have loss 0 and gradient 0
  double label_smoothing = 0;   // e in [0, 1]
  Reduction reduction = Reduction::mean;
  /// The caller gives the logits away: while a tape records, forward writes their gradient over them, so that
  /// forward and backward are one read and one write and no second tensor of that size exists. Not for
  /// Reduction::none, nor for logits that are a leaf or have no rows. If another operator saved the logits
  /// for backward is told (see Saved). Without a tape nothing is overwritten.
  bool overwrite_logits = false;
};

/// Of each row x of logits [..., V] with target t of targets [...] (i64 or i32) and p = softmax(x):
///   loss = -(1 - e) log p_t - (e / V) sum_v log p_v        dx_v = g (p_v - (1 - e) [v = t] - e / V)
/// where e is label_smoothing (Szegedy et al., arXiv:1512.00567, section 7) and g the gradient of the row's
/// loss. mean divides by the number of rows whose target is not ignore_index: NaN if there are none, as 0 / 0
/// (PyTorch agrees), while the gradient is 0 in each of those rows; sum of nothing is 0; none keeps the shape
/// of targets.
///
/// A target outside [0, V) that is not ignore_index: on the CPU an error that names its position and value;
/// on a GPU, where the host does not wait to look, that row's loss, and with it mean and sum, and that row's
/// gradient are NaN. An ignore_index inside [0, V) is legal. A logit of -inf has probability 0.
/// Rounding: computed in f32 (f64 for f64), sums over the classes on the CPU in f64. The loss is f32 (f64),
/// not rounded further; sum and mean are added in a fixed order in double; dlogits are rounded once, with
/// overwrite_logits once more if the loss's gradient is not what Tape::backward(loss) begins with (1, or the
/// tape's loss scale). Kept for
/// backward: logits, targets, and maximum and log-sum-exp above it of every row in f32 (f64); with
/// overwrite_logits only what lies in the logits' place. Throws for shapes, dtypes or devices that do not
/// fit, V = 0 with rows, label_smoothing outside [0, 1], and logits that cannot be overwritten.
Tensor cross_entropy(const Tensor& logits, const Tensor& targets, const CrossEntropyOptions& options = {},
                     Site site = Site::here());

}  // namespace tessera::ops
