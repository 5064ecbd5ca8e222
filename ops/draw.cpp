#include "ops/draw.h"

#include <algorithm>
#include <cmath>

#include "runtime/error.h"
#include "runtime/integers.h"
#include "runtime/philox.h"

namespace tessera::ops {
namespace {

bool prime(int64_t n) {
  for (int64_t d = 2; d * d <= n; ++d)
    if (n % d == 0) return false;
  return n >= 2;
}

}  // namespace

double Draw::uniform() {
  return double(uniform_half_open(philox(seed_, number_, drawn_++).word[0]));
}

int64_t Draw::size(int64_t low, int64_t high) {
  check(0 < low && low <= high, "draw: no sizes from ", low, " to ", high);
  const double from = std::log(double(low)), to = std::log(double(high) + 1);
  int64_t n = std::clamp(int64_t(std::exp(from + (to - from) * uniform())), low, high);
  const double kind = uniform();
  if (kind >= 0.4 && kind < 0.55) {
    n |= 1;
  } else if (kind >= 0.55 && kind < 0.7) {
    while (n > low && !prime(n)) --n;
  } else if (kind >= 0.7 && kind < 0.85) {
    n = round_up(n, 8);
  } else if (kind >= 0.85) {
    n = (int64_t(1) << std::lround(std::log2(double(n)))) + pick({-1, 0, 1});
  }
  return std::clamp(n, low, high);
}

}  // namespace tessera::ops
