#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "ops/sparse24/sparse24.h"
#include "ops/sparse24/sparse24_layout.h"
#include "runtime/philox.h"
#include "tensor/dtype.h"

/// What is kept of one group, on every device the same.

namespace tessera::ops::sparse24 {

/// An element's magnitude as an integer: the order of magnitudes, zeros equal, NaN last.
template <class T>
TESSERA_HD auto magnitude(T x) {
  if constexpr (sizeof(T) == 2) {
    return uint32_t(x.bits & 0x7FFFu);
  } else if constexpr (sizeof(T) == 4) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits & 0x7FFFFFFFu;
  } else {
    uint64_t bits;
    memcpy(&bits, &x, 8);
    return bits & 0x7FFFFFFFFFFFFFFFull;
  }
}

/// Two positions of a group, ascending.
struct Positions {
  int first = 0, second = 1;
  TESSERA_HD uint32_t nibble() const { return uint32_t(first | second << 2); }
  static TESSERA_HD Positions of(uint32_t nibble) { return {int(nibble & 3), int(nibble >> 2 & 3)}; }
  static TESSERA_HD Positions of_two(int a, int b) { return a < b ? Positions{a, b} : Positions{b, a}; }
};

/// floor(sample * units / samples) without that product, which overflows where all of 2^32 units are samples.
TESSERA_HD int64_t unit_of_sample(int64_t sample, int64_t units, int64_t samples) {
  return sample * (units / samples) + sample * (units % samples) / samples;
}

/// x[index] without an address: registers have none.
template <class T>
TESSERA_HD T pick(const T (&x)[4], int index) {
  const T low = index & 1 ? x[1] : x[0], high = index & 1 ? x[3] : x[2];
  return index & 2 ? high : low;
}

/// The two largest, of equal ones the lower index.
template <class T>
TESSERA_HD Positions two_largest(const T (&x)[4]) {
  const auto m0 = magnitude(x[0]), m1 = magnitude(x[1]), m2 = magnitude(x[2]), m3 = magnitude(x[3]);
  // Wins of each against the others; an element is kept if it wins at least two of three.
  const int w01 = m0 >= m1, w02 = m0 >= m2, w03 = m0 >= m3, w12 = m1 >= m2, w13 = m1 >= m3, w23 = m2 >= m3;
  const int wins0 = w01 + w02 + w03, wins1 = 1 - w01 + w12 + w13, wins2 = 2 - w02 - w12 + w23;
  return {wins0 >= 2 ? 0 : wins1 >= 2 ? 1 : 2, wins0 + wins1 >= 5 ? 1 : wins0 + wins1 + wins2 <= 4 ? 3 : 2};
}

/// The third-largest magnitude: the larger one of those that are not kept.
template <class T>
TESSERA_HD Compute<T> third_largest(const T (&x)[4], Positions kept) {
  Compute<T> third = 0;
  for (int i = 0; i < 4; ++i)
    if (i != kept.first && i != kept.second) {
      const Compute<T> value = std::abs(Compute<T>(x[i]));
      third = value > third || value != value ? value : third;
    }
  return third;
}

template <class T>
TESSERA_HD Compute<T> soft_thresholded(T x, Compute<T> threshold) {
  const Compute<T> value(x), rest = std::abs(value) - threshold;
  return value < 0 ? -rest : rest;
}

/// The weights a_i of mvue, in f32 for every dtype, so that all come to the same choice: magnitudes by a
/// power of two near 1, plus eps. False if an element is not finite.
template <class T>
TESSERA_HD bool draw_weights(const T (&x)[4], float (&a)[4]) {
  float most = 0;
  bool finite = true;
  for (int i = 0; i < 4; ++i) {
    a[i] = std::abs(float(x[i]));
    finite = finite && a[i] <= 3.4028234663852886e38f;
    most = a[i] > most ? a[i] : most;
  }
  uint32_t bits;
  memcpy(&bits, &most, 4);
  uint32_t exponent = bits >> 23;
  exponent = exponent < 1 ? 1 : exponent > 253 ? 253 : exponent;
  bits = (254 - exponent) << 23;
  float scale;
  memcpy(&scale, &bits, 4);
  for (float& weight : a) weight = weight * scale + 0x1p-40f;  // the product is exact
  return finite;
}

