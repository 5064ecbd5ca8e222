#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>

#include <array>
#include <cstdint>
#include <string>

#include "runtime/cuda.h"
#include "tensor/dtype.h"

/// Host side of tensor copies: how a tensor in global memory is described to TMA.

namespace tessera::gpu {

/// Passed to kernels by value as `const __grid_constant__ TensorMap`.
using TensorMap = CUtensorMap;

/// How the 16-byte chunks of a box's rows are permuted in shared memory: with kB rows of B bytes, chunk index
/// ^= row mod (B / 16), so that the same chunk of eight rows lies in eight different bank groups.
enum class Swizzle : uint8_t { none = 0, k128 = 1, k64 = 2, k32 = 3 };  // as wgmma's descriptors encode it

namespace detail {

inline PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
  static const auto encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault,
                                           &found));
    check(found == cudaDriverEntryPointSuccess,
          "the driver has no cuTensorMapEncodeTiled; update it to 525 or newer");
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  return encoder;
}

}  // namespace detail

/// A map of `data`. extents: innermost first, each 1 or more, and no multiple of the box: elements of a box
/// outside the tensor read as zeros and are not written. strides: in elements, of all dimensions but the
/// innermost. box: what one copy moves. "CUDA driver API: tensor map object management": data and strides are
/// multiples of 16 bytes; a box side is 1 ... 256 elements, its inner side a multiple of 16 bytes and no
/// longer than the swizzle. The stride of a dimension of extent 1 is ignored. bf16, f16 and f32.
template <class T, size_t kRank>
TensorMap tensor_map(const T* data, const std::array<int64_t, kRank>& extents,
                     const std::array<int64_t, kRank - 1>& strides, const std::array<int, kRank>& box,
                     Swizzle swizzle) {
  static_assert(kRank >= 2 && kRank <= 5);
  constexpr CUtensorMapDataType type = std::is_same_v<T, float>  ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                       : std::is_same_v<T, bf16> ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                                 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  static_assert(std::is_same_v<T, float> || std::is_same_v<T, bf16> || std::is_same_v<T, f16>);
  cuuint64_t sizes[kRank], pitches[kRank];
  cuuint32_t sides[kRank], steps[kRank];
  for (size_t dim = 0; dim < kRank; ++dim) {
    sizes[dim] = cuuint64_t(extents[dim]);
    sides[dim] = cuuint32_t(box[dim]);
    steps[dim] = 1;
    if (dim + 1 < kRank) pitches[dim] = extents[dim + 1] == 1 ? 16 : cuuint64_t(strides[dim]) * sizeof(T);
  }
  constexpr CUtensorMapSwizzle swizzles[] = {CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                             CU_TENSOR_MAP_SWIZZLE_64B, CU_TENSOR_MAP_SWIZZLE_32B};
  TensorMap map;
  const CUresult code = detail::tensor_map_encoder()(
      &map, type, kRank, const_cast<std::remove_const_t<T>*>(data), sizes, pitches, sides, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, swizzles[int(swizzle)], CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (code != CUDA_SUCCESS) {
    std::string text = "tensor map: the driver refuses (code " + std::to_string(int(code)) + ") extents";
    for (const auto size : sizes) text += " " + std::to_string(size);
    text += ", strides";
    for (size_t dim = 0; dim + 1 < kRank; ++dim) text += " " + std::to_string(pitches[dim]);
    check(false, text, " bytes, at address ", uintptr_t(data) % 128, " mod 128");
  }
  return map;
}

}  // namespace tessera::gpu
