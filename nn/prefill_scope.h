#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "ops/sparse_linear/gate.h"
#include "runtime/override.h"

namespace tessera::nn {

struct Sequences;

/// Tells the layers called in it which rows are prompt tokens, so that gates can start within a text
/// (Compressed::prefill). Models open it around their blocks, except in decode steps. The innermost scope
/// counts.
class PrefillScope {
 public:
  /// The layers' inputs have a row for each token of the sequences. Null: they have not, and gates apply to
  /// every row. The sequences must outlive the scope.
  explicit PrefillScope(const Sequences* sequences) : sequences_(sequences) {}

  using Ranges = std::vector<std::pair<int64_t, int64_t>>;  // first row, and the one after the last
  /// For inputs with that many rows, the rows that gates apply to: the last `share` of the tokens of each
  /// text, rounded down; a text of one token is gated. Nothing: all rows.
  static std::optional<Ranges> gated_rows(int64_t rows, double share);

 private:
  static inline constinit thread_local PrefillScope* current_ = nullptr;
  Override<PrefillScope*> scope_{current_, this};
  const Sequences* sequences_;
};

/// The inputs x [..., in] that a layer with this gate multiplies with when it is called here: zeros in place
/// of those that the gate leaves out, on the rows that gates apply to (PrefillScope::gated_rows; `share` is
/// Compressed::prefill). Not recorded.
Tensor gated_inputs(const Tensor& x, const ops::Gate& gate, double share);

}  // namespace tessera::nn