/// Sum of the weights but one: never by subtraction, which would leave nothing of small ones.
TESSERA_HD float sum_without(const float (&a)[4], int index) {
  float sum = 0;
  for (int i = 0; i < 4; ++i)
    if (i != index) sum += a[i];
  return sum;
}

/// The index in proportion to the weights, but for `without` (-1: none), at u in [0, 1).
TESSERA_HD int drawn_index(const float (&a)[4], int without, float u) {
  const float at = u * sum_without(a, without);
  float sum = 0;
  int last = 0;
  for (int i = 0; i < 4; ++i) {
    if (i == without) continue;
    sum += a[i];
    last = i;
    if (at < sum) return i;
  }
  return last;
}

/// With which probability index i is one of the two that are drawn.
template <class C>
TESSERA_HD C inclusion(const float (&a)[4], int index) {
  C sum = 0, probability = 0;
  for (const float weight : a) sum += C(weight);
  for (int j = 0; j < 4; ++j) {
    if (j == index) continue;
    C others = 0;
    for (int i = 0; i < 4; ++i)
      if (i != j) others += C(a[i]);
    probability += C(a[j]) / others;
  }
  return C(pick(a, index)) / sum * (1 + probability);
}

/// What a method needs of its group, next to the elements.
struct Draws {
  float first = 0, second = 0;  // uniform in [0, 1)
};
/// Those of group number `group` of x: two groups share a block of four words. Along tokens the blocks are
/// others than along features.
TESSERA_HD Draws draws_of(uint64_t seed, uint64_t offset, Along24 along, int64_t group) {
  const uint64_t block = uint64_t(group) / 2 | uint64_t(along == Along24::tokens) << 63;
  const Uint4 words = philox(seed, offset, block);
  const int from = int(group % 2) * 2;
  return {uniform_half_open(words.word[from]), uniform_half_open(words.word[from + 1])};
}
/// The number of a group: of row `token`, group `group` of it, or of column `feature`, group `group` of it.
/// `groups_of_row`: along features ceil(features / 4); along tokens `features`.
TESSERA_HD int64_t group_number(Along24 along, int64_t outer, int64_t group, int64_t groups_of_row) {
  return along == Along24::features ? outer * groups_of_row + group : group * groups_of_row + outer;
}

template <class T>
struct Kept {
  Positions at;
  T values[2];
};

/// Of one group, by any method but mvue; elements past the edge are zeros.
template <class T>
TESSERA_HD Kept<T> select_plain(Method24 method, const T (&x)[4], float scale) {
  using C = Compute<T>;
  if (method == Method24::fast) return {{0, 1}, {x[0], x[1]}};
  const Positions at = two_largest(x);
  const T first = pick(x, at.first), second = pick(x, at.second);
  if (method == Method24::naive) return {at, {first, second}};
  const C threshold = third_largest(x, at);
  return {
      at,
      {T(soft_thresholded(first, threshold) * C(scale)), T(soft_thresholded(second, threshold) * C(scale))}};
}
/// By mvue.
template <class T>
TESSERA_HD Kept<T> select_drawn(const T (&x)[4], const Draws& draws) {
  using C = Compute<T>;
  float a[4];
  if (!draw_weights(x, a)) return select_plain(Method24::naive, x, 1);
  const int first = drawn_index(a, -1, draws.first);
  const Positions at = Positions::of_two(first, drawn_index(a, first, draws.second));
  return {at,
          {T(C(pick(x, at.first)) / inclusion<C>(a, at.first)),
           T(C(pick(x, at.second)) / inclusion<C>(a, at.second))}};
}

}  // namespace tessera::ops::sparse24
