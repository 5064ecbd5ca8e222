#pragma once

#include <vector>

#include "comm/communicator.h"
#include "comm/row_split.h"

/// Collectives that a tape records: parts of a model that lies on several ranks call them like operators.
///
/// All ranks of the group make the same calls in the same order, and record the same entries: backward makes
/// calls of its own, in the reverse order. They take every transport, are issued to the compute stream, and
/// may be captured.

namespace tessera::comm {

/// This rank's rows x [n_r, ...] -> the whole [n, ...], in the order of the segments; any dtype.
///
/// The gradient of x is the sum over all ranks of the gradients of its rows: a rank receives them from each
/// other one in the dtype of x, adds them up by the tree of Communicator's sums, in f32 (f64 for f64)
/// throughout, and rounds the sum once. In the dtype of x (p - 1) n_r rows leave a rank in the forward pass,
/// and n - n_r in backward. Rows that the ranks do not divide cost backward one copy more. Saves nothing.
Tensor gather_rows(const Communicator& group, const Tensor& x, const RowSplit& rows,
                   Site site = Site::here());

/// From a split by rows to one by heads: x[i] [n_r, B, H, D], this rank's rows of all heads, -> [n, B, H / p,
/// D], all rows of the heads from r H / p on; in one all-to-all for all of them. rows[i] says how the rows of
/// x[i] are divided. The gradient is heads_to_rows of the gradients: values are moved, none is added, so
/// nothing is rounded. Any dtype, the same for all x. Throws unless p divides H. Saves nothing.
std::vector<Tensor> rows_to_heads(const Communicator& group, const std::vector<Tensor>& x,
                                  const std::vector<RowSplit>& rows, Site site = Site::here());
/// Back: x [n, B, H / p, D] -> [n_r, B, H, D].
Tensor heads_to_rows(const Communicator& group, const Tensor& x, const RowSplit& rows,
                     Site site = Site::here());

}  // namespace tessera::comm
