#include <algorithm>
#include <map>
#include <numeric>

#include "plan/plan.h"
#include "train/training_settings.h"

namespace tessera::train {
namespace {

double elements_of(const plan::HiddenMatrix& matrix) {
  return double(std::accumulate(matrix.rows.begin(), matrix.rows.end(), int64_t{0})) * double(matrix.columns);
}

/// Bytes of momentum, directions and Newton-Schulz of those matrices.
double muon_bytes(const std::vector<plan::HiddenMatrix>& hidden, DType arena, Device device) {
  const DType compute = optim::muon_compute(arena, device);
  optim::MuonScratch scratch;
  double bytes = 0;
  std::map<std::pair<int64_t, int64_t>, int64_t> counts;  // parameters of one shape are one batch
  for (const plan::HiddenMatrix& matrix : hidden) {
    bytes += 2 * double(matrix.count) * elements_of(matrix) * double(size_of(arena));
    counts[{std::accumulate(matrix.rows.begin(), matrix.rows.end(), int64_t{0}), matrix.columns}] +=
        matrix.count;
  }
  for (const auto& [shape, count] : counts) scratch.fit(count, shape.first, shape.second, compute);
  return bytes + scratch.bytes(compute);
}

/// Numbers in the projections, the projected gradients and their moments, and in the scratch.
double galore_numbers(const std::vector<plan::HiddenMatrix>& hidden, int64_t rank,
                      optim::GaloreProjection side) {
  using Side = optim::GaloreProjection;
  double kept = 0, largest = 0, widest = 0;
  for (const plan::HiddenMatrix& matrix : hidden)
    for (const int64_t rows : matrix.rows) {
      const int64_t columns = matrix.columns;
      check(rank <= std::min(rows, columns), "galore: the rank (--galore-rank) is ", rank,
            ", but a matrix of the model has ", rows, " x ", columns, " elements; expected at most ",
            std::min(rows, columns));
      const bool tall = rows >= columns;
      const bool right = side == Side::full || side == Side::right || (side == Side::std && tall) ||
                         (side == Side::reverse_std && !tall);
      const bool left = side == Side::full || !right;
      const double low = double(left ? rank : rows) * double(right ? rank : columns);
      const double projections = double(rank) * double((left ? rows : 0) + (right ? columns : 0));
      kept += double(matrix.count) * (3 * low + projections);
      largest = std::max(largest, double(rows) * double(columns));
      widest = std::max(widest, double(rank) * double(columns));
    }
  return kept + largest + (side == Side::full ? widest : 0);
}

}  // namespace

plan::Memory TrainingSettings::with_states(plan::Memory of_adamw,
                                           const std::vector<plan::HiddenMatrix>& hidden, DType dtype,
                                           Device device) const {
  const DType arena = dtype == DType::f64 ? DType::f64 : DType::f32;
  const double whole = of_adamw.gradients, masters = of_adamw.optimizer - 2 * whole,
               element = double(size_of(arena));
  double matrices = 0;  // bytes of an arena of theirs
  for (const plan::HiddenMatrix& matrix : hidden)
    matrices += double(matrix.count) * elements_of(matrix) * element;
  double states = 2 * whole;  // those of adamw; loro's are as many
  if (optimizer == "sgd") states = momentum > 0 ? whole : 0;
  if (optimizer == "muon") states = 2 * (whole - matrices) + muon_bytes(hidden, arena, device);
  if (optimizer == "galore")
    states = 2 * (whole - matrices) +
             element * galore_numbers(hidden, galore_rank, optim::parse_galore_projection(galore_projection));
  of_adamw.optimizer = optimizer_states == "bf16" ? states / 2 : states + masters;
  return of_adamw;
}

}  // namespace tessera::train
