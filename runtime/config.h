#pragma once

/// The one header of conditional compilation. `if constexpr (kCuda)` drops a CUDA call from a CPU-only build,
/// so that such a build links without stub files.

#if defined(__CUDACC__)
#define TESSERA_HD __host__ __device__ __forceinline__
#else
#define TESSERA_HD inline
#endif

namespace tessera {

#if defined(TESSERA_WITH_CUDA)
inline constexpr bool kCuda = true;
#else
inline constexpr bool kCuda = false;
#endif

}  // namespace tessera
