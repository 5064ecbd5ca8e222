#include "nn/prefill_scope.h"

#include "nn/attention.h"

namespace tessera::nn {

std::optional<PrefillScope::Ranges> PrefillScope::gated_rows(int64_t rows, double share) {
  if (share >= 1 || !current_ || !current_->sequences_) return {};
  Ranges ranges;
  int64_t first = 0;
  for (const int64_t length : current_->sequences_->lengths) {
    const int64_t gated = length == 1 ? 1 : int64_t(double(length) * share);
    if (gated > 0) ranges.emplace_back(first + length - gated, first + length);
    first += length;
  }
  check(first == rows, "gate: inputs of ", rows, " rows, and sequences of ", first, " tokens");
  return ranges;
}

Tensor gated_inputs(const Tensor& x, const ops::Gate& gate, double share) {
  if (gate.kind == ops::Gate::Kind::none) return x;
  const auto rows = x.rank() == 2 ? PrefillScope::gated_rows(x.size(0), share) : std::nullopt;
  if (!rows) return ops::apply_gate(x, gate);
  const Tensor inputs = x.detach().clone();
  for (const auto& [begin, end] : *rows)
    inputs.slice(0, begin, end).copy_from(ops::apply_gate(x.detach().slice(0, begin, end), gate));
  return inputs;
}

}  // namespace tessera::nn
