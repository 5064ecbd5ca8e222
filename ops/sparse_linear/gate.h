#pragma once

#include <cstdint>
#include <vector>

#include "tensor/tensor.h"

/// Which inputs of a linear layer count for a token: activation sparsity.

namespace tessera::ops {

/// none       All inputs count.
/// threshold  Input j of a token counts unless |x_j| c_j <= t: TEAL (arXiv:2408.14690) with c = 1, WINA
///            (arXiv:2505.19427) with c_j the norm of column j of the weight.
/// top_k      The k inputs of the token with the largest |x_j| c_j count, ties to the lowest index: La RoSA
///            (arXiv:2507.01299). The sparsity does not drift with the text.
///
/// |x_j| c_j is computed in f32. A NaN counts under every gate, so that it is not lost.
struct Gate {
  enum class Kind : uint8_t { none, threshold, top_k };
  Kind kind = Kind::none;
  double threshold = 0;  // rounded to f32
  int64_t keep = 0;      // k
  Tensor scales = {};    // c, f32 [in], packed; undefined: 1

  void fields(auto&& visit) {
    visit("kind", kind), visit("threshold", threshold), visit("keep", keep), visit("scales", scales);
  }
  /// The same gate, its scales in the same memory.
  bool operator==(const Gate& other) const;
  /// Throws, beginning with `name`, unless the gate fits layers of `in` inputs.
  void validate(const std::string& name, int64_t in) const;
};

/// For each row of x [T, in] (f64, f32, bf16 or f16, on the CPU) the inputs that count, in ascending order.
std::vector<std::vector<int32_t>> counting_inputs(const Tensor& x, const Gate& gate);

/// x [..., in] with zeros in place of the inputs that do not count. Not recorded.
Tensor apply_gate(const Tensor& x, const Gate& gate, Site site = Site::here());

}  // namespace tessera::ops
