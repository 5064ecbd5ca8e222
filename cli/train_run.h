#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/setting_flags.h"
#include "train/trainer.h"

/// What the subcommands of `tessera train` share: the flags of a run, and the way from the command line to
/// the run folder and back. A model adds its own file, train_<model>.cpp.

namespace tessera::cli {

/// The flags of every run, whatever is trained.
struct RunFlags {
  std::string config, device, runs = "runs", name, resume, json;
  bool quiet = false;
  train::TrainerOptions options = {.loss_scale = 65536, .loss_scale_interval = 2000};

  /// Those of this call alone; `default_name`: of the run folder, for the help: "tnp-<prior>-<time>".
  train::SettingList list(const std::string& default_name);
  void add_to(CLI::App& command, const std::string& default_name);
};

/// What --device names; by default the first GPU, else the CPU.
Device device_of(const RunFlags& flags);

/// What a model brings to a run. The calls come in this order: from_flags or from_settings, prepare, restore
/// if there is something to go on from, print_header, train, report, then summary and print_end.
class TrainedModel {
 public:
  virtual ~TrainedModel() = default;
  virtual const char* name() const = 0;  // "tnp", as in `tessera train tnp`
  /// Options besides those of the trainer that a resumed run keeps.
  virtual train::SettingList options() { return train::SettingList(train::Kept::option); }
  /// The settings of the job.
  virtual train::SettingList settings() { return {}; }
  /// The job that the command line says, to run on `device`. Throws UsageError.
  virtual void from_flags(const CLI::App& command, Device device) = 0;
  /// The job of the run.json at `path`, with what of changeable() the command line gives.
  virtual void from_settings(const std::string& path, const nlohmann::json& settings,
                             const CLI::App& command) = 0;
  virtual std::string default_name() const = 0;  // of the run folder, without the time
  /// Brings data and model into memory; may write into the folder, and complete the job.
  virtual void prepare(const train::RunFolder& run, Device device, bool resumed) = 0;
  virtual nlohmann::json job() const = 0;
  /// Further entries of run.json.
  virtual nlohmann::json facts() const { return nlohmann::json::object(); }
  virtual DType dtype() const = 0;  // of the activations
  virtual int64_t steps() const = 0;
  virtual optim::Schedule schedule() const = 0;
  /// What --resume is given to go on with this run.
  virtual std::filesystem::path resume_path(const train::RunFolder& run) const { return run.path(); }
  /// Returns the step of the checkpoint.
  virtual int64_t restore(const std::filesystem::path& checkpoint) = 0;
  virtual void print_header(const train::RunFolder& run, bool graph, int64_t first_step) const = 0;
  /// What prepare() made. `options`: what of them the model decides.
  virtual train::Job& job_to_train(train::TrainerOptions& options) = 0;
  virtual void report(const train::RunFolder& run, const train::TrainResult& result) = 0;
  /// Further entries of --json's "throughput".
  virtual nlohmann::json throughput(const train::TrainResult& result) const = 0;
  /// Lines on what the evaluation came to.
  virtual void print_end(const train::RunFolder& run, const train::TrainResult& result) const = 0;
};

/// As a shell reads it back.
std::string quoted(const std::string& text);

/// The name and the time, for a run folder: "tnp-linear-20260131T123456Z".
std::string stamped(const std::string& name);
/// Throws a UsageError for a --name that is no plain name, and for what cannot go with --resume.
void check_run_flags(const RunFlags& flags, const CLI::App& command);
/// What an InterruptGuard of a training says when the first signal arrives.
extern const char* const kStopping;

/// From the parsed command line to the exit code.
int run_train(TrainedModel& model, RunFlags flags, const CLI::App& command);

void add_train_tnp(CLI::App& train, Action& action);
void add_train_language(CLI::App& train, Action& action, bool llama);
void add_train_bert(CLI::App& train, Action& action);

}  // namespace tessera::cli
