#include "ops/attention/attention_rows.h"

/// Until the wgmma row has its own backward kernel it runs the one of the mma row.

namespace tessera::ops {

void attention_backward_wgmma_cuda(const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& dout,
                                   const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o,
                                   const Tensor& lse, const AttentionOptions& options) {
  check_wgmma({q, k, v, o, dout, dq, dk, dv});
  attention_backward_mma_cuda(dq, dk, dv, dout, q, k, v, o, lse, options);
}

}  // namespace tessera::ops
