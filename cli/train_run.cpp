#include "cli/train_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <optional>

#include "io/checkpoint_folder.h"
#include "io/file.h"
#include "io/utf8.h"
#include "runtime/allocator.h"
#include "runtime/error.h"
#include "runtime/interrupt.h"
#include "train/progress.h"

namespace tessera::cli {

namespace fs = std::filesystem;
using nlohmann::json;

// ---- flags ----

train::SettingList RunFlags::list(const std::string& default_name) {
  train::SettingList list(train::Kept::never);
  list.group("Run");
  list.add("runs", runs, "Folder of the run folders and of runs.sqlite");
  list.add("name", name, "Name of the run folder; default: " + default_name);
  list.add("resume", resume, "Run folder to continue, from its newest whole checkpoint");
  list.add("json", json, "Write settings, timings and throughput of the run to this file")
      .formerly("--json-out");
  list.add("quiet", quiet, "No progress line");
  return list;
}

void RunFlags::add_to(CLI::App& command, const std::string& default_name) {
  command.add_option("--config", config, "TOML file with any of these flags; the command line wins");
  command.add_option("--device", device, "cpu, cuda or cuda:<index>; default: the first GPU, else the CPU")
      ->check(kDeviceName)
      ->group("Run");
  add_flags(command, options.list());
  add_flags(command, list(default_name));
}

Device device_of(const RunFlags& flags) {
  return flags.device.empty() ? Device::best() : Device::parse(flags.device);
}

std::string quoted(const std::string& text) {
  const bool plain = std::all_of(text.begin(), text.end(), [](unsigned char c) {
    return std::isalnum(c) || std::string_view("/._-+:,@%").find(char(c)) != std::string_view::npos;
  });
  if (plain && !text.empty()) return text;
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

std::string stamped(const std::string& name) {
  std::string time = train::utc_now();
  std::erase_if(time, [](char c) { return c == '-' || c == ':'; });
  return name + "-" + time;
}

void check_run_flags(const RunFlags& flags, const CLI::App& command) {
  if (flags.name.find('/') != std::string::npos || flags.name == "." || flags.name == "..")
    throw UsageError("--name: \"" + flags.name + "\": expected a plain name; --runs says where");
  for (const char* other : {"--name", "--runs", "--demo", "--find-max-batch"})
    if (const CLI::Option* option = command.get_option_no_throw(other);
        !flags.resume.empty() && option && option->count() > 0)
      throw UsageError(std::string("--resume continues a run where it is; ") + other + " cannot go with it");
}

namespace {

std::string resume_command(const TrainedModel& model, const train::RunFolder& run, const RunFlags& flags) {
  std::string command =
      std::string("tessera train ") + model.name() + " --resume " + quoted(model.resume_path(run).string());
  if (!flags.device.empty()) command += " --device " + flags.device;
  return command;
}

void write_summary(const TrainedModel& model, const std::string& path, const train::TrainResult& result,
                   Device device, const train::RunFolder& run) {
  json throughput = model.throughput(result);
  throughput["tokens_per_s"] = result.tokens_per_s;
  const json out = {{"config", model.job()},
                    {"build", train::build_facts()},
                    {"device", device.name()},
                    {"card", device.card().name},
                    {"run", run.path().string()},
                    {"steps", result.step},
                    {"outcome", result.outcome == train::Outcome::finished ? "finished" : "interrupted"},
                    {"loss", result.loss},
                    {"skipped_steps", result.skipped},
                    {"loss_scale", result.loss_scale > 0 ? json(result.loss_scale) : json()},
                    {"evaluation", result.evaluation},
                    {"timing_s", {{"total", result.seconds}}},
                    {"throughput", throughput},
                    {"avg_step_ms", result.ms_per_step},
                    {"peak_mem_bytes", device.allocator().stats().reserved_peak}};
  io::write_file(path, io::json_text(out, 2) + "\n");
}

/// The row in runs.sqlite is a convenience: that it cannot be written must neither keep a run from beginning
/// nor hide how it ended.
void record(const fs::path& database, const train::RunFolder& run, const char* status) {
  try {
    train::record_run(database, run, status);
  } catch (const std::exception& error) {
    train::tell(fmt::format("tessera: warning: {}\n", error.what()));
  }
}

/// A new folder that holds no run yet goes with the error that kept the run from beginning.
class FolderGuard {
 public:
  explicit FolderGuard(const fs::path& path) : path_(path) {}
  ~FolderGuard() {
    std::error_code ignored;
    if (!path_.empty()) fs::remove_all(path_, ignored);
  }
  FolderGuard(const FolderGuard&) = delete;
  void keep() { path_.clear(); }

 private:
  fs::path path_;
};

}  // namespace

// ---- the run ----

const char* const kStopping =
    "\ntessera: stopping; a step that has begun is finished and saved first (another Ctrl-C ends at once, "
    "without saving)\n";

int run_train(TrainedModel& model, RunFlags flags, const CLI::App& command) {
  check_run_flags(flags, command);
  const InterruptGuard interrupts(kStopping);
  const Device device = device_of(flags);
  const bool resumed = !flags.resume.empty();
  train::SettingList kept = flags.options.list();
  kept.append(model.options());
  std::optional<train::RunFolder> run;
  std::optional<train::FolderLock> lock;
  json settings;
  if (resumed) {
    // A resumed run is the one that its folder describes; flags that would change the curve are refused.
    refuse_settings(command, "--resume continues a run as it was", {}, model.settings());
    run = train::RunFolder::open(flags.resume);
    lock.emplace(run->lock());
    settings = run->settings_of(model.name());
    const std::string path = (run->path() / "run.json").string();
    model.from_settings(path, settings, command);
    train::take_options(kept, settings, path, given_flags(command));
  } else {
    model.from_flags(command, device);
  }
  if (model.dtype() != DType::f16)
    for (const char* flag : {"--loss-scale", "--loss-scale-interval"})
      if (command.get_option(flag)->count() > 0)
        throw UsageError(fmt::format("{} is for --precision f16; the run is in {}, which needs no loss scale",
                                     flag, name_of(model.dtype())));
  check_kept_texts(kept);
  if (!flags.json.empty()) check_replaceable(flags.json);
  if (!run)
    run =
        train::RunFolder::create(flags.runs, flags.name.empty() ? stamped(model.default_name()) : flags.name);
  if (!lock) lock.emplace(run->lock());
  FolderGuard guard(resumed ? fs::path() : run->path());
  model.prepare(*run, device, resumed);

  int64_t first_step = 0;
  if (resumed) {
    const auto newest = io::CheckpointFolder(run->checkpoints().string(), int(flags.options.keep)).latest();
    for (const std::string& warning : newest.warnings)
      train::tell(fmt::format("tessera: warning: {}\n", warning));
    if (newest.step) {
      first_step = model.restore(newest.file);
      fmt::print("resuming from {} (step {})\n", newest.file, first_step);
    } else {
      fmt::print("the run ended before its first checkpoint: starting again at step 0\n");
    }
    run->truncate_metrics(first_step);
    // The page is the last thing that a run writes: without it the run was killed behind its last step.
    const fs::path page = run->path() / "report.html";
    std::error_code ignored;
    check(first_step < model.steps() || (first_step == model.steps() && !fs::exists(page, ignored)), "train ",
          model.name(), ": the run has done its ", first_step, " steps; give --steps to go further");
    fs::remove(page, ignored);
  } else {
    settings = {{"model", model.name()},
                {"started", train::utc_now()},
                {"device", device.name()},
                {"card", device.card().name}};
  }
  settings["job"] = model.job();
  settings.update(model.facts());
  settings["build"] = train::build_facts();
  settings["options"] = train::to_json(kept, train::Kept::option);
  run->write_settings(settings);
  guard.keep();
  const fs::path database = run->path().parent_path() / "runs.sqlite";
  record(database, *run, "running");
  model.print_header(*run, flags.options.graph, first_step);
  std::fflush(stdout);  // a pipe's reader sees it before the first step

  train::Progress progress(flags.quiet ? train::Progress::Mode::quiet : train::Progress::Mode::automatic);
  train::TrainerOptions options = flags.options;
  options.steps = model.steps(), options.schedule = model.schedule();
  train::TrainResult result;
  try {
    result = train::train(model.job_to_train(options), *run, options, first_step, progress);
    if (result.loss_scale > 0) {
      settings["loss_scale"] = {{"skipped_steps", result.skipped}, {"last", result.loss_scale}};
      run->write_settings(settings);
    }
    // The page says that a run has nothing left to do: one that is stopped behind its last step gets none.
    if (result.outcome == train::Outcome::finished || result.step < model.steps()) model.report(*run, result);
  } catch (const Interrupted& interrupted) {  // during an export: the last step is saved
    progress.finish();
    result.outcome = train::Outcome::interrupted;
    result.signal = interrupted.signal();
  } catch (...) {
    progress.finish();
    record(database, *run, "failed");
    throw;
  }
  const bool finished = result.outcome == train::Outcome::finished;
  record(database, *run, finished ? "finished" : "interrupted");
  if (!flags.json.empty()) write_summary(model, flags.json, result, device, *run);
  if (!finished) {
    fmt::print("interrupted after step {}; saved. To go on:\n  {}\n", result.step,
               resume_command(model, *run, flags));
    return 128 + result.signal;
  }
  fmt::print("trained {} steps in {:.1f} s: loss {:.4f}, {} tokens/s, {:.2f} ms/step\n",
             result.step - first_step, result.seconds, result.loss, train::format_count(result.tokens_per_s),
             result.ms_per_step);
  if (result.skipped > 0 || result.loss_scale > 0)
    fmt::print("skipped {} steps whose gradients were not finite{}\n", result.skipped,
               result.loss_scale > 0 ? fmt::format("; loss scale {:g} at the end", result.loss_scale) : "");
  model.print_end(*run, result);
  fmt::print("report: {}\n", fs::absolute(run->path() / "report.html").lexically_normal().string());
  return 0;
}

}  // namespace tessera::cli
