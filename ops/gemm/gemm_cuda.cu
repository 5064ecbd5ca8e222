#include <cublasLt.h>

#include <algorithm>
#include <array>
#include <limits>
#include <memory>
#include <mutex>
#include <vector>

#include "gpu/launch.cuh"
#include "ops/gemm/gemm.h"
#include "ops/gemm/plan_cache_internal.h"

/// Products by cuBLASLt. 2 m n k FLOPs per product; large ones are bound by the tensor cores (bf16, f16,
/// TF32) or the FMA units (f32), thin ones by memory.
///
/// cuBLASLt reads with vector loads only where the extents, not just the leading dimensions, are multiples of
/// 16 bytes: at 1365 it falls back to element-aligned kernels, which are five times slower. Extents that can
/// be rounded up have been before this is called (gemm_padding.h); here matrices are multiplied as they are.
///
/// cuBLASLt is column-major: row-major D = A B is column-major D' = B' A', so the operands are swapped and
/// nothing is copied. The query for an algorithm costs tens of microseconds, so its result and all
/// descriptors are kept for the kPlans most recently used problems: sizes, leading dimensions, strides,
/// dtypes and the alignment of the pointers, since an algorithm chosen for 16-byte alignment must not get
/// less aligned pointers. A captured graph holds the launch, not the plan.
///
/// Split-K is allowed only with partial sums kept in f32 in the workspace and added by a second step: results
/// are bitwise reproducible and rounded once. The workspace (up to 32 MiB, as NVIDIA advises for Hopper; most
/// algorithms request none) is a tensor of the call: the stream orders its reuse, and under capture it comes
/// from the graph's pool.

namespace tessera::ops {
namespace {

constexpr uint64_t kWorkspace = 32 << 20;
/// Plans kept per device, about 1 KiB each. A training step has some dozens of problems; without a limit,
/// lengths that differ from batch to batch would add one each.
constexpr size_t kPlans = 1024;

struct LtStatus {
  LtStatus(cublasStatus_t code, const char* file = __builtin_FILE(), int line = __builtin_LINE())  // NOLINT
      : code(code), site{file, line} {}
  cublasStatus_t code;
  Site site;
};

void check_lt(LtStatus status) {
  if (status.code != CUBLAS_STATUS_SUCCESS) [[unlikely]]
    fail_at(status.site, "cuBLASLt: ", cublasLtGetStatusName(status.code), ": ",
            cublasLtGetStatusString(status.code));
}

cudaDataType_t data_type(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return CUDA_R_32F;
    case DType::bf16:
      return CUDA_R_16BF;
    case DType::f16:
      return CUDA_R_16F;
    default:
      fail_at(Site::here(), "gemm: dtype ", dtype,
              " is not supported on device cuda; expected f32, bf16 or f16");
  }
}

/// The largest power of two up to 256 that divides the address.
uint32_t alignment(const void* pointer) {
  const uint64_t address = reinterpret_cast<uintptr_t>(pointer) | 256;
  return uint32_t(address & (~address + 1));
}

/// What a choice of algorithm depends on.
using Key = std::array<int64_t, 13>;

Key key_of(const Gemm& g) {
  const int64_t flags = int64_t(g.in) | int64_t(g.out) << 8 | int64_t(g.transpose_a) << 16 |
                        int64_t(g.transpose_b) << 17 | int64_t(g.bias != nullptr) << 18 |
                        int64_t(g.tf32) << 19;
  const int64_t aligned = int64_t(alignment(g.a)) | int64_t(alignment(g.b)) << 16 |
                          int64_t(alignment(g.d)) << 32 | int64_t(g.bias ? alignment(g.bias) : 0) << 48;
  return {g.m,        g.n,        g.k,        g.batch,       g.lda, g.ldb,  g.ldd,
          g.stride_a, g.stride_b, g.stride_d, g.stride_bias, flags, aligned};
}

template <auto kDestroy>
struct Destroy {
  template <class T>
  void operator()(T* thing) const {
    kDestroy(thing);
  }
};
using Product = std::unique_ptr<cublasLtMatmulDescOpaque_t, Destroy<cublasLtMatmulDescDestroy>>;
using Matrix = std::unique_ptr<cublasLtMatrixLayoutOpaque_t, Destroy<cublasLtMatrixLayoutDestroy>>;
using Preference =
    std::unique_ptr<cublasLtMatmulPreferenceOpaque_t, Destroy<cublasLtMatmulPreferenceDestroy>>;

struct Plan {
  Product product;
  Matrix first, second, result;
  cublasLtMatmulAlgo_t algorithm{};
  size_t workspace = 0;
};

/// One per device, never destroyed.
struct Library {
  std::mutex mutex;  // plans are shared, and a plan's bias pointer is set for each call
  cublasLtHandle_t handle = nullptr;
  LruCache<Key, Plan, NumbersHash> plans{kPlans};
};

Library& library(Device device) {
  static std::mutex mutex;
  static auto& libraries = *new std::vector<Library*>;
  const std::lock_guard lock(mutex);
  const size_t index = size_t(device.index());
  if (libraries.size() <= index) libraries.resize(index + 1, nullptr);
  if (!libraries[index]) {
    auto made = std::make_unique<Library>();
    check_lt(cublasLtCreate(&made->handle));
    libraries[index] = made.release();
  }
  return *libraries[index];
}

Matrix make_matrix(DType dtype, int64_t rows, int64_t columns, int64_t ld, int64_t batch, int64_t stride) {
  cublasLtMatrixLayout_t layout = nullptr;
  check_lt(cublasLtMatrixLayoutCreate(&layout, data_type(dtype), uint64_t(rows), uint64_t(columns), ld));
  Matrix owner(layout);
  if (batch > 1) {
    const int32_t count = int32_t(batch);
    check_lt(
        cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count));
    check_lt(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride,
                                              sizeof stride));
  }
  return owner;
}

