#pragma once

#include <vector>

#include "autograd/backward.h"
#include "ops/dropout/dropout_kernels.h"
#include "ops/norm/norm.h"

namespace tessera::ops {

/// Layernorm if `centred`, else rmsnorm, of x, or of x + residual if that is defined; then `sum`
/// takes x + residual, rounded. y, sum, x, residual: have rows, one shape; mean, rstd [rows] in sum_dtype,
/// on CUDA undefined where nothing reads them; weight and bias [C] of x's dtype with stride 1, or undefined.
/// `drop`: the residual's mask, or null; `kept_mask`, on CUDA: where it is written for backward (mask_shape),
/// or undefined.
struct NormForward {
  const Tensor &y, &sum, &mean, &rstd, &x, &residual, &weight, &bias;
  bool centred;
  double eps;
  const DropoutMask* drop;
  Tensor kept_mask = {};
};
void norm_forward_cpu(const NormForward& norm);
void norm_forward_cuda(const NormForward& norm);
/// Shape of the dropout mask that forward saves: u8, packed, one byte per 16 bytes of a row of x, bit 1 for a
/// kept element. Recomputing it in backward took longer than reading it.
Shape mask_shape(const Tensor& x);

/// Sums the partial sums of the parameters' gradients of all norms of a backward pass on a GPU in one launch
/// at its end: one by one they take some 2 us each, of which the addition itself is a tenth. The order within
/// a sum is the same either way.
class NormSums : public PassEnd {
 public:
  struct Sum {
    Tensor from;  // f32 [rows, stride], of which `width` columns are summed
    Tensor to;    // f32 [width], packed
  };
  void add(Sum sum);
  void finish() override;

 private:
  std::vector<Sum> sums_;
  size_t bytes_ = 0;
};

/// x: what was normalised. dx has dsum added to it if that is defined; dx_again, on CUDA without a mask, is
/// the same in other memory, with dx's layout; dresidual is dx before it was rounded under the mask `drop`
/// (on CUDA as `kept_mask`), and undefined without one. Gradients that are undefined are not computed.
/// dweight, dbias: [C] in sum_dtype; on CUDA also both in x's dtype, rounded once. `later`: on CUDA, for
/// dweight and dbias in f32, finishes them; null: they are finished at once. `dresidual_sums`, only where
/// norm_sums_dresidual says so: takes the column sums of dresidual as it is stored, as f32 partial sums
/// [blocks, at least C] (NormSums::Sum::from); null: they are not wanted.
struct NormBackward {
  const Tensor &dx, &dx_again, &dresidual, &dweight, &dbias, &dy, &dsum, &x, &weight, &mean, &rstd;
  const DropoutMask* drop;
  Tensor kept_mask = {};
  NormSums* later = nullptr;
  Tensor* dresidual_sums = nullptr;
};
/// Whether norm_backward_cuda can sum the columns of dresidual: layernorm of 16-bit rows that a warp holds.
bool norm_sums_dresidual(const Tensor& x, bool centred);
void norm_backward_cpu(const NormBackward& norm);
void norm_backward_cuda(const NormBackward& norm);

}  // namespace tessera::ops
