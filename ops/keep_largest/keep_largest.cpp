#include "ops/keep_largest/keep_largest.h"
#include "runtime/has_cuda.h"

#include "ops/keep_largest/keep_largest_kernels.h"
#include "runtime/call_site.h"

namespace tessera::ops {
namespace {

constexpr int64_t kMostElements = (int64_t{1} << 32) - 1;  // they are counted in 32 bits

int64_t candidates(const Tensor& scores, const KeepLargest& how) {
  switch (how.within) {
    case KeepWithin::row:
      return scores.size(1);
    case KeepWithin::matrix:
      return scores.count();
    default:
      return how.group;
  }
}

}  // namespace

const char* name_of(KeepWithin within) {
  constexpr const char* kNames[] = {"row", "matrix", "group"};
  return kNames[size_t(within)];
}

Tensor keep_largest(const Tensor& scores, const KeepLargest& how, Site site) {
  const CallScope call(site);
  check(scores.defined(), "keep_largest: scores is undefined");
  check(scores.rank() == 2 && is_floating(scores.dtype()) && scores.dtype() != DType::f8e4m3,
        "keep_largest: scores is ", describe(scores), "; expected f64, f32, bf16 or f16 [rows, columns]");
  if (how.within == KeepWithin::group)
    check(how.group >= 1 && scores.size(1) % how.group == 0, "keep_largest: groups of ", how.group,
          " in rows of ", scores.size(1), " columns; expected columns to be a multiple of the group");
  const int64_t among = candidates(scores, how);
  check(scores.count() <= kMostElements, "keep_largest: ", scores.count(), " elements; expected at most ",
        kMostElements);
  check(0 <= how.zeros && how.zeros <= among, "keep_largest: ", how.zeros, " zeros among ", among,
        " elements of a ", name_of(how.within), "; expected 0 to ", among);
  const Device device = scores.device();
  const Tensor keep = Tensor::empty_packed(scores.shape(), DType::u8, device);
  if (how.zeros == 0 || keep.count() == 0) {
    keep.fill(1);
    return keep;
  }
  const Tensor keys = scores.detach().to(DType::f32).packed();
  if (device.is_cpu()) {
    keep_largest_cpu(keep, keys, how);
  } else if constexpr (kCuda) {
    keep_largest_cuda(keep, keys, how);
  }
  return keep;
}

}  // namespace tessera::ops
