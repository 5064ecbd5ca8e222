#pragma once

#include "ops/all_reduce_rmsnorm/rank_group.h"
#include "ops/norm/norm.h"

namespace tessera::ops {

/// What follows a linear layer whose inputs are shared out over ranks (Shoeybi et al., "Megatron-LM",
/// arXiv:1909.08053, section 3), where the residual stream goes on through an RMSNorm:
///   sum = x + (share of rank 0 + share of rank 1 + ...),  y = rmsnorm(sum; weight, eps)
///   x       [N, d], the same on all ranks; undefined: nothing is added
///   share   [N, d], of this rank; overwritten
///   weight  [d]
/// All of one floating dtype on one device. All ranks get the same bits.
///
/// Variants: "communicator", on any device: an all_reduce, whose order and rounding are that of
/// comm::Communicator, then ops::add_rmsnorm (ops::rmsnorm without x). "peer" (up to 8 rows) and "peer rows"
/// (more) are one CUDA kernel, which exchanges the shares by memory that all ranks write to; shares are added
/// in the order of the ranks and to x, in f32, and the sum is rounded once. They are for groups whose
/// exchange is RankExchange::peer. A rank that does not come makes results NaN after comm::call_timeout();
/// RankGroup::check_waits says so.
///
/// Inference only: throws if a gradient would be needed.
AddNorm all_reduce_rmsnorm(const RankGroup& ranks, const Tensor& x, const Tensor& share, const Tensor& weight,
                           double eps, Site site = Site::here());

/// The columns of all ranks next to each other, of which the first `columns` are kept: part [N, p] of each
/// rank -> [N, columns], p (ranks - 1) < columns + p ranks. For logits of a vocabulary that is shared out;
/// the last ranks may have rows of padding. Variants "peer" and "communicator", dtypes and errors as above.
Tensor all_gather_columns(const RankGroup& ranks, const Tensor& part, int64_t columns,
                          Site site = Site::here());

}  // namespace tessera::ops
