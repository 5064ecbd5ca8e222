#pragma once

#include <functional>
#include <string>
#include <vector>

#include "report/table.h"
#include "sparsity/gradients.h"
#include "train/glue_data.h"

/// The gradients of BERT and RoBERTa on tasks of GLUE and on plain text: what `tessera sparsity gradients`
/// measures, and what it writes.

namespace tessera::sparsity {

/// How long the padded batch is whose rows count as all rows.
enum class Padding : uint8_t {
  max_length,  // every text takes max_length tokens
  longest,     // as many as the longest of its batch
  none         // there are no padding rows
};
/// Throws, naming the choices, for another name than max, longest and none.
Padding parse_padding(const std::string& name);

struct GradientTasks {
  /// Hugging Face model directory of a BERT or RoBERTa, or a run of `train bert` (one seed's folder): its
  /// model, or else its newest checkpoint, which knows its own task.
  std::string model;
  std::vector<std::string> tasks = {};  // of GLUE
  std::string data = {};                // folder of their files
  std::string part = "train";           // "train" or "dev"
  std::vector<std::string> text = {};   // files: by a masked language model
  bool any_bytes = false;               // io::read_text
  double mask = 0.15;                   // share of the tokens that it predicts
  int64_t batch = 32, max_length = 128, batches = 8;
  Padding padding = Padding::max_length;
  bool dropout = true;  // as in training
  uint64_t seed = 0;    // of a head that the file lacks, of the order of texts, of dropout
  DType dtype = DType::f32;
  std::string layers = "all";  // of GradientMeter
  GradientOptions options = {};
  /// Throws, naming the flag, unless there is something to measure.
  void validate() const;
};

struct TaskGradients {
  std::string name;  // "sst2", "mlm"; kAllTasks
  int64_t batches = 0, tokens = 0;
  double loss = 0;                 // mean over the batches
  std::vector<std::string> fresh;  // parameters that the model's files lack: drawn by the seed
  std::vector<ModuleGradient> modules;
};
inline constexpr const char* kAllTasks = "all";

/// The `max_length` of a command that is given none: train::default_max_length() of the model. Throws as
/// measure_gradients does for a folder that holds no model or run.
int64_t default_max_length(const std::string& model);

/// A task after the other, the text last; of several one more entry, kAllTasks, over all batches. Batch i of
/// a task is that of step i of `train bert` with the seed and the batch size; the weights stay as they are.
/// `tell` gets a line per task. Throws for a model that is no BERT, for tasks and text that it cannot read,
/// and for fewer texts than a batch takes.
std::vector<TaskGradients> measure_gradients(const GradientTasks& what, Device device,
                                             const std::function<void(const std::string&)>& tell);

/// One row per task and module: "gradients"; per task, module and number of rows: "energy"; per task, module
/// and binade of magnitudes: "magnitudes".
std::vector<report::Table> gradient_tables(const GradientTasks& what, const std::vector<TaskGradients>& all);
/// Writes gradients.csv, energy.csv, magnitudes.csv, gradients.json and gradients.html, all of them or none,
/// into a folder that may have other files. Returns the page's path.
std::string write_gradients(const GradientTasks& what, const std::vector<TaskGradients>& all,
                            const std::string& folder);
/// The page: tables, energy over rows, magnitudes, and, where the build can write PNG, heat maps.
std::string gradient_page(const GradientTasks& what, const std::vector<TaskGradients>& all);

}  // namespace tessera::sparsity
