#pragma once

#include <vector>

#include "comm/communicator.h"
#include "comm/row_split.h"

/// Differentiable collectives: models that are split over ranks call them like operators.
///
/// All ranks of the group make the same calls in the same order and record the same entries; their backward
/// functions make collective calls too, in reverse order. Any transport; issued to the compute stream; can be
/// captured.

namespace tessera::comm {

/// All-gather: this rank's rows x [n_r, ...] -> [n, ...], in the order of the segments; any dtype.
///
/// Backward is a reduce-scatter: each rank receives the gradients of its rows from the others in the dtype of
/// x, sums them by the tree of Communicator in f32 (f64 for f64) and rounds the sum once. A rank sends (p -
/// 1) n_r rows in forward and n - n_r in backward, in the dtype of x. Unevenly divided rows cost one more
/// copy in backward. Saves nothing.
Tensor gather_rows(const Communicator& group, const Tensor& x, const RowSplit& rows,
                   Site site = Site::here());

/// All-to-all from a split by rows to a split by heads: x[i] [n_r, B, H, D], this rank's rows of all heads,
/// -> [n, B, H / p, D], all rows of heads r H / p to (r + 1) H / p - 1; one call for all tensors. rows[i]:
/// how x[i] is split. Backward is heads_to_rows of the gradients; nothing is summed or rounded. Any dtype,
/// the same for all x. Throws unless p divides H. Saves nothing.
std::vector<Tensor> rows_to_heads(const Communicator& group, const std::vector<Tensor>& x,
                                  const std::vector<RowSplit>& rows, Site site = Site::here());
/// The inverse: x [n, B, H / p, D] -> [n_r, B, H, D].
Tensor heads_to_rows(const Communicator& group, const Tensor& x, const RowSplit& rows,
                     Site site = Site::here());

}  // namespace tessera::comm
