#pragma once

#include "ops/variant.h"

/// Variants that pass on paper and on the CPU, and have not been measured on a GPU yet.

namespace tessera::ops {

/// For its lifetime and on this thread, variants that are not measured yet are taken wherever they can run:
/// how they are measured in whole models, where a forced one would refuse the calls that it cannot run.
class TakeUnmeasured {
 public:
  TakeUnmeasured() : outer_(active_) { active_ = true; }
  ~TakeUnmeasured() { active_ = outer_; }
  TakeUnmeasured(const TakeUnmeasured&) = delete;
  static bool active() { return active_; }

 private:
  static inline constinit thread_local bool active_ = false;
  bool outer_;
};

/// The estimate of such a variant: taken only where it is forced, or within TakeUnmeasured.
inline Estimate unmeasured() {
  constexpr double kUnknown = -1;
  return {kUnknown, TakeUnmeasured::active() ? 0 : std::numeric_limits<double>::infinity()};
}

}  // namespace tessera::ops
