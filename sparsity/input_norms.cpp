#include "sparsity/input_norms.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "ops/bits/bits.h"

namespace tessera::sparsity {
namespace {

constexpr const char* kNormsFormat = "tessera input norms 1";

/// The fields of MaskInfo that tell prunings of one model apart, by their names in the metadata.
io::Metadata metadata_of(const MaskInfo& info) {
  return {{"fingerprint", info.fingerprint},
          {"method", info.method},
          {"pattern", info.pattern},
          {"sparsity", info.sparsity},
          {"seed", info.seed}};
}

std::vector<double> ranks_of(std::span<const double> values) {
  std::vector<size_t> order(values.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return values[a] < values[b]; });
  std::vector<double> ranks(values.size());
  for (size_t first = 0; first < order.size();) {
    size_t last = first + 1;
    while (last < order.size() && values[order[last]] == values[order[first]]) ++last;
    for (size_t i = first; i < last; ++i) ranks[order[i]] = double(first + last - 1) / 2;
    first = last;
  }
  return ranks;
}

}  // namespace

void save_input_norms(const std::string& path, const InputNorms& norms, const MaskInfo& info) {
  io::Metadata metadata = metadata_of(info);
  metadata["format"] = kNormsFormat;
  io::save_safetensors(path, norms, metadata);
}

InputNorms load_input_norms(const std::string& path, const Masks& masks) {
  const io::SafetensorsFile file(path);
  const auto said = [&](const std::string& key) {
    const auto found = file.metadata().find(key);
    return found == file.metadata().end() ? std::string() : found->second;
  };
  check(said("format") == kNormsFormat, "input norms: ", path, ": its format is '", io::shown(said("format")),
        "', expected '", kNormsFormat, "'; remove it, or prune again");
  for (const auto& [key, value] : metadata_of(masks.info))
    // Masks made by other programs, or of weights alone, do not say where they come from.
    check(value.empty() || masks.info.fingerprint.empty() || said(key) == value, "input norms: ", path,
          " is of another pruning than the masks next to it: its ", key, " is '", io::shown(said(key)),
          "', expected '", io::shown(value), "'; remove it, or prune again");
  InputNorms norms;
  for (const io::SafetensorsEntry& entry : file.entries()) {
    const int64_t columns = masks.at(entry.name).columns;
    check(entry.dtype == DType::f32 && entry.shape == Shape({columns}), "input norms: ", path, ": '",
          io::shown(entry.name), "' is ", entry.dtype, entry.shape, "; expected f32 [", columns,
          "], a norm per column; it is damaged");
    const Tensor values = file.load(entry.name).packed();
    for (int64_t j = 0; j < columns; ++j)
      check(std::isfinite(values.data<float>()[j]) && values.data<float>()[j] >= 0, "input norms: ", path,
            ": '", io::shown(entry.name), "' has ", values.data<float>()[j], " at ", j,
            "; expected a finite norm; it is damaged");
    norms[entry.name] = values;
  }
  return norms;
}

double pearson(std::span<const double> x, std::span<const double> y) {
  check(x.size() == y.size(), "pearson: ", x.size(), " and ", y.size(), " values; expected as many");
  if (x.size() < 2) return std::numeric_limits<double>::quiet_NaN();
  const double mean_x = summarise(x).mean, mean_y = summarise(y).mean;
  double both = 0, of_x = 0, of_y = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double a = x[i] - mean_x, b = y[i] - mean_y;
    both += a * b, of_x += a * a, of_y += b * b;
  }
  // Compared by value: the rounded mean of equal values may differ from them, and 0 / 0 would become 1.
  const auto is_constant = [](std::span<const double> values) {
    return std::ranges::all_of(values, [&](double value) { return value == values[0]; });
  };
  if (is_constant(x) || is_constant(y)) return std::numeric_limits<double>::quiet_NaN();
  return std::clamp(both / std::sqrt(of_x * of_y), -1.0, 1.0);
}

double spearman(std::span<const double> x, std::span<const double> y) {
  return pearson(ranks_of(x), ranks_of(y));
}

std::vector<int64_t> column_counts(const Features& features, Axis axis) {
  if (axis == Axis::row) return position_counts(features);
  const Tensor counts = ops::count_bits(features.bits);
  const auto* const from = counts.data<int32_t>();
  return {from, from + counts.count()};
}

Figures norm_figures(std::span<const double> norms, const Features& features, Axis axis) {
  const std::vector<int64_t> counts = column_counts(features, axis);
  const std::vector<double> kept(counts.begin(), counts.end());
  return {{"input_norm_pearson", pearson(norms, kept)}, {"input_norm_spearman", spearman(norms, kept)}};
}

std::vector<std::vector<ChanceLevel>> norm_chance_levels(std::span<const double> norms,
                                                         const Features& features, Axis axis,
                                                         const Figures& observed,
                                                         const PatternOptions& options) {
  const std::span<const NullModel> all = kNullModels;
  return levels_of(observed, options.draws, all.first(axis == Axis::row ? 2 : 1),
                   [&](uint64_t number, NullModel model) {
                     return norm_figures(norms, draw_null(features, model, options.seed, number), axis);
                   });
}

}  // namespace tessera::sparsity
