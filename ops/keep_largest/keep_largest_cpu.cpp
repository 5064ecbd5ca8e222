#include <algorithm>
#include <bit>
#include <vector>

#include "ops/keep_largest/keep_largest_kernels.h"
#include "runtime/parallel.h"

namespace tessera::ops {
namespace {

/// Score and index in one number, so that no two are equal.
uint64_t ranked(const float* scores, int64_t index) {
  return uint64_t(score_key(std::bit_cast<uint32_t>(scores[index]))) << 32 | uint32_t(index);
}

void keep_among(uint8_t* keep, const float* scores, int64_t count, int64_t zeros,
                std::vector<uint64_t>& ranks) {
  ranks.resize(size_t(count));
  for (int64_t i = 0; i < count; ++i) ranks[size_t(i)] = ranked(scores, i);
  std::nth_element(ranks.begin(), ranks.begin() + (zeros - 1), ranks.end());
  const uint64_t last = ranks[size_t(zeros - 1)];
  for (int64_t i = 0; i < count; ++i) keep[i] = ranked(scores, i) > last;
}

}  // namespace

void keep_largest_cpu(const Tensor& keep, const Tensor& scores, const KeepLargest& how) {
  const int64_t all = scores.count();
  const int64_t among = how.within == KeepWithin::row      ? scores.size(1)
                        : how.within == KeepWithin::matrix ? all
                                                           : how.group;
  auto* const to = keep.data<uint8_t>();
  const float* const from = scores.data<float>();
  constexpr int64_t kGrain = 1 << 12;  // elements for a thread
  parallel_for(all / among, std::max<int64_t>(1, kGrain / among), [&](int64_t begin, int64_t end) {
    std::vector<uint64_t> ranks;
    for (int64_t i = begin; i < end; ++i)
      keep_among(to + i * among, from + i * among, among, how.zeros, ranks);
  });
}

}  // namespace tessera::ops
