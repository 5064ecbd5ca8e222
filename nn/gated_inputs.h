#pragma once

#include "ops/sparse_linear/gate.h"

namespace tessera::nn {

/// The inputs x [..., in] that a layer with this gate multiplies with when it is called here: zeros in place
/// of those that the gate leaves out, on the rows that gates apply to (PrefillScope::gated_rows; `share` is
/// Compressed::prefill). Not recorded.
Tensor gated_inputs(const Tensor& x, const ops::Gate& gate, double share);

}  // namespace tessera::nn
