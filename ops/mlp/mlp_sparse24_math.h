#pragma once

#include "ops/linear/activation_of_result.h"

namespace tessera::ops {

/// S'(a) f'(h) where mvue keeps a as `kept`.
template <Activation kKind, class C>
TESSERA_HD C drawn_slope24(C a, C kept) {
  return a == 0 || kept == 0 ? C(0) : kept / a * slope_of_result<kKind>(a);
}
/// The same where a soft method keeps scale (a - threshold).
template <Activation kKind, class C>
TESSERA_HD C soft_slope24(C a, C kept, C scale) {
  return kept == 0 ? C(0) : scale * slope_of_result<kKind>(a);
}

}  // namespace tessera::ops
