#pragma once

#include <cstdint>
#include <type_traits>

#include "tensor/dtype.h"

/// Warpgroup MMAs 64 x N, a struct for each N. gpu/wgmma.cuh, gpu/wgmma_sparse.cuh and ops/bits call them.
///
/// The operands of an asm statement are counted from its accumulators on, N / 2 of them, and a template
/// computes neither its text nor its list of operands. So macros write both, and the numbers of the operands
/// that follow the accumulators are arguments.

// clang-format off
namespace tessera::gpu::detail {

// The numbers of the first 4, 8, ... operands as text, and as many elements of d as operands.
#define TESSERA_NUMBERS_4 "%0, %1, %2, %3"
#define TESSERA_NUMBERS_8 TESSERA_NUMBERS_4 ", %4, %5, %6, %7"
#define TESSERA_NUMBERS_12 TESSERA_NUMBERS_8 ", %8, %9, %10, %11"
#define TESSERA_NUMBERS_16 TESSERA_NUMBERS_12 ", %12, %13, %14, %15"
#define TESSERA_NUMBERS_20 TESSERA_NUMBERS_16 ", %16, %17, %18, %19"
#define TESSERA_NUMBERS_24 TESSERA_NUMBERS_20 ", %20, %21, %22, %23"
#define TESSERA_NUMBERS_28 TESSERA_NUMBERS_24 ", %24, %25, %26, %27"
#define TESSERA_NUMBERS_32 TESSERA_NUMBERS_28 ", %28, %29, %30, %31"
#define TESSERA_NUMBERS_36 TESSERA_NUMBERS_32 ", %32, %33, %34, %35"
#define TESSERA_NUMBERS_40 TESSERA_NUMBERS_36 ", %36, %37, %38, %39"
#define TESSERA_NUMBERS_44 TESSERA_NUMBERS_40 ", %40, %41, %42, %43"
#define TESSERA_NUMBERS_48 TESSERA_NUMBERS_44 ", %44, %45, %46, %47"
#define TESSERA_NUMBERS_52 TESSERA_NUMBERS_48 ", %48, %49, %50, %51"
#define TESSERA_NUMBERS_56 TESSERA_NUMBERS_52 ", %52, %53, %54, %55"
#define TESSERA_NUMBERS_60 TESSERA_NUMBERS_56 ", %56, %57, %58, %59"
#define TESSERA_NUMBERS_64 TESSERA_NUMBERS_60 ", %60, %61, %62, %63"
#define TESSERA_NUMBERS_68 TESSERA_NUMBERS_64 ", %64, %65, %66, %67"
#define TESSERA_NUMBERS_72 TESSERA_NUMBERS_68 ", %68, %69, %70, %71"
#define TESSERA_NUMBERS_76 TESSERA_NUMBERS_72 ", %72, %73, %74, %75"
#define TESSERA_NUMBERS_80 TESSERA_NUMBERS_76 ", %76, %77, %78, %79"
#define TESSERA_NUMBERS_84 TESSERA_NUMBERS_80 ", %80, %81, %82, %83"
#define TESSERA_NUMBERS_88 TESSERA_NUMBERS_84 ", %84, %85, %86, %87"
#define TESSERA_NUMBERS_92 TESSERA_NUMBERS_88 ", %88, %89, %90, %91"
#define TESSERA_NUMBERS_96 TESSERA_NUMBERS_92 ", %92, %93, %94, %95"
#define TESSERA_NUMBERS_100 TESSERA_NUMBERS_96 ", %96, %97, %98, %99"
#define TESSERA_NUMBERS_104 TESSERA_NUMBERS_100 ", %100, %101, %102, %103"
#define TESSERA_NUMBERS_108 TESSERA_NUMBERS_104 ", %104, %105, %106, %107"
#define TESSERA_NUMBERS_112 TESSERA_NUMBERS_108 ", %108, %109, %110, %111"
#define TESSERA_NUMBERS_116 TESSERA_NUMBERS_112 ", %112, %113, %114, %115"
#define TESSERA_NUMBERS_120 TESSERA_NUMBERS_116 ", %116, %117, %118, %119"
#define TESSERA_NUMBERS_124 TESSERA_NUMBERS_120 ", %120, %121, %122, %123"
#define TESSERA_NUMBERS_128 TESSERA_NUMBERS_124 ", %124, %125, %126, %127"
#define TESSERA_FOUR(constraint, i) constraint(d[i]), constraint(d[i + 1]), constraint(d[i + 2]), constraint(d[i + 3])
#define TESSERA_ELEMENTS_4(c) TESSERA_FOUR(c, 0)
#define TESSERA_ELEMENTS_8(c) TESSERA_ELEMENTS_4(c), TESSERA_FOUR(c, 4)
#define TESSERA_ELEMENTS_12(c) TESSERA_ELEMENTS_8(c), TESSERA_FOUR(c, 8)
#define TESSERA_ELEMENTS_16(c) TESSERA_ELEMENTS_12(c), TESSERA_FOUR(c, 12)
#define TESSERA_ELEMENTS_20(c) TESSERA_ELEMENTS_16(c), TESSERA_FOUR(c, 16)
#define TESSERA_ELEMENTS_24(c) TESSERA_ELEMENTS_20(c), TESSERA_FOUR(c, 20)
#define TESSERA_ELEMENTS_28(c) TESSERA_ELEMENTS_24(c), TESSERA_FOUR(c, 24)
#define TESSERA_ELEMENTS_32(c) TESSERA_ELEMENTS_28(c), TESSERA_FOUR(c, 28)
#define TESSERA_ELEMENTS_36(c) TESSERA_ELEMENTS_32(c), TESSERA_FOUR(c, 32)
#define TESSERA_ELEMENTS_40(c) TESSERA_ELEMENTS_36(c), TESSERA_FOUR(c, 36)
#define TESSERA_ELEMENTS_44(c) TESSERA_ELEMENTS_40(c), TESSERA_FOUR(c, 40)
#define TESSERA_ELEMENTS_48(c) TESSERA_ELEMENTS_44(c), TESSERA_FOUR(c, 44)
#define TESSERA_ELEMENTS_52(c) TESSERA_ELEMENTS_48(c), TESSERA_FOUR(c, 48)
#define TESSERA_ELEMENTS_56(c) TESSERA_ELEMENTS_52(c), TESSERA_FOUR(c, 52)
#define TESSERA_ELEMENTS_60(c) TESSERA_ELEMENTS_56(c), TESSERA_FOUR(c, 56)
#define TESSERA_ELEMENTS_64(c) TESSERA_ELEMENTS_60(c), TESSERA_FOUR(c, 60)
#define TESSERA_ELEMENTS_68(c) TESSERA_ELEMENTS_64(c), TESSERA_FOUR(c, 64)
#define TESSERA_ELEMENTS_72(c) TESSERA_ELEMENTS_68(c), TESSERA_FOUR(c, 68)
#define TESSERA_ELEMENTS_76(c) TESSERA_ELEMENTS_72(c), TESSERA_FOUR(c, 72)
#define TESSERA_ELEMENTS_80(c) TESSERA_ELEMENTS_76(c), TESSERA_FOUR(c, 76)
#define TESSERA_ELEMENTS_84(c) TESSERA_ELEMENTS_80(c), TESSERA_FOUR(c, 80)
#define TESSERA_ELEMENTS_88(c) TESSERA_ELEMENTS_84(c), TESSERA_FOUR(c, 84)
#define TESSERA_ELEMENTS_92(c) TESSERA_ELEMENTS_88(c), TESSERA_FOUR(c, 88)
#define TESSERA_ELEMENTS_96(c) TESSERA_ELEMENTS_92(c), TESSERA_FOUR(c, 92)
#define TESSERA_ELEMENTS_100(c) TESSERA_ELEMENTS_96(c), TESSERA_FOUR(c, 96)
#define TESSERA_ELEMENTS_104(c) TESSERA_ELEMENTS_100(c), TESSERA_FOUR(c, 100)
#define TESSERA_ELEMENTS_108(c) TESSERA_ELEMENTS_104(c), TESSERA_FOUR(c, 104)
#define TESSERA_ELEMENTS_112(c) TESSERA_ELEMENTS_108(c), TESSERA_FOUR(c, 108)
#define TESSERA_ELEMENTS_116(c) TESSERA_ELEMENTS_112(c), TESSERA_FOUR(c, 112)
#define TESSERA_ELEMENTS_120(c) TESSERA_ELEMENTS_116(c), TESSERA_FOUR(c, 116)
#define TESSERA_ELEMENTS_124(c) TESSERA_ELEMENTS_120(c), TESSERA_FOUR(c, 120)
#define TESSERA_ELEMENTS_128(c) TESSERA_ELEMENTS_124(c), TESSERA_FOUR(c, 124)

// Where operand `add` is 0, d is overwritten.
#define TESSERA_WGMMA(add, instruction, count) \
  "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %" #add ", 0;\n\twgmma.mma_async" instruction " {" TESSERA_NUMBERS_##count "}, "

/// wgmma.mma_async.sync.aligned.m64nNk16.f32 of bf16 or f16: a by descriptor (ss) or in registers (rs).
template <int kN>
struct Wgmma;

#define TESSERA_SS(type, n, count, n0, n1, n2, n3, n4)                                                    \
  asm volatile(TESSERA_WGMMA(n2, ".sync.aligned.m64n" #n "k16.f32." #type "." #type, count)               \
               "%" #n0 ", %" #n1 ", p, 1, 1, %" #n3 ", %" #n4 ";\n\t}"                                    \
               : TESSERA_ELEMENTS_##count("+f")                                                           \
               : "l"(a), "l"(b), "r"(add), "n"(kTransposeA), "n"(kTransposeB))
#define TESSERA_RS(type, n, count, n0, n1, n2, n3, n4, n5, n6)                                            \
  asm volatile(TESSERA_WGMMA(n5, ".sync.aligned.m64n" #n "k16.f32." #type "." #type, count)               \
               "{%" #n0 ", %" #n1 ", %" #n2 ", %" #n3 "}, %" #n4 ", p, 1, 1, %" #n6 ";\n\t}"              \
               : TESSERA_ELEMENTS_##count("+f")                                                           \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(kTransposeB))
#define TESSERA_WIDTH(n, count, n0, n1, n2, n3, n4, n5, n6)                                               \
  template <>                                                                                             \
  struct Wgmma<n> {                                                                                       \
    template <class T, int kTransposeA, int kTransposeB>                                                  \
    static __device__ __forceinline__ void ss(float (&d)[count], uint64_t a, uint64_t b, int add) {       \
      if constexpr (std::is_same_v<T, bf16>)                                                              \
        TESSERA_SS(bf16, n, count, n0, n1, n2, n3, n4);                                                   \
      else                                                                                                \
        TESSERA_SS(f16, n, count, n0, n1, n2, n3, n4);                                                    \
    }                                                                                                     \
    template <class T, int kTransposeB>                                                                   \
    static __device__ __forceinline__ void rs(float (&d)[count], const uint32_t (&a)[4], uint64_t b, int add) { \
      if constexpr (std::is_same_v<T, bf16>)                                                              \
        TESSERA_RS(bf16, n, count, n0, n1, n2, n3, n4, n5, n6);                                           \
      else                                                                                                \
        TESSERA_RS(f16, n, count, n0, n1, n2, n3, n4, n5, n6);                                            \
    }                                                                                                     \
  };

TESSERA_WIDTH(8, 4, 4, 5, 6, 7, 8, 9, 10)
TESSERA_WIDTH(16, 8, 8, 9, 10, 11, 12, 13, 14)
TESSERA_WIDTH(24, 12, 12, 13, 14, 15, 16, 17, 18)
TESSERA_WIDTH(32, 16, 16, 17, 18, 19, 20, 21, 22)
TESSERA_WIDTH(40, 20, 20, 21, 22, 23, 24, 25, 26)
TESSERA_WIDTH(48, 24, 24, 25, 26, 27, 28, 29, 30)
TESSERA_WIDTH(56, 28, 28, 29, 30, 31, 32, 33, 34)
TESSERA_WIDTH(64, 32, 32, 33, 34, 35, 36, 37, 38)
TESSERA_WIDTH(72, 36, 36, 37, 38, 39, 40, 41, 42)
TESSERA_WIDTH(80, 40, 40, 41, 42, 43, 44, 45, 46)
TESSERA_WIDTH(88, 44, 44, 45, 46, 47, 48, 49, 50)
TESSERA_WIDTH(96, 48, 48, 49, 50, 51, 52, 53, 54)
TESSERA_WIDTH(104, 52, 52, 53, 54, 55, 56, 57, 58)
TESSERA_WIDTH(112, 56, 56, 57, 58, 59, 60, 61, 62)
TESSERA_WIDTH(120, 60, 60, 61, 62, 63, 64, 65, 66)
TESSERA_WIDTH(128, 64, 64, 65, 66, 67, 68, 69, 70)
TESSERA_WIDTH(144, 72, 72, 73, 74, 75, 76, 77, 78)
TESSERA_WIDTH(152, 76, 76, 77, 78, 79, 80, 81, 82)
TESSERA_WIDTH(160, 80, 80, 81, 82, 83, 84, 85, 86)
TESSERA_WIDTH(176, 88, 88, 89, 90, 91, 92, 93, 94)
TESSERA_WIDTH(192, 96, 96, 97, 98, 99, 100, 101, 102)
TESSERA_WIDTH(208, 104, 104, 105, 106, 107, 108, 109, 110)
TESSERA_WIDTH(224, 112, 112, 113, 114, 115, 116, 117, 118)
TESSERA_WIDTH(240, 120, 120, 121, 122, 123, 124, 125, 126)
TESSERA_WIDTH(256, 128, 128, 129, 130, 131, 132, 133, 134)

/// wgmma.mma_async.sp.sync.aligned.m64nNk32.f32 of bf16 or f16: a 2:4 a in registers.
template <int kN>
struct WgmmaSparse;

#define TESSERA_SPARSE_RS(type, n, count, n0, n1, n2, n3, n4, n5, n6, n7, n8)                             \
  asm volatile(TESSERA_WGMMA(n6, ".sp.sync.aligned.m64n" #n "k32.f32." #type "." #type, count)            \
               "{%" #n0 ", %" #n1 ", %" #n2 ", %" #n3 "}, %" #n4 ", %" #n5 ", %" #n7 ", p, 1, 1, %" #n8 ";\n\t}" \
               : TESSERA_ELEMENTS_##count("+f")                                                           \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(metadata), "r"(add), "n"(kSelector), "n"(kTransposeB))
#define TESSERA_SPARSE_WIDTH(n, count, ...)                                                               \
  template <>                                                                                             \
  struct WgmmaSparse<n> {                                                                                 \
    template <class T, int kSelector, int kTransposeB>                                                    \
    static __device__ __forceinline__ void rs(float (&d)[count], const uint32_t (&a)[4], uint64_t b,      \
                                              uint32_t metadata, int add) {                               \
      if constexpr (std::is_same_v<T, bf16>)                                                              \
        TESSERA_SPARSE_RS(bf16, n, count, __VA_ARGS__);                                                   \
      else                                                                                                \
        TESSERA_SPARSE_RS(f16, n, count, __VA_ARGS__);                                                    \
    }                                                                                                     \
  };

TESSERA_SPARSE_WIDTH(128, 64, 64, 65, 66, 67, 68, 69, 70, 71, 72)
TESSERA_SPARSE_WIDTH(256, 128, 128, 129, 130, 131, 132, 133, 134, 135, 136)

/// wgmma.mma_async.sync.aligned.m64n128k256.s32.b1.b1.and.popc: d (+)= popc(a and b), both by descriptor.
struct WgmmaBits {
  static __device__ __forceinline__ void ss(uint32_t (&d)[64], uint64_t a, uint64_t b, int add) {
    asm volatile(TESSERA_WGMMA(66, ".sync.aligned.m64n128k256.s32.b1.b1.and.popc", 64) "%64, %65, p;\n\t}"
                 : TESSERA_ELEMENTS_64("+r")
                 : "l"(a), "l"(b), "r"(add));
  }
};

}  // namespace tessera::gpu::detail
// clang-format on
