#pragma once

#include <optional>

#include "ops/sum_dtype.h"
#include "ops/variant.h"
#include "tensor/tensor.h"

/// GEMMs: the only place that calls BLAS and cuBLASLt, next to the sm_90a kernels. Operators use the tensor
/// functions at the end, which build a Gemm.

namespace tessera {
class Backward;  // autograd/backward.h
}  // namespace tessera

namespace tessera::ops {

/// D[i] = alpha op(A[i]) op(B[i]) + beta C[i] + bias[i] for i < batch, with D m x n, op(A) m x k and op(B)
/// k x n. All matrices are row-major; a transposed operand is stored k-first (A: k x m, B: n x k). Leading
/// dimensions (elements between rows) are at least the stored row's length; strides (elements between the
/// matrices of a batch) may be 0 for A, B and bias. All sizes are at least 1.
///
/// With `terms` > 1 (batch 1, variant "wgmma" only) D is the sum of that many GEMMs, whose A and B are
/// stride_a and stride_b apart: one GEMM with a long k, without a copy that makes k contiguous.
///
/// Dtypes: A, B and bias have `in`; D has `out`, which is `in`, or f32 for bf16 and f16. Sums are in f32 (f64
/// for f64) and rounded once, to `out`. With `tf32` (in = f32, CUDA) tensor cores read A and B as TF32,
/// rounded or truncated depending on the kernel, in variants "cublas" and "cublas padded"; "narrow"
/// multiplies in f32 regardless. C has D's dtype and layout; it must be D except in variants "wgmma" and
/// "narrow". If beta is 0 it is not read.
struct Gemm {
  int64_t m = 0, n = 0, k = 0, batch = 1, terms = 1;
  DType in = DType::f32, out = DType::f32;
  bool transpose_a = false, transpose_b = false;
  const void* a = nullptr;
  const void* b = nullptr;
  void* d = nullptr;
  const void* c = nullptr;     // null: d
  const void* bias = nullptr;  // n values for every row; the CUDA variants alone take one, see below
  float* sums = nullptr;       // gets the m sums of op(A)'s rows: variant "wgmma", see gemm_sm90_sums
  int64_t lda = 0, ldb = 0, ldd = 0;
  int64_t stride_a = 0, stride_b = 0, stride_d = 0, stride_bias = 0;
  double alpha = 1, beta = 0;
  bool tf32 = false;
  bool owns_d_padding = false;  // D's row padding up to the next 16-byte boundary may be overwritten
  bool takes_along = false;  // sums of rows, or a C elsewhere than D, which "cublas" leaves to other passes
  double copied = 0;         // bytes of operands that variant "cublas padded" would copy to round k up
  bool rounds_in_place = false;  // it rounds odd extents up without a copy, and without zeros
};

/// in = out = f64 (plain loops: the oracle) or f32 (the same loops; OpenBLAS where the product is large).
void gemm_cpu(const Gemm& gemm);
/// The variants of multiply on CUDA ("gemm" of ForceVariant, and variants of the operators that are made of
/// GEMMs). Unforced, it is a function of shapes, layouts and GPU: the table in gemm.cpp, docs/ops/gemm.md.
///   cublas         cuBLASLt, the problem as it is
///   cublas padded  cuBLASLt with odd extents rounded up wherever they can be (gemm_padding.h)
///   wgmma          the kernels of gemm_sm90.cuh; throws where they cannot
///   narrow         those of gemm_narrow.h, for GEMMs with a narrow side; takes everything
/// Ends with null.
inline constexpr const char* kGemmVariants[] = {"cublas", "cublas padded", "wgmma", "narrow", nullptr};
std::vector<std::string> gemm_variants();

/// For the scope's lifetime, GEMMs of this thread run on the variant forced for operator `op`, if it is one
/// of GEMMs. Throws if that is "wgmma" and there are no kernels for the dtype of `x`, an operand on CUDA.
class PassVariant {
 public:
  PassVariant(const char* op, const Tensor& x);

