#pragma once

/// Whether this build has CUDA. `if constexpr (kCuda)` drops a CUDA call from a CPU-only build, so that such
/// a build links without stub files. Include this where it is used and not in a header that many include:
/// objects that do not know of it are the same in both builds, and a compiler cache then serves both.

namespace tessera {

#if defined(TESSERA_WITH_CUDA)
inline constexpr bool kCuda = true;
#else
inline constexpr bool kCuda = false;
#endif

}  // namespace tessera
