#pragma once

#include <string>

#include "ops/sparse24/sparse24_kernels.h"
#include "ops/variant.h"

/// How the GEMM of a 2:4 matrix runs on the sparse tensor cores of sm_90: what it needs, its tiles, and what
/// they are expected to take. Not for operators.

namespace tessera::ops {

/// The GEMM as the kernels take it.
struct SparseGemm24 {
  int64_t m = 0, n = 0, k = 0;
  DType dtype = DType::bf16;
  bool wide = false;      // d is f32
  bool a_across = false;  // groups along tokens: decompressed, A would be stored k-first
  const void* values = nullptr;
  const void* metadata = nullptr;
  const void* b = nullptr;
  int64_t ldb = 0;
  bool b_k_major = false;  // n rows of k elements each, else k rows of n
  void* d = nullptr;
  int64_t ldd = 0;
  bool transposed = false;  // d is stored as n rows of m elements
  bool by_threads = false;  // TMA cannot write d
  bool accumulate = false;  // d is added to
  const void* bias_n = nullptr;
  const void* bias_m = nullptr;
  float alpha = 1;
};

/// A call as the kernels take it, and what its operands lack for that.
struct Described24 {
  SparseGemm24 gemm;
  const char* lacks = "";
};
Described24 describe24(const Multiply24Call& call);
std::string describe_problem(const Described24& problem);

/// Rows and columns of a block's tile, blocks of a cluster (neighbours along m, which share b), and stages of
/// the ring.
struct Tile24 {
  int rows, columns, cluster, stages;
};
inline constexpr Tile24 kTiles24[] = {{128, 256, 2, 4}, {256, 128, 2, 5}, {128, 128, 1, 7}};

struct Choice24 {
  int tile = 0;
  double seconds = 0;
};
/// `forced`: the index of a tile; -1: the best by the model.
Choice24 choose24(const SparseGemm24& gemm, const Gpu& gpu, int forced = -1);
/// What decompressing A and the dense GEMM are expected to take.
double decompressed24_seconds(const SparseGemm24& gemm, const Gpu& gpu);

/// Runs tile `tile`. T: bf16 or f16.
template <class T>
void multiply24_sm90(const SparseGemm24& gemm, int tile, Device device);

}  // namespace tessera::ops
