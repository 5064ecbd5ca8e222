#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/file.h"

/// The nine tasks of GLUE (Wang et al., arXiv:1804.07461), from the TSV files of gluebenchmark.com or from
/// JSONL files with the columns of the library `datasets`, and their metrics.

namespace tessera::datasets {

enum class GlueTask { cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli };

struct GlueInfo {
  GlueTask task;
  const char* name;    // "sst2", as flags and the library `datasets` have it
  const char* folder;  // "SST-2", as the official archive has it
  bool is_pair;
  std::vector<const char*>
      labels;  // names of the classes by number, in the order of `datasets`; none: a score 0 to 5
  std::vector<const char*> metrics;
  int64_t classes() const { return labels.empty() ? 1 : int64_t(labels.size()); }
};

const std::vector<GlueInfo>& glue_tasks();
const GlueInfo& glue_info(GlueTask task);
/// By name or folder, in any case. Throws, naming the nearest.
const GlueInfo& parse_glue_task(const std::string& name);

/// The examples of one file, in little more memory than the file.
class GlueData {
 public:
  /// `part`: "train", "dev" or "test"; of MNLI also "dev_matched", "dev_mismatched", "test_matched" and
  /// "test_mismatched" ("dev" is matched). Looks for PART.tsv, then PART.jsonl, in `folder` and in its
  /// subfolder of the task's name.
  ///
  /// Quotes in TSV are text, as the benchmark's own readers have it. Rows of QQP with too few columns (its
  /// official file has some) and pairs of MNLI without a gold label are left out and counted; everything else
  /// that does not fit is an error with file, line and column.
  GlueData(GlueTask task, const std::string& folder, const std::string& part);
  /// One file: JSONL by its ending, else TSV.
  static GlueData read(GlueTask task, const std::string& path, bool is_test = false);
  static GlueData read(GlueTask task, const io::InputFile& file, bool is_test = false);

  GlueTask task() const { return task_; }
  int64_t size() const { return int64_t(rows_.size()); }
  std::string_view first(int64_t i) const { return part(row(i).begin, row(i).first); }
  std::string_view second(int64_t i) const { return part(row(i).begin + row(i).first, row(i).second); }
  bool has_labels() const { return has_labels_; }
  /// The class, or the score; throws if the file has no labels.
  double label(int64_t i) const;
  int64_t left_out() const { return left_out_; }
  const std::string& path() const { return path_; }

 private:
  friend class GlueReader;
  struct Row {
    uint64_t begin;
    uint32_t first, second;  // bytes
    float label;
  };
  GlueData(GlueTask task, std::string path) : task_(task), path_(std::move(path)) {}
  const Row& row(int64_t i) const;
  std::string_view part(uint64_t begin, uint32_t bytes) const {
    return std::string_view(text_).substr(size_t(begin), bytes);
  }
  GlueTask task_;
  std::string path_, text_;
  std::vector<Row> rows_;
  bool has_labels_ = true;
  int64_t left_out_ = 0;
};

/// Metrics, each over n >= 1 predictions and labels; NaN if a prediction is NaN, as those of a model that has
/// diverged. Throw if their numbers differ or there are none.
double accuracy(std::span<const double> predictions, std::span<const double> labels);
/// Of class 1; 0 if it is neither predicted nor there.
double f1(std::span<const double> predictions, std::span<const double> labels);
/// Of two classes; 0 if a row or column of the table is empty, as scikit-learn has it.
double matthews(std::span<const double> predictions, std::span<const double> labels);

/// The task's metrics by name, and last "score", their mean: what the benchmark averages.
std::vector<std::pair<std::string, double>> glue_metrics(GlueTask task, std::span<const double> predictions,
                                                         std::span<const double> labels);

}  // namespace tessera::datasets
