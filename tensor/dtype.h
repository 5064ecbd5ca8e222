#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <ostream>
#include <string_view>
#include <type_traits>

#include "runtime/config.h"
#include "runtime/error.h"

namespace tessera {

/// Element types. f64 exists on the CPU only, for reference results; f8e4m3 is for storage (cast, copy) only.
enum class DType : uint8_t { f64, f32, bf16, f16, f8e4m3, i64, i32, u8, boolean };

size_t size_of(DType dtype);
const char* name_of(DType dtype);          // "f32", "bf16", "bool"
DType parse_dtype(std::string_view name);  // throws on anything but the names above
bool is_floating(DType dtype);
/// Distance from 1 to the next value: 2^-52, 2^-23, 2^-7, 2^-10, 2^-3. Floating dtypes only.
double epsilon(DType dtype);
inline std::ostream& operator<<(std::ostream& out, DType dtype) {
  return out << name_of(dtype);
}

/// bfloat16: the upper half of an f32; conversions round to nearest even.
struct bf16 {
  uint16_t bits = 0;
  bf16() = default;
  TESSERA_HD explicit bf16(float value);
  TESSERA_HD operator float() const;
};

/// IEEE 754 binary16; conversions round to nearest even.
struct f16 {
  uint16_t bits = 0;
  f16() = default;
  TESSERA_HD explicit f16(float value);
  TESSERA_HD operator float() const;
};

/// OCP 8-bit float E4M3 ("fn"): largest 448, no infinity, NaN 0x7F and 0xFF. Conversion saturates to ±448 and
/// keeps NaN.
struct f8e4m3 {
  uint8_t bits = 0;
  f8e4m3() = default;
  TESSERA_HD explicit f8e4m3(float value);
  TESSERA_HD operator float() const;
};

/// The arithmetic type of an element type: double for f64, float for the other floats.
template <class T>
using Compute = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <class... T>
struct Types {
  /// The place of U among them; their number if it is none of them.
  template <class U>
  static constexpr size_t place() {
    size_t at = 0;
    (void)((std::is_same_v<T, U> || (++at, false)) || ...);
    return at;
  }
};
/// Element types in the order of DType.
using ElementTypes = Types<double, float, bf16, f16, f8e4m3, int64_t, int32_t, uint8_t, bool>;

template <class T>
inline constexpr DType dtype_of = DType(ElementTypes::place<T>());

/// Calls `f.template operator()<T>()` with the element type of `dtype`, if that is one of First, Rest...;
/// otherwise calls `refuse`, which throws.
template <class First, class... Rest, class F, class Refuse>
decltype(auto) dispatch_among(DType dtype, F&& f, Refuse&& refuse) {
  if constexpr (sizeof...(Rest) > 0) {
    if (dtype != dtype_of<First>) return dispatch_among<Rest...>(dtype, f, refuse);
  } else {
    if (dtype != dtype_of<First>) refuse();
  }
  return f.template operator()<First>();
}

/// Arithmetic floating dtypes: f64, f32, bf16, f16. Throws, naming `what` and the dtype, for any other.
template <class F>
decltype(auto) dispatch_floating(DType dtype, const char* what, F&& f) {
  return dispatch_among<double, float, bf16, f16>(dtype, f, [&] {
    fail_at(Site::here(), what, ": dtype ", dtype, " is not supported; expected f64, f32, bf16 or f16");
  });
}

/// The same for kernels on a GPU: f32, bf16, f16.
template <class F>
decltype(auto) dispatch_floating_cuda(DType dtype, const char* what, F&& f) {
  return dispatch_among<float, bf16, f16>(dtype, f, [&] {
    fail_at(Site::here(), what, ": dtype ", dtype,
            " is not supported on device cuda; expected f32, bf16 or f16",
            dtype == DType::f64 ? " (f64 runs on the CPU, as the oracle)" : "");
  });
}

/// Index dtypes: i64, i32.
template <class F>
decltype(auto) dispatch_index(DType dtype, const char* what, F&& f) {
  return dispatch_among<int64_t, int32_t>(dtype, f, [&] {
    fail_at(Site::here(), what, ": index dtype ", dtype, " is not supported; expected i64 or i32");
  });
}

/// Every dtype.
template <class F>
decltype(auto) dispatch_any(DType dtype, F&& f) {
  return dispatch_among<double, float, bf16, f16, f8e4m3, int64_t, int32_t, uint8_t, bool>(
      dtype, f, [&] { fail_at(Site::here(), "dtype ", int(dtype), " does not exist"); });
}

/// A double as a float whose last bit is set if it is not exact: rounding that to fewer bits gives what
/// rounding the double itself would (Boldo, Melquiond, "When double rounding is odd", IMACS 2005).
TESSERA_HD float round_to_odd(double value) {
  const float nearest = float(value);
  if (double(nearest) == value || value != value) return nearest;
  const bool away = value < 0 ? double(nearest) < value : double(nearest) > value;
  return std::bit_cast<float>((std::bit_cast<uint32_t>(nearest) - (away ? 1u : 0u)) | 1u);
}

/// Value conversion of casts: rounded once to nearest even (64-bit integers to 16-bit floats twice, through
/// f32); floats to integers truncate toward zero and saturate, and NaN becomes 0.
template <class To, class From>
TESSERA_HD To convert(From value) {
  if constexpr (std::is_same_v<To, From>) {
    return value;
  } else if constexpr (std::is_same_v<To, bool>) {
    if constexpr (std::is_arithmetic_v<From>)
      return value != From(0);
    else
      return float(value) != 0.0f;
  } else if constexpr (std::is_integral_v<To> && !std::is_integral_v<From>) {
    using C = std::conditional_t<std::is_same_v<From, double>, double, float>;
    constexpr To least = std::numeric_limits<To>::min(), most = std::numeric_limits<To>::max();
    const auto number = C(value);
    if (number != number) return To(0);
    if (number <= C(least)) return least;
    return number >= C(most) ? most : To(number);  // C(most) is exact, or one more
  } else if constexpr (std::is_arithmetic_v<To> && std::is_arithmetic_v<From>) {
    return To(value);
  } else if constexpr (std::is_arithmetic_v<To>) {
    return To(float(value));
  } else if constexpr (std::is_same_v<From, double>) {
    return To(round_to_odd(value));
  } else {
    return To(float(value));
  }
}

// ---- conversions ----

TESSERA_HD bf16::bf16(float value) {
#if defined(__CUDA_ARCH__)
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#else
  const uint32_t word = std::bit_cast<uint32_t>(value);
  bits = (word & 0x7FFFFFFFu) > 0x7F800000u ? uint16_t((word >> 16) | 0x40u)
                                            : uint16_t((word + 0x7FFFu + ((word >> 16) & 1u)) >> 16);
#endif
}

TESSERA_HD bf16::operator float() const {
  return std::bit_cast<float>(uint32_t(bits) << 16);
}

TESSERA_HD f16::f16(float value) {
#if defined(__CUDA_ARCH__)
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#else
  const uint32_t word = std::bit_cast<uint32_t>(value), sign = (word >> 16) & 0x8000u,
                 magnitude = word & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) {
    bits = uint16_t(sign | 0x7E00u);
  } else if (magnitude >= 0x477FF000u) {  // rounds to 2^16 or more
    bits = uint16_t(sign | 0x7C00u);
  } else if (magnitude < 0x38800000u) {  // below 2^-14: subnormal; adding 0.5 aligns the mantissa and rounds
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    bits = uint16_t(sign | (std::bit_cast<uint32_t>(shifted) - 0x3F000000u));
  } else {
    bits = uint16_t(sign | ((magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13));
  }
#endif
}

TESSERA_HD f16::operator float() const {
#if defined(__CUDA_ARCH__)
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
#else
  const uint32_t sign = uint32_t(bits & 0x8000u) << 16, exponent = (bits >> 10) & 0x1Fu,
                 mantissa = bits & 0x3FFu;
  if (exponent == 0) {  // zero or subnormal: mantissa · 2^-24
    const float magnitude = float(mantissa) * (1.0f / 16777216.0f);
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
  }
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7F800000u | (mantissa << 13));
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
#endif
}

