#pragma once

#include <optional>

#include "ops/sum_dtype.h"
#include "ops/variant.h"
#include "tensor/tensor.h"

/// Plain products of matrices: the one place that calls BLAS and cuBLASLt, and the sm_90a kernels next to it.
/// Operators use the tensor functions at the end; Gemm is what they come down to.

namespace tessera {
class Backward;  // autograd/backward.h
}  // namespace tessera

namespace tessera::ops {

/// D[i] = alpha op(A[i]) op(B[i]) + beta C[i] + bias[i] for i < batch, with D m x n, op(A) m x k and op(B)
/// k x n. All matrices are row-major; a transposed operand is stored k-first (A: k x m, B: n x k). Leading
/// dimensions (elements between rows) are at least the stored row's length; strides (elements between the
/// matrices of a batch) may be 0 for A, B and bias. All sizes are at least 1.
///
/// With `terms` > 1 (batch 1, row "wgmma" alone) D is the sum of that many products, whose matrices A and B
/// are stride_a and stride_b apart: as one product with a long k, without one having to exist.
///
/// Dtypes: A, B and bias have `in`; D has `out`, which is `in`, or f32 for bf16 and f16. Sums run in f32 (f64
/// for f64) and are rounded once, to `out`. With `tf32` (in = f32, CUDA) tensor cores read A and B as TF32,
/// rounded or truncated as the kernel does it, in the variants "cublas" and "cublas padded"; "narrow"
/// multiplies in f32 all the same. C has D's dtype and layout; it is D itself but in the variants "wgmma" and
/// "narrow", where it may be elsewhere. With beta 0 it is not read.
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
  double copied = 0;            // bytes of operands that row "cublas padded" would copy to round k up
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

/// While it lives, the GEMMs of this thread run on the variant that is forced for operator `op`, if one of
/// theirs is. Throws if that is "wgmma" and `x`, an operand on CUDA, has a dtype for which it has no kernels.
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
/// On CUDA kernels count rows, columns and k in 32 bits: where one exceeds 2^30 the product is made in
/// pieces, pieces of k one after the other (a 16-bit d is then rounded after each).
///
/// Returns whether options.sums was written: only where the product reads a in a form that yields them next
/// to it, which is variant "wgmma" with a weight's gradient in f32. Sums in f32, order fixed.
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

/// Like multiply, but d's leading dimensions may be 1 (or missing) where those of a b are not: it gets the
/// sum over them. One product with a long k where the operands' layouts allow it (rows of a 16-bit a that are
/// pitched are no hindrance on CUDA), else one product after the other in a fixed order, rounding to d's
/// dtype each time: see `sum_is_one_gemm`. `sums` and the result as in multiply.
bool multiply_sum(const Tensor& d, const Tensor& a, const Tensor& b, bool accumulate = false,
                  const Tensor& sums = {});
/// Whether multiply_sum(d, a, b) rounds once.
bool sum_is_one_gemm(const Tensor& d, const Tensor& a, const Tensor& b);

/// Whether multiply can write a tensor as it is: dense elements in a row, rows that do not overlap.
bool writable(const Tensor& d);

/// Which dtype a new gradient gets: `f32` for what is summed over many rows and belongs to parameters, so
/// that it is rounded only where the leaf wants that (f64 stays f64), and there as it is written; `same` for
/// activations.
enum class GradientDType : uint8_t { same, f32 };

/// Hands a b, summed down to `like`'s shape, to input number `input` of the entry: written straight into the
/// leaf's buffer where that has a fitting dtype and layout, else as a new tensor. Only if entry.needs(input).
/// `sums` and the result as in multiply.
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
