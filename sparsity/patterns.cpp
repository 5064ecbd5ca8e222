#include "sparsity/patterns.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <map>

#include "io/file.h"
#include "report/database.h"
#include "runtime/interrupt.h"
#include "sparsity/pattern_rows.h"

namespace tessera::sparsity {
namespace {

namespace fs = std::filesystem;

bool is_wanted(const std::string& name, const AnalyzeOptions& options) {
  return options.only.empty() ||
         std::any_of(options.only.begin(), options.only.end(),
                     [&](const std::string& part) { return name.find(part) != std::string::npos; });
}

/// Those that options.only names: what inputs must have in common.
Masks wanted_of(const Masks& masks, const AnalyzeOptions& options) {
  Masks wanted{.info = masks.info, .layers = {}};
  for (const auto& layer : masks.layers)
    if (is_wanted(layer.first, options)) wanted.layers.push_back(layer);
  return wanted;
}

/// The matrices of all inputs, checked to be of one model.
std::vector<PatternSource> open_inputs(const std::vector<std::string>& inputs,
                                       const AnalyzeOptions& options) {
  check(!inputs.empty(), "sparsity: no input; expected pruned model directories or files of masks");
  std::vector<PatternSource> sources;
  for (const std::string& input : inputs) {
    check_interrupt();
    check(std::count(inputs.begin(), inputs.end(), input) == 1, "sparsity: '", io::shown(input),
          "' is given twice; expected different inputs");
    sources.emplace_back(input);
    check_same_model(wanted_of(sources.front().masks(), options), wanted_of(sources.back().masks(), options));
  }
  std::map<std::string, int64_t> named;
  for (const PatternSource& source : sources) ++named[source.name()];
  for (PatternSource& source : sources)
    if (named[source.name()] > 1) source.use_whole_path();
  const auto& layers = sources.front().masks().layers;
  check(std::any_of(layers.begin(), layers.end(),
                    [&](const auto& layer) { return is_wanted(layer.first, options); }),
        "sparsity: --only leaves none of the ", layers.size(), " matrices; the first is '",
        layers.front().first, "'");
  return sources;
}

/// For the inputs without norms of their own. What they are of.
std::string add_dense_norms(std::vector<PatternSource>& sources, const DenseNorms& dense) {
  for (PatternSource& source : sources) {
    const std::string& fingerprint = source.masks().info.fingerprint;
    check(fingerprint.empty() || fingerprint == dense.fingerprint, "sparsity: the masks of ",
          io::shown(source.name()), " are of the model with the fingerprint ", io::shown(fingerprint),
          ", not ", dense.fingerprint, "; give --model the dense model that was pruned");
    if (!source.has_input_norms()) source.take_input_norms(dense.norms);
  }
  return dense.from;
}

/// "; no 64, 128 clusters of 32 features": numbers that cluster() leaves out; "" if there are none.
std::string skipped_text(const PatternPool& pool, const PatternOptions& options) {
  const int64_t count = std::min(pool.features.count(), options.nearest);
  std::vector<int64_t> skipped;
  for (const int64_t k : options.clusters)
    if (k > count) skipped.push_back(k);
  return skipped.empty() ? "" : fmt::format("; no {} clusters of {} features", sizes_text(skipped), count);
}

}  // namespace

void analyze(const std::vector<std::string>& inputs, const std::string& folder, const AnalyzeOptions& options,
             const std::function<void(const std::string&)>& tell) {
  options.patterns.validate();
  const fs::path database = fs::path(folder) / kPatternsFile;
  std::error_code ignored;
  check(!fs::exists(database, ignored) || report::application_id_of(database) == kPatternsId,
        "analyze: ", database.string(), " is not ", kPatternsWhat, "; name another folder");
  std::vector<PatternSource> sources = open_inputs(inputs, options);
  io::AtomicFolder files(folder, io::AtomicFolder::Existing::merge);
  PatternTables tables;
  if (options.dense_norms) tables.norms_from = add_dense_norms(sources, options.dense_norms());
  for (const PatternSource& source : sources)
    if (!source.has_input_norms())
      tell(
          fmt::format("{}: no {}, so nothing is said of input norms; tessera prune writes it if its method "
                      "reads samples, and analyze --model DENSE --text FILE measures them",
                      source.name(), kInputNormsFile));
  int64_t id = 0;
  for (const auto& [name, mask] : sources.front().masks().layers) {
    if (!is_wanted(name, options)) continue;
    std::vector<PatternPool> pools;
    for (const PatternSource& source : sources) {
      check_interrupt();
      pools.push_back(analyze_matrix(tables, source, ++id, name, source.masks().at(name), options));
      tell(fmt::format("{}: {}: sparsity {:.4f}{}", source.name(), name, source.masks().at(name).sparsity(),
                       skipped_text(pools.back(), options.patterns)));
    }
    for (size_t a = 0; a < pools.size(); ++a)
      for (size_t b = a + 1; b < pools.size(); ++b) add_pair(tables, pools[a], pools[b], options.patterns);
  }
  for (const PatternSource& source : sources)
    for (const auto& [text, value] : source.perplexities())
      tables.perplexity.push_back({source.name(), text, finite_cell(value)});
  correct_levels(tables.nulls);
  io::write_file((fs::path(files.path()) / kPatternsFile).string(), database_bytes(tables, options));
  files.publish();
}

std::vector<MatrixComparison> compare(const std::string& a, const std::string& b,
                                      const AnalyzeOptions& options) {
  const std::vector<PatternSource> sources = open_inputs({a, b}, options);
  std::vector<MatrixComparison> all;
  for (const auto& [name, mask] : sources[0].masks().layers) {
    if (!is_wanted(name, options)) continue;
    check_interrupt();
    const Axis axis = options.axis_for(name);
    const Mask& other = sources[1].masks().at(name);
    const PairMetrics metrics = compare_features(features_of(mask, axis), features_of(other, axis));
    all.push_back({name, axis, mask.sparsity(), other.sparsity(), summarise(metrics.jaccard),
                   summarise(metrics.cosine), summarise(metrics.hamming)});
  }
  return all;
}

}  // namespace tessera::sparsity