TESSERA_HD f8e4m3::f8e4m3(float value) {
  const uint32_t word = std::bit_cast<uint32_t>(value);
  const uint8_t sign = uint8_t((word >> 24) & 0x80u);
  const uint32_t magnitude = word & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) {
    bits = uint8_t(sign | 0x7Fu);
  } else if (magnitude >= 0x43E00000u) {  // 448 and more
    bits = uint8_t(sign | 0x7Eu);
  } else if (magnitude < 0x3C800000u) {                                // below 2^-6: subnormal, units of 2^-9
    const float shifted = std::bit_cast<float>(magnitude) + 16384.0f;  // one unit in the last place is 2^-9
    bits = uint8_t(sign | (std::bit_cast<uint32_t>(shifted) - 0x46800000u));
  } else {
    const uint32_t rounded = (magnitude - 0x3C000000u + 0x7FFFFu + ((magnitude >> 20) & 1u)) >> 20;
    bits = uint8_t(sign | (rounded > 0x7Eu ? 0x7Eu : rounded));
  }
}

TESSERA_HD f8e4m3::operator float() const {
  const uint32_t sign = uint32_t(bits & 0x80u) << 24, exponent = (bits >> 3) & 0xFu, mantissa = bits & 7u;
  if ((bits & 0x7Fu) == 0x7Fu) return std::bit_cast<float>(sign | 0x7FC00000u);
  if (exponent == 0) {
    const float magnitude = float(mantissa) * (1.0f / 512.0f);
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
  }
  return std::bit_cast<float>(sign | ((exponent + 120) << 23) | (mantissa << 20));
}

}  // namespace tessera
