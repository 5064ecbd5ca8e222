#pragma once

#include <cstdint>

/// Single elements of 16 bits in shared memory. Section names are those of the PTX ISA.

namespace tessera::gpu {

/// st.shared.u16 ("st"): 2 bytes.
__device__ __forceinline__ void store_shared(uint32_t to, uint16_t half) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(half) : "memory");
}

}  // namespace tessera::gpu
