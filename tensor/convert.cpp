#include "tensor/convert.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace tessera {

#if defined(__F16C__)

namespace {

constexpr int64_t kLanes = 8;

bool any_nan(__m256 values) {
  return _mm256_movemask_ps(_mm256_cmp_ps(values, values, _CMP_UNORD_Q)) != 0;
}

/// f16's own conversions keep the bits of a NaN when they widen it and drop them when they round it; the
/// instructions do otherwise. They agree on everything else, subnormal numbers included.
int64_t widen_packed(float* to, const f16* from, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const __m256 wide = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
    if (any_nan(wide)) [[unlikely]]
      for (int64_t lane = i; lane < i + kLanes; ++lane) to[lane] = float(from[lane]);
    else
      _mm256_storeu_ps(to + i, wide);
  }
  return i;
}

int64_t narrow_packed(f16* to, const float* from, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const __m256 wide = _mm256_loadu_ps(from + i);
    const __m128i rounded = _mm256_cvtps_ph(wide, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    if (any_nan(wide)) [[unlikely]]
      for (int64_t lane = i; lane < i + kLanes; ++lane) to[lane] = f16(from[lane]);
    else
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), rounded);
  }
  return i;
}

}  // namespace

#else

namespace {

int64_t widen_packed(float*, const f16*, int64_t) {
  return 0;
}
int64_t narrow_packed(f16*, const float*, int64_t) {
  return 0;
}

}  // namespace

#endif

// Elements that lie side by side have a loop of their own, which the compiler vectorises where there is no
// F16C.
template <>
void widen<f16>(float* to, const f16* from, int64_t n, int64_t stride) {
  if (stride == 1) {
    for (int64_t i = widen_packed(to, from, n); i < n; ++i) to[i] = float(from[i]);
  } else if (stride == 0) {
    const float value = n > 0 ? float(*from) : 0;
    for (int64_t i = 0; i < n; ++i) to[i] = value;
  } else {
    for (int64_t i = 0; i < n; ++i) to[i] = float(from[i * stride]);
  }
}

template <>
void narrow<f16>(f16* to, const float* from, int64_t n, int64_t stride) {
  if (stride == 1) {
    for (int64_t i = narrow_packed(to, from, n); i < n; ++i) to[i] = f16(from[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) to[i * stride] = f16(from[i]);
  }
}

}  // namespace tessera
