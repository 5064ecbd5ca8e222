#pragma once

#include <cstdint>

#include "runtime/config.h"

/// Which rows of a matrix become zeros: those of a gradient that a slice leaves out. For zero_rows.cuh, and
/// for tests on the CPU.

namespace tessera::ops {

/// Rows are looked at 32 at a time. The bit of the row `index`, if it is one of first ... first + 31.
TESSERA_HD uint32_t bit_of_row(int64_t index, int64_t first) {
  const int64_t at = index - first;
  return at >= 0 && at < 32 ? uint32_t{1} << at : 0;
}
/// The rows that become zeros: those of first ... end - 1 among the 32 that are not `named`.
TESSERA_HD uint32_t rows_to_fill(uint32_t named, int64_t first, int64_t end) {
  const int64_t inside = end - first;
  return ~named & (inside >= 32 ? ~uint32_t{0} : (uint32_t{1} << inside) - 1);
}

/// Rows that follow each other among 32.
struct RowRun {
  int begin, count;
  uint32_t rest;  // of the bits, without them
};
/// The first run of set bits; there is one.
TESSERA_HD RowRun first_run(uint32_t bits) {
  int begin = 0, end = 0;
  while (!(bits >> begin & 1)) ++begin;
  for (end = begin; end < 32 && (bits >> end & 1); ++end) bits &= ~(uint32_t{1} << end);
  return {begin, end - begin, bits};
}

}  // namespace tessera::ops
