#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "models/language_model.h"
#include "sparsity/calibration.h"
#include "sparsity/features.h"
#include "sparsity/masks.h"
#include "sparsity/pattern_statistics.h"

/// Norms of the inputs of pruned matrices, as calibration saw them, and how they go with the density of the
/// mask's columns: a score |W_ij| ||X_j|| within rows keeps more weights where an input is large.
///
/// tessera prune writes them as input_norms.safetensors next to pruning.json, if its method reads samples. A
/// tensor per matrix, by the name of its module as in a file of masks: f32 [columns], the norm ||X_j|| that
/// the score multiplies with, which is the root of the mean over samples of the sum of squares of input j
/// over the tokens of the sample. Its metadata: "format" = "tessera input norms 1", and the fields of
/// MaskInfo.

namespace tessera::sparsity {

inline constexpr const char* kInputNormsFile = "input_norms.safetensors";

using InputNorms = std::map<std::string, Tensor>;  // f32 [columns] by matrix

/// Those of the dense model, for masks that come without: of all matrices in its blocks, `batch` samples at a
/// time. prune notes what its pruned blocks make of the samples instead, so that from the second block on its
/// norms are others. Throws if an input is not finite.
InputNorms dense_input_norms(models::LanguageRef model, const Samples& samples, int64_t batch = 1);

/// `info`: of the masks that were made with them.
void save_input_norms(const std::string& path, const InputNorms& norms, const MaskInfo& info);
/// Those of `masks`. Throws, naming path and matrix, if the file is of another format or another pruning than
/// the masks, a tensor is not f32 [columns], or a norm is negative or not finite.
InputNorms load_input_norms(const std::string& path, const Masks& masks);

/// How many weights of each column a mask keeps, from its features along the axis.
std::vector<int64_t> column_counts(const Features& features, Axis axis);
/// "input_norm_pearson" and "input_norm_spearman": of norms and column_counts.
Figures norm_figures(std::span<const double> norms, const Features& features, Axis axis);
/// Their chance levels, [figure][model], under the null models that change the density of columns:
/// independent, and, where features are rows, rows_shuffled.
std::vector<std::vector<ChanceLevel>> norm_chance_levels(std::span<const double> norms,
                                                         const Features& features, Axis axis,
                                                         const Figures& observed,
                                                         const PatternOptions& options);

}  // namespace tessera::sparsity