 private:
  std::optional<ForceVariant> force_;
};

/// Variant "cublas". in = f32, bf16, f16; a bias if in = out, m, n and k exceed 1, and it and D's rows lie on
/// 16-byte boundaries (elsewhere cuBLASLt's epilogues have gaps; start D as the bias). The same problem runs
/// the same algorithm in every call, so results repeat bitwise.
void gemm_cuda(const Gemm& gemm, Device device);

struct MultiplyOptions {
  double alpha = 1;
  bool accumulate = false;  // add to d instead of overwriting it
  Tensor bias = {};         // [n] or [..., 1, n], broadcasting to d; not with accumulate
  Tensor residual = {};     // of d's shape, dtype and place, added to the result; not with accumulate
  Tensor sums = {};         // [m] in f32, packed: gets the sums of a's rows if multiply says so
};

/// f32 operands are multiplied as f32_math() says.
///
/// d = alpha a b (+ d) (+ bias) (+ residual): d [..., m, n], a [..., m, k], b [..., k, n]; the leading
/// dimensions of a and b broadcast to d's. Transposition is a matter of strides: pass a.transpose(-1, -2). A
/// matrix whose rows or whose columns are dense is taken as it is, any other is copied; d must be
/// `writable`. Where b is the same for neighbouring matrices of a and d that continue each other, they become
/// one product. k = 0 gives zeros or the bias. A residual is added before the sum is rounded if the variant
/// is "wgmma" or "narrow" and its rows lie as d's do; else to the rounded result. On the CPU bf16 and f16 are
/// widened to f32 and the result rounded once. On CUDA their odd extents, and those of f32 in TF32, may be
/// rounded up (gemm_padding.h): the padding of d, and of a and b that are scratch, may then be overwritten.
///
/// On CUDA, kernels count rows, columns and k in 32 bits: a GEMM with an extent above 2^30 runs in chunks,
/// chunks of k one after the other (a 16-bit d is then rounded after each).
///
/// Returns whether options.sums was written: only if the kernel yields the row sums of a as a by-product,
/// that is in variant "wgmma" for a weight gradient in f32. Sums in f32, in a fixed order.
bool multiply(const Tensor& d, const Tensor& a, const Tensor& b, const MultiplyOptions& options = {});

/// The same by pieces of at most `most` rows (over all leading dimensions), columns and k. Returns false.
bool multiply_in_chunks(const Tensor& d, const Tensor& a, const Tensor& b, const MultiplyOptions& options,
                        int64_t most);

/// y = silu(x gate^T) (x up^T) as one kernel: y [T, F], x [T, in], weight [2F, in], gate's rows first. Gate
/// and up stay f32; y alone is rounded. What it needs and the operands lack, or an empty string; the kernel
/// is that of skinny GEMMs (gemm_sm90_stream.cuh).
std::string multiply_swiglu_lacks(const Tensor& x, const Tensor& weight, const Gpu& gpu);
/// Whether the variant "wgmma" would be chosen for x weight^T, in that kernel. Only if it lacks nothing.
bool multiply_swiglu_pays(const Tensor& x, const Tensor& weight, const Gpu& gpu);
/// Only if it lacks nothing.
void multiply_swiglu(const Tensor& y, const Tensor& x, const Tensor& weight);

/// Like multiply, but d's leading dimensions may be 1 (or missing) where those of a b are not: d is the sum
/// over them. One GEMM with a long k if the layouts allow it (pitched rows of a 16-bit a are no obstacle on
/// CUDA), else one GEMM after the other in a fixed order, rounded to d's dtype each time: see
/// `sum_is_one_gemm`. `sums` and the result are as in multiply.
bool multiply_sum(const Tensor& d, const Tensor& a, const Tensor& b, bool accumulate = false,
                  const Tensor& sums = {});
/// Whether multiply_sum(d, a, b) rounds once.
bool sum_is_one_gemm(const Tensor& d, const Tensor& a, const Tensor& b);

/// Whether multiply can write a tensor as it is: dense elements in a row, rows that do not overlap.
bool writable(const Tensor& d);

/// Dtype of a newly allocated gradient. `f32`: for sums over many rows, as of parameters, so that
/// they are rounded only where the leaf's gradient is stored (f64 stays f64). `same`: for
/// activations.
enum class GradientDType : uint8_t { same, f32 };

/// Gives a b, summed to the shape of `like`, as the gradient of input `input` of the entry: written directly
/// to the leaf's buffer if its dtype and layout fit, else to a new tensor. Only if entry.needs(input). `sums`
/// and the result are as in multiply.
bool multiply_gradient(Backward& entry, int input, const Tensor& like, GradientDType dtype, const Tensor& a,
                       const Tensor& b, const Tensor& sums = {});

/// The gradient of `weight` [out, in], input number `input`: dy^T x, of [tokens, out] and [tokens, in].
/// `sums`, if defined, is [out] in f32, packed, and gets the sums of dy over the tokens.
struct WeightGradient {
  int input;
  Tensor weight, dy, x;
  Tensor sums = {};
};
/// multiply_gradient for two weights, [F, D] and [D, F], as one product (docs/ops/gemm.md): f32, or rounded
/// once. Returns false, and has done nothing, where that does not pay or cannot be; then do them one by one.
/// Only if the entry needs both inputs.
bool multiply_gradients(Backward& entry, const WeightGradient& first, const WeightGradient& second);

/// [..., the last `keep` dimensions] -> [rows, the last `keep` dimensions], off the tape: a view where the
/// leading dimensions collapse, else a copy.
Tensor flatten_leading(const Tensor& x, int keep);

/// Throws, naming operator, operand, dtype and device, unless `x` is defined and of an arithmetic floating
/// dtype that its device computes in (f64 on the CPU only), and agrees with `first` in both.
void check_operand(const char* op, const char* name, const Tensor& x, const Tensor& first);

}  // namespace tessera::ops
