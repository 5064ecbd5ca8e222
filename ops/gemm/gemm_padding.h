#pragma once

#include <utility>

#include "ops/gemm/gemm.h"
#include "tensor/pads.h"

/// GEMMs by tensor cores on a GPU whose extents are not multiples of 16 bytes: 8 elements of 16 bits, 4 of
/// f32 in TF32. For those cuBLASLt has only kernels that load element by element, about five times slower
/// (docs/ops/linear.md); they are computed with the extents rounded up instead.
///
/// Padding never changes a result: along k both operands hold zeros there, so the sums gain exact zeros;
/// along m and n it makes rows and columns of d that are never read. Operands are read-only, padding
/// included. One is used in place only if the added columns are row padding of its own storage
/// (`Storage::pitch_bytes`) and, if they are summed over, if it is an operator's scratch (`as_scratch`),
/// whose padding may be zeroed; otherwise it is copied. The row padding of d may be overwritten; if there is
/// none, d is computed in scratch memory and copied.

namespace tessera::ops {

/// d = alpha a b (+ d) (+ bias) as multiply has it, for cuBLASLt: CUDA, operands whose stored rows are dense;
/// `transpose_a`, `transpose_b` say that the columns are (see Gemm).
struct CublasGemm {
  const Tensor &d, &a, &b;
  const MultiplyOptions& options;
  bool transpose_a, transpose_b, tf32;
};
std::string describe_problem(const CublasGemm& gemm);

/// Runs it with rounded extents, or as gemm_tf32.h has it; false, and nothing done, where that changes
/// nothing or costs more than it saves. The choice compares the bytes of all copies and the FLOPs, a function
/// of shapes, layouts and GPU alone. ForceVariant("gemm", "cublas") leaves every GEMM as it is, "cublas
/// padded" rounds whatever can be rounded.
bool run_rearranged(const CublasGemm& gemm);
/// Whether "cublas padded" has odd extents to round up, and neither copies nor zeroes anything for that.
bool rounds_in_place(const CublasGemm& gemm);
/// The name of the choice of run_rearranged: "cublas" if that returns false.
std::string_view cublas_variant(const CublasGemm& gemm, const Gpu& gpu);

/// For sum_i a[i] b[i] over one leading dimension or more, with a [..., m, k] and b [..., k, n] of the same
/// leading dimensions: whether one product with a long k gives it if the pads between the rows of a count as
/// columns, as in the gradient of rows that several groups share. The answer depends on layouts alone.
bool pads_to_long(const Tensor& a);
/// Those operands: a^T [K, m] with zeros in its padding, a copy unless a is scratch, and b [K, n], a copy
/// with rows of zeros. Only if pads_to_long.
std::pair<Tensor, Tensor> pad_to_long(const Tensor& a, const Tensor& b);

/// y [..., R, C] = x [..., r, c] in the upper left corners, zeros elsewhere and in y's pads. 16-bit dtypes
/// and f32; y is fresh and pitched, the leading dimensions are the same, r <= R, c <= C; x has any strides.
void padded_copy_cuda(const Tensor& y, const Tensor& x);

}  // namespace tessera::ops
