#pragma once

#include <cstdint>

namespace tessera::ops {

struct SgemmOperand {
  const float* data;
  int64_t ld;  // elements between rows
  bool transposed = false;
};

/// c [m, n] = alpha op(a) op(b) + beta c by OpenBLAS, in the calling thread alone and with the same bits
/// whatever OpenBLAS's build (sequential, POSIX threads, OpenMP) and its settings. Row-major; all sizes and
/// leading dimensions fit an int. With beta 0, c is not read.
///
/// The settings of the program are restored afterwards. OpenBLAS's build with POSIX threads knows only one
/// number of threads per process: GEMMs that a program runs itself meanwhile use one thread too,
/// and it must not change the number meanwhile.
void sgemm(int64_t m, int64_t n, int64_t k, float alpha, const SgemmOperand& a, const SgemmOperand& b,
           float beta, float* c, int64_t ldc);

}  // namespace tessera::ops
