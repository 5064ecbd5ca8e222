#pragma once

/// Macros for code that kernels and their CPU forms share: a function with TESSERA_HD is compiled for both
/// sides by nvcc.

#if defined(__CUDACC__)
#define TESSERA_HD __host__ __device__ __forceinline__
#else
#define TESSERA_HD inline
#endif
