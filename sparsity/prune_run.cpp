#include "sparsity/prune_run.h"

#include <filesystem>

#include "io/file.h"
#include "io/utf8.h"
#include "sparsity/gated_block.h"
#include "sparsity/prune_report.h"
#include "train/run_folder.h"

namespace tessera::sparsity {
namespace {

using nlohmann::ordered_json;

/// The folder of finished blocks, and its lock.
class BlockFolder {
 public:
  explicit BlockFolder(const std::string& path) : path_(path), lock_(made(path)) {}
  /// It stays if there are blocks in it.
  ~BlockFolder() { std::filesystem::remove(path_, ignored_); }
  BlockFolder(const BlockFolder&) = delete;
  BlockFolder& operator=(const BlockFolder&) = delete;
  void remove_blocks() { std::filesystem::remove_all(path_, ignored_); }

 private:
  static const std::string& made(const std::string& path) {
    io::make_folder(path);
    return path;
  }
  std::error_code ignored_;
  std::string path_;
  train::FolderLock lock_;
};

/// What the model makes of the windows, as it is and under the gates that it is pruned for.
struct Measured {
  double plain = 0, gated = 0;
};

Measured measure(models::LanguageModel& model, const PruneRun& run) {
  Measured measured{.plain = eval::perplexity_of(model, run.windows, run.options.batch)};
  if (!run.options.gates) return measured;
  const auto gated = gate_blocks(model, *run.options.gates);
  measured.gated = eval::perplexity_of(model, run.windows, run.options.batch);
  return measured;
}

ordered_json report_of(const std::string& type, const Samples& samples, const PruneOptions& options,
                       const Pruned& pruned) {
  ordered_json report;
  report["model"] = pruned.masks.info.model;
  report["type"] = type;
  report["fingerprint"] = pruned.masks.info.fingerprint;
  report["pruned_fingerprint"] = pruned.fingerprint;
  report["method"] = pruned.masks.info.method;
  report["options"] = to_json(options);
  report["calibration"] = {{"samples", samples.count()},
                           {"length", samples.length},
                           {"seed", samples.seed},
                           {"begins", samples.begins}};
  report["sparsity"] = pruned.sparsity();
  report["block_matrices"] = pruned.block_matrices;
  report["block_sparsity"] = pruned.block_sparsity;
  report["matrices"] = matrices_to_json(pruned.matrices);
  return report;
}

}  // namespace

std::string partial_folder(const std::string& out) {
  return io::with_suffix(out, ".partial");
}

PruneRunResult run_pruning(pretrained::LoadedLanguageModel& language, const Samples& samples, PruneRun run) {
  run.options.progress = partial_folder(run.out);
  BlockFolder blocks(run.options.progress);
  const bool measures = !run.windows.empty();
  Measured before, after;
  if (measures) {
    check_progress(language.model, samples, run.options);
    before = measure(language.model, run);
    eval::check_finite("prune", before.plain);
  }
  PruneRunResult result{.pruned = prune(language.model, samples, run.options), .report = {}};
  result.pruned.masks.info.model = io::utf8_name(run.model);
  result.report = report_of(language.config.type, samples, run.options, result.pruned);
  if (measures) {
    after = measure(language.model, run);
    ordered_json& perplexity = result.report["perplexity"];
    perplexity = {{"length", run.windows.front().tokens.size()},
                  {"windows", run.windows.size()},
                  {"before", before.plain},
                  {"after", after.plain}};
    if (run.options.gates) perplexity["gated_before"] = before.gated, perplexity["gated_after"] = after.gated;
  }
  save_pruned(language.model, result.pruned, result.report.dump(2) + "\n", run.out,
              {.dtype = run.dtype, .companions = language.folder});
  blocks.remove_blocks();
  return result;
}

}  // namespace tessera::sparsity
