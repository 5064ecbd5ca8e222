#pragma once

#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ops/keep_largest/keep_largest.h"
#include "pretrained/sparse_model.h"

/// What is pruned, by which score, in which pattern, and how the weights that stay make up for it.

namespace tessera::sparsity {

/// What a weight W_ij from input j to output i is worth; the lowest are dropped. ||X_j|| is the L2 norm of
/// input j over all tokens of a sample, squares averaged over the samples.
enum class Score : uint8_t {
  magnitude,  // |W_ij|
  wanda,      // |W_ij| ||X_j||                                             Sun et al., arXiv:2306.11695
  ria,  // (|W_ij| / sum_i |W_ij| + |W_ij| / sum_j |W_ij|) ||X_j||^a  Zhang et al., "Plug-and-Play", ICLR 2024
  sparsegpt  // W_ij^2 / (U_jj)^2 with H^-1 = U^T U                        Frantar, Alistarh, arXiv:2301.00774
};

/// What happens to the weights that stay.
enum class Update : uint8_t {
  none,
  obs,  // columns from left to right, each error passed on to later columns (SparseGPT's; arXiv:2301.00774)
  admm  // the mask's least-squares solution by ADMM (Boza, arXiv:2401.02938)
};

/// Which share of the weights each matrix loses.
enum class Allocation : uint8_t {
  uniform,
  owl  // blocks with more outliers of Wanda's score lose less (Yin et al., arXiv:2310.05175)
};

const char* name_of(Score score);  // "wanda"
const char* name_of(Update update);
const char* name_of(Allocation allocation);
Score parse_score(std::string_view text);  // throws, naming the choices
Update parse_update(std::string_view text);
Allocation parse_allocation(std::string_view text);

/// Unstructured, or n:m: of each m consecutive inputs of an output, the n of lowest score are dropped.
struct Pattern {
  int64_t zeros = 0, group = 0;  // n and m; both 0: unstructured

  bool structured() const { return group > 0; }
  std::string name() const;  // "2:4", "unstructured"
  bool operator==(const Pattern&) const = default;
};
/// "unstructured" or "2:4". Throws unless 0 < n < m <= 1024.
Pattern parse_pattern(std::string_view text);

/// The gates that a model will run under.
struct PruneGates {
  pretrained::Gates gates;  // of each linear module of the blocks
  double prefill = 1;       // nn::Compressed::prefill
};

struct PrunedMatrix;

struct PruneOptions {
  Score score = Score::wanda;
  Update update = Update::none;
  Pattern pattern = {};
  double sparsity = 0.5;  // share of the weights to drop; with a pattern n:m it must be n / m
  /// Unstructured: the lowest scores of each row, or of a whole matrix (with the score sparsegpt or the
  /// update obs: of each block of columns). Not given: of the matrix for magnitude and sparsegpt, else of
  /// each row.
  std::optional<ops::KeepWithin> within = {};
  Allocation allocation = Allocation::uniform;
  /// The sparsity of single matrices, by names or patterns of names; a later one takes precedence.
  std::vector<std::pair<std::string, double>> assigned = {};

  /// Which matrices: those of blocks first_block ... last_block - 1 (-1: to the last) whose name fits one of
  /// `only` (none: all) and none of `except`; with `invert` all others. Patterns as
  /// pretrained::LinearModules::matching has them; one without a dot is the last part of the name: "k_proj".
  std::vector<std::string> only = {}, except = {};
  int64_t first_block = 0, last_block = -1;
  bool invert = false;

  /// Wanda: instead of a fixed share of each row, the weights whose scores make up the lowest share alpha of
  /// the row's sum; alpha is found by bisection (Sun et al., appendix).
  bool variant = false;
  double ria_power = 0.5;    // a of ria
  double owl_outlier = 5;    // M: an outlier is that many times the mean score
  double owl_range = 0.08;   // lambda: half the difference of the largest and the least sparsity
  double damping = 0.01;     // added to the Hessian's diagonal, as a share of its mean; raised if it must be
  int64_t block_size = 128;  // columns whose masks obs and the score sparsegpt choose together
  int bits = 0;              // obs rounds the weights that stay to so many bits per row; 0: it does not
  bool sequential = false;   // calibrates each layer on the outputs of the pruned ones before it in its block
  int64_t iterations = 20;   // of ADMM
  double rho = 1;            // its penalty, for inputs scaled to norm 1
  /// Gate-aware (DuoGPT, arXiv:2506.20194): from gated inputs, the remaining weights reproduce the outputs of
  /// the dense model (sparsity/gate_aware.h). With the update obs or admm.
  std::optional<PruneGates> gates = {};
  /// All parameters of the model are rounded to it, those that stay as they are too: the model in memory is
  /// the one that is saved in this dtype.
  std::optional<DType> dtype = {};

  int64_t batch = 1;  // samples passed through a block at a time
  /// Where finished blocks are kept, so that the same call goes on after them; "": nowhere.
  std::string progress = "";
  /// Called after each block with its matrices.
  std::function<void(int64_t block, const std::vector<PrunedMatrix>&)> on_block = {};

  /// Throws, naming the option, unless all values are in range and fit each other.
  void validate() const;
  /// Throws, naming `matrix`, if a GPU cannot update one of so many columns.
  void check_gpu(const std::string& matrix, int64_t columns) const;
  bool needs_samples() const {
    return score != Score::magnitude || update != Update::none || allocation == Allocation::owl;
  }
  bool needs_products() const { return score == Score::sparsegpt || update != Update::none; }
  ops::KeepWithin keep_within() const;
  /// "wanda", "sparsegpt", "wanda variant", "magnitude + admm": how masks and reports call it.
  std::string method() const;
};

/// What decides the result, for reports and for telling whether kept blocks belong to a call.
nlohmann::ordered_json to_json(const PruneOptions& options);

}  // namespace tessera::sparsity
