#pragma once

#include <filesystem>
#include <functional>
#include <string>

#include "tensor/precision.h"
#include "train/trainer.h"
#include "train/training_settings.h"

/// A whole run of a bundled model: from settings to a run folder with its page, new or resumed.

namespace tessera::train {

/// The part of a run that depends on the bundled model. The calls come in this order: begin or resume,
/// prepare, restore of job() if there is something to go on from, header, training of job(), report, then
/// throughput and conclusion.
class Recipe {
 public:
  virtual ~Recipe() = default;
  virtual const char* name() const = 0;  // "tnp", as in `tessera train tnp`
  /// Options besides those of the trainer that a resumed run keeps.
  virtual SettingList options() { return SettingList(Kept::option); }
  /// The settings of a new run on `device`; `given`: the flags that were given.
  virtual void begin(const Given& given, Device device) = 0;
  /// The settings of the run.json at `path`, but for those in `given` that may change.
  virtual void resume(const std::string& path, const nlohmann::json& run, const Given& given) = 0;
  /// The run is made by this many ranks together; after begin or resume. Throws if it cannot be.
  virtual void set_ranks(int ranks, const Given& given, bool resumed) = 0;
  /// Shards the optimizer's states over these ranks; called after set_ranks.
  virtual void spread(const optim::Sharding& sharding) = 0;
  /// Throws if options of the trainer leave others of the model without effect; of a new run and of one that
  /// goes on, before anything is written.
  virtual void check_options(const TrainerOptions&) const {}
  virtual std::string default_name() const = 0;  // of the run folder, without the time
  /// Brings data and model into memory; may write into the folder, and complete the settings.
  virtual void prepare(const RunFolder& run, Device device, bool resumed) = 0;
  virtual Job& job() = 0;
  /// The training settings, and the dtype of the model's activations.
  virtual const TrainingSettings& training() const = 0;
  virtual DType dtype() const = 0;
  /// Lets the model set the trainer's options that it decides.
  virtual void decide(TrainerOptions&) const {}
  /// Further entries of run.json; null: the entry is not there (any more).
  virtual nlohmann::json facts() const { return nlohmann::json::object(); }
  /// Lines that describe the training, its device and its settings. `captured`: its steps are
  /// (Step::captures).
  virtual std::string header(const RunFolder& run, bool captured, int64_t first_step) = 0;
  /// Writes the page and the other files of a finished run.
  virtual void report(const RunFolder& run, const TrainResult& result) = 0;
  /// Further entries of the summary's "throughput".
  virtual nlohmann::json throughput(const TrainResult& result) const = 0;
  /// Lines with the results of the evaluation.
  virtual std::string conclusion(const RunFolder& run, const TrainResult& result) const = 0;
};

/// Which run to make, and how.
struct RunRequest {
  Device device = Device::cpu();
  std::string runs = "runs",
              name = {};     // folder of the run folders; name of a new one, "": by model and time
  std::string resume = {};   // folder of the run to continue; "": a new one
  std::string summary = {};  // file for settings, timings and throughput; "": none
  bool quiet = false;        // no progress line
  TrainerOptions options = {};
  Given given = {};
  /// The ranks that train together; null: this process alone. Rank 0 begins or resumes the run; the others
  /// follow what its run.json says.
  const dist::World* world = nullptr;
  /// Called once the settings are known and before anything is written; throws to refuse them.
  std::function<void(Recipe&, const SettingList& options)> check = {};
  /// Called when everything is prepared, before the first step.
  std::function<void()> before_steps = [] {};
  /// Called with messages about the progress, whole lines.
  std::function<void(const std::string& text)> say = [](const std::string&) {};
};

/// "gpt on cuda:0 (NVIDIA H200), bf16, one captured graph a step", the first line of a run's header.
std::string device_line(const std::string& model, Device device, Precision precision, bool captured);

/// The entries of a summary about time and memory: timing_s, throughput, avg_step_ms, peak_mem_bytes.
nlohmann::json costs_json(const Recipe& recipe, const TrainResult& result, Device device);

struct RunEnd {
  RunFolder folder;
  int64_t first_step = 0;
  TrainResult result;
};

/// The name and the time, for a run folder: "tnp-linear-20260131T123456Z".
std::string stamped(const std::string& name);

/// Trains a new run, or continues one from its newest whole checkpoint; writes run.json, the row in
/// runs.sqlite next to the folder, and the page. If an error keeps a new run from beginning, its folder is
/// removed. An interrupted run is saved and returned as a result. On several ranks all of them call this, and
/// an error of one ends it on all; Diverged is thrown by all of them, which can go on to another run. Throws
/// for a run that has nothing left to do.
RunEnd run_recipe(Recipe& recipe, const RunRequest& request);

/// Notes the folder of a run where a launcher finds it, which resumes it after a failure.
void note_run(const std::filesystem::path& path);

/// Writes the run's row (record_run). It is a convenience: where it cannot be written, a warning says so.
void record_or_warn(const std::filesystem::path& database, const RunFolder& run, const std::string& status,
                    const RunFigures& figures = {});

}  // namespace tessera::train
