#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "eval/statistics.h"
#include "report/page.h"
#include "study/basis.h"
#include "train/run_folder.h"

/// Several runs on one page: their curves overlaid, and their results by a setting in which they differ.

namespace tessera::study {

struct RunsReportOptions {
  // A setting, "model.dtype": runs of one value are a group, and so are those without it; "": every run is
  // one.
  std::string by = {};
  int64_t last = 100;  // the final loss is the mean over this many last steps (of those that were logged)
};

/// The meaning of a run's figures, by the kind of model.
struct RunUnits {
  std::string model;       // "tnp", "gpt", ...
  std::string loss;        // of training: "nats per point"
  std::string evaluation;  // name of the evaluation, with its unit: "held-out loss (nats per token)"
  std::string gap;         // and compared with: "gap to the 5-gram (nats per token)"; "": with nothing
  bool operator==(const RunUnits&) const = default;
};
/// By run.json: TNPs are compared with the Bayes-optimal prediction, language models with their n-gram
/// baseline, BERT has the task's metric or the loss of masked tokens. Throws, naming the run,
/// for a model that is unknown.
RunUnits units_of(const train::RunFolder& run);

/// The results of the runs of a group, one number each.
struct RunGroup {
  std::string name;
  RunUnits units;
  std::vector<train::RunFolder> runs;
  std::vector<double> final_loss;
  std::vector<double> evaluation;  // the last eval_nll, of GLUE eval_score; NaN for a run without one
  std::vector<double> bits;        // the last eval_bits_per_byte; NaN likewise
  std::vector<double> gap;         // the last eval_gap; NaN likewise
  /// Those of final_loss, of evaluation and gap, and of bits.
  std::vector<Basis> loss_basis, evaluation_basis, bits_basis;
  /// The last step in metrics.jsonl, and that of `evaluation` (-1 without one), which is an earlier one where
  /// the run was interrupted.
  std::vector<int64_t> last_step, evaluated_step;
  std::vector<double> skipped;  // steps without a finite gradient norm; NaN if the run did not log them
};

/// The groups in the order of the first run of each; without a setting the name is that of the folder, or its
/// path where several are called so. Throws, naming the run, if it lacks the setting, has logged no loss, is
/// given twice or has other units than the first one: their losses cannot be compared.
std::vector<RunGroup> group_runs(const std::vector<train::RunFolder>& runs, const RunsReportOptions& options);

/// Why the final losses of the runs cannot be compared: "..., which differ in tokenizer"; "" if they can.
std::string incomparable(const std::vector<RunGroup>& groups);

/// Whether the final losses of no two groups differ beyond the noise, by Welch's t-tests of all pairs after
/// Holm's correction for their number; incomparable() must be "".
bool agree(const std::vector<RunGroup>& groups);

/// The table of the groups as text: a line per group and for each pair of groups whether they differ beyond
/// the noise, each figure's pairs tested together as agree() does. Figures of different bases are neither
/// averaged nor compared, and a line says so, as it does of evaluations before a run's last step; held-out
/// bits per byte have a column where tokenizers differ.
std::string format_groups(const std::vector<RunGroup>& groups);

void write_runs_report(const std::filesystem::path& path, const std::vector<RunGroup>& groups,
                       const RunsReportOptions& options);

}  // namespace tessera::study
