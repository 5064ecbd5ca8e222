#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "nn/linear.h"

/// Weights made of factors, in place of a dense one (nn/form.h has the forms): how a layer gets them, what
/// they cost, and the dense weight that some of them stand for.

namespace tessera::nn {

/// Which form a layer gets.
enum class FactorKind : uint8_t {
  dense,     // none
  low_rank,  // nn::LowRank
  cola,      // nn::Cola
  sltrain,   // nn::SparsePlusLowRank
  lost       // nn::ColumnsPlusLowRank
};
const char* name_of(FactorKind kind);                 // "low_rank"
FactorKind parse_factor_kind(std::string_view name);  // throws, naming the choices

/// How factors start.
enum class FactorInit : uint8_t {
  /// As the method's paper draws them. low_rank, cola: normal numbers, of the deviation sqrt(sqrt(1 / (in +
  /// out)) / sqrt(rank)) in both factors, so that b a has the variance 1 / (in + out) (Liu et al.,
  /// arXiv:2502.10940); half of that deviation with the squared ReLU. sltrain: a and the values
  /// U(-1/sqrt(in), 1/sqrt(in)), b zeros (arXiv:2406.02214, section 3). lost has no such start and
  /// throws: it needs `svd`.
  drawn,
  /// Of the layer's dense weight, which they replace: b = u sqrt(s), a = sqrt(s) vt of its leading singular
  /// triples, so that the layer computes its best approximation of that rank; for sltrain and lost the values
  /// and columns are what remains.
  svd,
  blank  // zeros, and any places: of layers whose numbers are loaded afterwards
};
FactorInit parse_factor_init(std::string_view name);  // throws, naming the choices

/// How lost chooses its columns.
enum class ColumnChoice : uint8_t {
  random,
  gradient,  // those with the largest norm in a gradient of the dense weight
  residual   // those with the largest norm in the residual of the singular triples
};
ColumnChoice parse_column_choice(std::string_view name);  // throws, naming the choices

struct FactorOptions {
  FactorKind kind = FactorKind::low_rank;
  int64_t rank = 0;
  FactorInit init = FactorInit::drawn;
  ops::Activation activation = ops::Activation::silu;  // cola: silu or relu_squared
  double alpha = 32;                                   // sltrain: W = alpha / rank b a + S
  double density = 0.03;       // sltrain: share of the elements that S has, of each part
  double column_share = 0.05;  // lost: share of the inputs whose columns it has, at least one
  double gamma = 0.5;          // lost: W = gamma b a + (1 - gamma) columns
  ColumnChoice columns = ColumnChoice::residual;  // lost
  int64_t residual_rank = 0;                      // lost: triples that the residual leaves out; 0: the rank

  bool operator==(const FactorOptions&) const = default;
  /// Throws if a value is invalid, naming the option.
  void validate() const;
};

/// Numbers that a matrix [rows, in] has in that form; the multiply-adds per token of its forward pass; and
/// those that backward keeps per token next to the input. Throws if the rank is not from 1 to min(rows, in).
struct FactorCounts {
  double parameters = 0, multiply_adds = 0, saved = 0;
};
FactorCounts count_factors(const FactorOptions& options, int64_t rows, int64_t in);

/// Replaces the dense weight of the layer by factors, parameters of the weight's dtype and device: those of
/// each of the parts (row ranges of the weight: q, k and v) on their own. `gradient`: of the weight, for
/// ColumnChoice::gradient alone. Draws from `rng`. Throws, and leaves the layer as it was, if the layer is
/// not dense or tied, the rows do not add up, the rank is too large for a part, or the weight has no singular
/// value decomposition (it is not finite).
void factorize(Linear& layer, const std::vector<int64_t>& rows, const FactorOptions& options, const Rng& rng,
               const Tensor& gradient = {});

/// Whether merged_weight has one: all forms of factors but cola, whose activation is between them.
bool merges(const Form& form);
/// The dense weight [out, in] that the layer multiplies with: its own, or that of its factors, computed in
/// f32 (f64) and rounded once. Throws unless merges().
Tensor merged_weight(const Linear& layer);

/// The two factors of one part of a layer's weight, as views: b [rows, rank], a [rank, in].
struct FactorPair {
  Tensor b, a;
};
/// The factors of a form, or null if it has none.
const Factors* factors_of(const Form& form);
std::vector<FactorPair> pairs_of(const Factors& factors);

}  // namespace tessera::nn
