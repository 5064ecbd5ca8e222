#include "ops/attention/attention_rows.h"

/// Until the wgmma row has its own forward kernel it runs the one of the mma row.

namespace tessera::ops {

void attention_forward_wgmma_cuda(const Tensor& o, const Tensor& lse, const Tensor& q, const Tensor& k,
                                  const Tensor& v, const AttentionOptions& options) {
  check_wgmma({q, k, v, o});
  attention_forward_mma_cuda(o, lse, q, k, v, options);
}

}  // namespace tessera::ops