template <class T>
void set(const Product& product, cublasLtMatmulDescAttributes_t attribute, const T& value) {
  check_lt(cublasLtMatmulDescSetAttribute(product.get(), attribute, &value, sizeof value));
}
template <class T>
void set(const Preference& preference, cublasLtMatmulPreferenceAttributes_t attribute, const T& value) {
  check_lt(cublasLtMatmulPreferenceSetAttribute(preference.get(), attribute, &value, sizeof value));
}

void choose(const Library& lt, const Gemm& g, Plan& plan) {
  cublasLtMatmulPreference_t made = nullptr;
  check_lt(cublasLtMatmulPreferenceCreate(&made));
  const Preference preference(made);
  const uint32_t of_d = std::min(alignment(g.d), g.bias ? alignment(g.bias) : 256u);
  set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kWorkspace);
  set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
      uint32_t(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment(g.b));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment(g.a));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, of_d);
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, of_d);
  cublasLtMatmulHeuristicResult_t found{};
  int count = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
      lt.handle, plan.product.get(), plan.first.get(), plan.second.get(), plan.result.get(),
      plan.result.get(), preference.get(), 1, &found, &count);
  check(status == CUBLAS_STATUS_SUCCESS && count == 1 && found.state == CUBLAS_STATUS_SUCCESS,
        "gemm: cuBLASLt has no algorithm for ", g.m, " x ", g.n, " x ", g.k, " (batch ", g.batch, ", ", g.in,
        g.tf32 ? " as tf32" : "", " to ", g.out, ", leading dimensions ", g.lda, ", ", g.ldb, ", ", g.ldd,
        "): ", cublasLtGetStatusName(status != CUBLAS_STATUS_SUCCESS ? status : found.state));
  plan.algorithm = found.algo;
  plan.workspace = found.workspaceSize;
}

Plan make_plan(const Library& lt, const Gemm& g) {
  check(g.batch <= std::numeric_limits<int32_t>::max(), "gemm: a batch of ", g.batch, " products; at most ",
        std::numeric_limits<int32_t>::max());
  Plan plan;
  cublasLtMatmulDesc_t made = nullptr;
  check_lt(cublasLtMatmulDescCreate(&made, g.tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F,
                                    CUDA_R_32F));
  plan.product.reset(made);
  set(plan.product, CUBLASLT_MATMUL_DESC_TRANSA, g.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(plan.product, CUBLASLT_MATMUL_DESC_TRANSB, g.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
  if (g.bias) {
    set(plan.product, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
    set(plan.product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, g.bias);
    if (g.batch > 1) set(plan.product, CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE, g.stride_bias);
  }
  plan.first =
      make_matrix(g.in, g.transpose_b ? g.k : g.n, g.transpose_b ? g.n : g.k, g.ldb, g.batch, g.stride_b);
  plan.second =
      make_matrix(g.in, g.transpose_a ? g.m : g.k, g.transpose_a ? g.k : g.m, g.lda, g.batch, g.stride_a);
  plan.result = make_matrix(g.out, g.n, g.m, g.ldd, g.batch, g.stride_d);
  choose(lt, g, plan);
  return plan;
}

}  // namespace

void gemm_cuda(const Gemm& gemm, Device device) {
  device.activate();
  Library& lt = library(device);
  const std::lock_guard lock(lt.mutex);
  const Plan& plan = lt.plans.get(key_of(gemm), [&] { return make_plan(lt, gemm); });
  if (gemm.bias) set(plan.product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, gemm.bias);
  Tensor workspace;
  if (plan.workspace > 0) workspace = Tensor::empty_packed(Shape{int64_t(plan.workspace)}, DType::u8, device);
  const float alpha = float(gemm.alpha), beta = float(gemm.beta);
  check_lt(cublasLtMatmul(lt.handle, plan.product.get(), &alpha, gemm.b, plan.first.get(), gemm.a,
                          plan.second.get(), &beta, gemm.d, plan.result.get(), gemm.d, plan.result.get(),
                          &plan.algorithm, workspace.defined() ? workspace.raw() : nullptr, plan.workspace,
                          device.stream()));
}

}  // namespace tessera::ops
