#include "sparsity/input_norms.h"

#include <cmath>

#include "ops/bits/bits.h"
#include "runtime/statistics.h"
#include "sparsity/modules.h"
#include "sparsity/scores.h"
#include "sparsity/walk.h"

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

}  // namespace

InputNorms dense_input_norms(models::LanguageRef model, const Samples& samples, int64_t batch) {
  InputNorms norms;
  BlockWalk walk(model, samples, batch);
  for (int64_t block = 0; block < walk.blocks(); ++block) {
    const auto statistics =
        walk.collect(InputStatistics::Sums::squares, [](const std::string&) { return true; });
    for (const pretrained::LinearModule& module : modules_of_block(model, block)) {
      const InputStatistics& inputs = statistics.at(module.ours);
      inputs.check_finite(module.name);
      norms[module.name] = input_norms(inputs, samples.count()).to(Device::cpu());
    }
    if (block + 1 < walk.blocks()) walk.advance();
  }
  return norms;
}

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
