#pragma once

#include <cstdint>

namespace tessera::ops {

struct SgemmOperand {
  const float* data;
  int64_t ld;  // elements between rows
  bool transposed = false;
};

/// For the lifetime of the scope, OpenBLAS (and LAPACK on it) runs this thread's calls single-threaded,
/// whatever its build (sequential, pthreads, OpenMP) and settings, so that results are bitwise reproducible.
///
/// The previous settings are restored afterwards. OpenBLAS with POSIX threads has one thread count per
/// process: GEMMs that the program itself runs at the same time use one thread, too, and it must not change
/// the count during that time.
///
/// The first one of a process throws OutOfMemory if there is no room for the buffers that OpenBLAS takes for
/// as many concurrent calls as cpu_threads(): OpenBLAS would wait for them for ever.
class OneBlasThread {
 public:
  OneBlasThread();
  ~OneBlasThread();
  OneBlasThread(const OneBlasThread&) = delete;

 private:
  const int build_;
  int before_ = 1;
};

/// The CPU for which the kernels that OpenBLAS runs were written: "SkylakeX". Not "Prescott", its fallback
/// for models that it does not know, on a CPU with AVX2: kernels are chosen again when the program is loaded.
const char* blas_kernels();

/// c [m, n] = alpha op(a) op(b) + beta c by OpenBLAS, as OneBlasThread has it. Row-major; all sizes and
/// leading dimensions fit an int. With beta 0, c is not read.
void sgemm(int64_t m, int64_t n, int64_t k, float alpha, const SgemmOperand& a, const SgemmOperand& b,
           float beta, float* c, int64_t ldc);

struct DgemmOperand {
  const double* data;
  int64_t ld;  // elements between rows
};

/// c [m, n] += a^T b of a [k, m] and b [k, n], likewise in f64.
void dgemm_at_b(int64_t m, int64_t n, int64_t k, const DgemmOperand& a, const DgemmOperand& b, double* c,
                int64_t ldc);
/// The upper triangle, diagonal included, of c [n, n] += a^T a of a [k, n]; what lies below it is untouched.
void dsyrk(int64_t n, int64_t k, const double* a, int64_t lda, double* c, int64_t ldc);

}  // namespace tessera::ops
