#pragma once

#include <algorithm>

#include "nn/form.h"
#include "nn/prefill_scope.h"

/// What layers with compressed weights share; not for their users.

namespace tessera::nn {

/// Whether some rows of x [N, in] are spared by the gates, so that they are not applied within one call of
/// ops::sparse_linear.
inline bool spares_rows(const Compressed& form, const Tensor& x) {
  const bool has_gate = std::ranges::any_of(
      form.parts, [](const ops::SparsePart& part) { return part.gate.kind != ops::Gate::Kind::none; });
  return has_gate && x.rank() == 2 && PrefillScope::gated_rows(x.size(0), form.prefill);
}

}  // namespace tessera::nn
