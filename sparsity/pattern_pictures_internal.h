#pragma once

#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "report/chart.h"
#include "report/database.h"
#include "sparsity/pattern_pictures.h"

/// What the two files of pictures share: pattern_pictures.cpp draws the whole analysis, matrix_pictures.cpp
/// one matrix.

namespace tessera::sparsity::pictures {

/// A row of table `matrices`.
struct PictureMatrix {
  int64_t id = 0, layer = 0, rows = 0, columns = 0, length = 0;
  std::string input, name, projection, axis;
  std::string label;       // in charts: "layer0-mlp.up_proj"
  std::string file_input;  // the input as part of the name of a file
  std::string stem;        // of its pictures: "wanda-layer0-mlp.up_proj-0-0-0.5", as the original's .pt files
  double pearson = 0, spearman = 0;
};

/// `name`: of a file, without an extension.
using Write = std::function<void(const std::string& name, const report::Image& image)>;
using Tell = std::function<void(const std::string&)>;

void draw_analysis(report::Database& database, const std::vector<PictureMatrix>& matrices,
                   const Write& write);
void draw_matrix(report::Database& database, const PictureMatrix& matrix, const PictureOptions& options,
                 const Write& write, const Tell& tell);

// ---- bits of the clustered features ----

/// A row of table `bits`: features by their gradient_rank.
struct MatrixBits {
  int64_t features = 0, length = 0, words = 0;  // words of a feature
  std::vector<uint32_t> bits = {};
  std::vector<int64_t> ids = {};  // index of each feature in the matrix

  bool at(int64_t feature, int64_t position) const {
    return bits[size_t(feature * words + position / 32)] >> (position % 32) & 1;
  }
  int64_t distance(int64_t a, int64_t b) const;  // Hamming
  std::vector<int64_t> by_index() const;         // ranks, sorted by `ids`
};
/// Nothing if the database has no bits of the matrix.
std::optional<MatrixBits> bits_of(report::Database& database, int64_t matrix_id);

/// A spy plot: a line of cells per feature, in the order of `ranks`, a cell per position, coloured where it
/// is kept.
struct Spy {
  report::ChartText text;
  std::vector<int64_t> ranks;
  int64_t positions = 0;                // from the first on
  std::vector<report::Colour> colours;  // by rank; empty: one colour
  std::vector<std::pair<std::string, report::Colour>> legend;
};
report::Image spy_image(const MatrixBits& bits, const Spy& spy);

using report::integer_in;
using report::number_in;
using report::text_in;

// ---- Hamming distances ----

/// Pairs of features by their distance, in at most 60 bins.
struct DistanceHistogram {
  double low = 0, width = 0;   // of the first bin, as a share of the length
  std::vector<double> shares;  // of all pairs
};
/// `pairs`: (distance / length, how many). Bins lie in `range` and are multiples of `step`, the share that
/// one position is: others would hold different numbers of the distances that there are.
DistanceHistogram distance_histogram(const std::vector<std::pair<double, double>>& pairs, report::Range range,
                                     double step);

}  // namespace tessera::sparsity::pictures
