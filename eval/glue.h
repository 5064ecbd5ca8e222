#pragma once

#include <map>
#include <string>
#include <vector>

#include "datasets/glue_batches.h"
#include "models/bert.h"

/// What a model makes of the texts of a GLUE task, and the task's metrics of that.

namespace tessera::eval {

/// An evaluation or test split of a task.
struct GluePart {
  std::string name;    // of the file: "dev", "test", "dev_matched", ...
  std::string suffix;  // of its metrics' names: "", of MNLI "_matched" and "_mismatched"
  datasets::GlueItems items;
};

/// Classes or scores that the model gives to the texts, in their order; NaN if a logit is.
struct GluePredictions {
  std::vector<double> values;
  double loss = 0;  // mean over the texts: cross-entropy in nats, or squared error; NaN without labels
};
/// `batch_size` texts at a time. The model should be in evaluation mode: it is used as it is.
GluePredictions predict_glue(const models::Bert& model, const datasets::GlueItems& items, int64_t batch_size,
                             Device device);

/// The task's metrics on its development parts: "eval_loss", "eval_accuracy", ... and "eval_score", their
/// mean. MNLI's two parts have a metric each, "eval_accuracy_matched" and "eval_accuracy_mismatched".
std::map<std::string, double> evaluate_glue(const models::Bert& model, datasets::GlueTask task,
                                            const std::vector<GluePart>& parts, int64_t batch_size,
                                            Device device);

}  // namespace tessera::eval
