#pragma once

#include "ops/all_reduce_rmsnorm/peer_channels.h"
#include "tensor/tensor.h"

namespace tessera::ops {

/// y, sum and share have 1 ... kPeerRows rows of at most kPeerThreads * kPeerSteps words of 16 bytes; x
/// likewise, or undefined. Rows begin on 16-byte boundaries.
void all_reduce_rmsnorm_cuda(const PeerChannels& channels, const Tensor& y, const Tensor& sum,
                             const Tensor& x, const Tensor& share, const Tensor& weight, double eps);
/// The same for any number of rows.
void all_reduce_rmsnorm_rows_cuda(const PeerRows& rows, const Tensor& y, const Tensor& sum, const Tensor& x,
                                  const Tensor& share, const Tensor& weight, double eps);
/// part [N, p] -> y [N, columns]; rows of both begin on 16-byte boundaries, and p is a number of 16-byte
/// words.
void all_gather_columns_cuda(const PeerChannels& channels, const Tensor& y, const Tensor& part);

}  // namespace tessera::ops
