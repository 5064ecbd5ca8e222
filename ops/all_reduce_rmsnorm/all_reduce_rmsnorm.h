#pragma once

#include "ops/all_reduce_rmsnorm/rank_group.h"
#include "ops/norm/norm.h"

namespace tessera::ops {

/// The all-reduce after a row-parallel linear layer (Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section
/// 3), fused with the residual addition and the next RMSNorm:
///   sum = x + (share of rank 0 + share of rank 1 + ...),  y = rmsnorm(sum; weight, eps)
///   x       [N, d], the same on all ranks; undefined: nothing is added
///   share   [N, d], of this rank; overwritten
///   weight  [d]
/// All of one floating dtype on one device. All ranks get the same bits.
///
/// Variants: "communicator" (any device) is an all_reduce, with the order and rounding of
/// comm::Communicator, then ops::add_rmsnorm (ops::rmsnorm without x). "peer" (up to 8 rows) and "peer
/// rows" (more) are one CUDA kernel that exchanges the shares through peer memory; shares and x are added
/// in rank order in f32, and the sum is rounded once. These two are for groups with RankExchange::peer.
/// If a rank does not arrive within comm::call_timeout(), results are NaN, and RankGroup::check_waits
/// throws.
///
/// Inference only: throws if a gradient would be needed.
AddNorm all_reduce_rmsnorm(const RankGroup& ranks, const Tensor& x, const Tensor& share, const Tensor& weight,
                           double eps, Site site = Site::here());

/// Concatenates the ranks' columns and keeps the first `columns`: part [N, p] of each rank -> [N, columns], p
/// (ranks - 1) < columns + p ranks. For logits of a vocabulary-parallel LM head, where the last ranks may
/// have padding rows. Variants "peer" and "communicator"; dtypes and errors as above.
Tensor all_gather_columns(const RankGroup& ranks, const Tensor& part, int64_t columns,
                          Site site = Site::here());

}  // namespace tessera::ops
