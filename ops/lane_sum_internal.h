#pragma once

#include <cstdint>
#include <limits>

namespace tessera::ops {

/// term(0) + ... + term(n - 1) in kLanes interleaved partial sums: a fixed order that vectorises, which a
/// single running sum does not.
template <class C, class Term>
C lane_sum(int64_t n, Term term) {
  constexpr int kLanes = 64 / sizeof(C);  // two registers of 32 bytes hide the latency of an addition
  C lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += term(i + lane);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  C sum = lanes[0];
  for (; i < n; ++i) sum += term(i);
  return sum;
}

/// The largest of x[0] ... x[n - 1], NaN left out; minus infinity of none. In lanes for the same reason.
template <class C>
C lane_max(const C* x, int64_t n) {
  constexpr int kLanes = 64 / sizeof(C);
  C lanes[kLanes];
  for (C& lane : lanes) lane = -std::numeric_limits<C>::infinity();
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane)
      lanes[lane] = x[i + lane] > lanes[lane] ? x[i + lane] : lanes[lane];
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int lane = 0; lane < width; ++lane)
      lanes[lane] = lanes[lane + width] > lanes[lane] ? lanes[lane + width] : lanes[lane];
  C largest = lanes[0];
  for (; i < n; ++i) largest = x[i] > largest ? x[i] : largest;
  return largest;
}

}  // namespace tessera::ops
