#include "datasets/glue_submission.h"

#include <algorithm>
#include <cmath>

#include "runtime/error.h"
#include "runtime/text.h"

namespace tessera::datasets {

std::string glue_submission_name(GlueTask task, const std::string& part) {
  const char* const matched = task != GlueTask::mnli ? "" : part.ends_with("_mismatched") ? "-mm" : "-m";
  return std::string(glue_info(task).folder) + matched + ".tsv";
}

std::string glue_submission(GlueTask task, std::span<const double> predictions) {
  const GlueInfo& info = glue_info(task);
  const bool named = task == GlueTask::mnli || task == GlueTask::qnli || task == GlueTask::rte;
  std::string text = "index\tprediction\n";
  for (size_t i = 0; i < predictions.size(); ++i) {
    const double value = predictions[i];
    text += std::to_string(i) + "\t";
    if (info.labels.empty()) {
      check(std::isfinite(value), "glue: the prediction ", i, " of ", info.folder, " is ", value);
      text += decimals(std::clamp(value, 0.0, 5.0), 3);
    } else {
      check(value >= 0 && value < double(info.classes()) && value == std::floor(value),
            "glue: the prediction ", i, " of ", info.folder, " is ", value, ", which is no class");
      text += named ? info.labels[size_t(value)] : std::to_string(int(value));
    }
    text += "\n";
  }
  return text;
}

}  // namespace tessera::datasets
