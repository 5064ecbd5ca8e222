#include "train/run.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>

#include "comm/deadline.h"
#include "comm/status.h"
#include "io/checkpoint_folder.h"
#include "io/file.h"
#include "io/utf8.h"
#include "report/facts.h"
#include "runtime/allocator.h"
#include "runtime/error.h"
#include "runtime/interrupt.h"
#include "train/step.h"

namespace tessera::train {

namespace fs = std::filesystem;
using nlohmann::json;

std::string stamped(const std::string& name) {
  std::string time = report::utc_now();
  std::erase_if(time, [](char c) { return c == '-' || c == ':'; });
  return name + "-" + time;
}

void record_or_warn(const fs::path& database, const RunFolder& run, const std::string& status,
                    const RunFigures& figures) {
  try {
    record_run(database, run, status, figures);
  } catch (const std::exception& error) {
    report::tell(fmt::format("tessera: warning: {}\n", error.what()));
  }
}

void note_run(const fs::path& path) {
  comm::Status& status = comm::own_status();
  comm::copy_text(status.run, sizeof(status.run), path.string());
}

namespace {

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

/// One call of run_recipe.
class Run {
 public:
  Run(Recipe& recipe, const RunRequest& request)
      : recipe_(recipe), request_(request), options_(request.options), resumed_(!request.resume.empty()) {}

  RunEnd run() {
    const InterruptGuard interrupts;
    if (world_ == nullptr) return lead();
    // All ranks know loss, norm and evaluation of all, so that each throws Diverged by itself, after the same
    // step: none needs to be told, and they can go on together to another run.
    std::exception_ptr diverged;
    const std::optional<RunEnd> end = world_->told([&]() -> std::optional<RunEnd> {
      try {
        return world_->leads() ? lead() : follow();
      } catch (const Diverged&) {
        diverged = std::current_exception();
        return {};
      }
    });
    if (diverged) std::rethrow_exception(diverged);
    return *end;
  }

 private:
  RunEnd lead() {
    settle();
    if (!folder_)
      folder_ = RunFolder::create(request_.runs,
                                  request_.name.empty() ? stamped(recipe_.default_name()) : request_.name);
    if (!lock_) lock_.emplace(folder_->lock());
    FolderGuard guard(resumed_ ? fs::path() : folder_->path());
    recipe_.prepare(*folder_, request_.device, resumed_);
    resumed_ ? restore() : describe();
    write_settings();
    guard.keep();
    record("running");
    announce();
    const bool captured =
        Step::captures(recipe_.job(), {.graph = options_.graph, .check_finite = options_.check_finite});
    request_.say(recipe_.header(*folder_, captured, first_step_) + optimizer_line());
    train();
    record(result_.outcome == Outcome::finished ? "finished" : "interrupted");
    if (!request_.summary.empty()) write_summary();
    return {*folder_, first_step_, result_};
  }

  /// Notes the run for a launcher; of several ranks rank 0 also tells the others which one it is, once it is
  /// as they will find it.
  void announce() {
    const std::string path = fs::absolute(folder_->path()).lexically_normal().string();
    note_run(path);
    if (world_ == nullptr) return;
    world_->host().gather_texts(std::to_string(first_step_) + " " + path);
    await_readers();
  }

  /// Until all ranks have read the run. A checkpoint may take longer than a call of the ranks.
  void await_readers() const {
    const comm::TimeoutScope patience(0);
    world_->host().barrier();
  }

  /// The other ranks: the run that rank 0 has begun or resumed, as if it were resumed here; nothing is
  /// written.
  RunEnd follow() {
    std::string told;
    {
      const comm::TimeoutScope patience(0);  // rank 0 may tokenize for hours
      told = world_->host().gather_texts("")[0];
    }
    first_step_ = std::stoll(told);
    const std::string path = told.substr(told.find(' ') + 1);
    std::error_code ignored;
    check(fs::exists(fs::path(path) / "run.json", ignored), "train: rank ", world_->rank(),
          " finds no run in ", path,
          ", where rank 0 began it; all machines of the job need a file system in common (--runs)");
    note_run(path);
    folder_ = RunFolder::open(path);
    settings_ = folder_->settings_of(recipe_.name());
    SettingList kept = kept_options();
    recipe_.resume((folder_->path() / "run.json").string(), settings_, {});
    take_options(kept, settings_, path, {});
    set_ranks(true);
    recipe_.prepare(*folder_, request_.device, true);
    if (first_step_ > 0) {
      const auto newest = io::CheckpointFolder(folder_->checkpoints().string(), int(options_.keep)).latest();
      check(newest.step == first_step_, "train: rank ", world_->rank(), " finds no checkpoint of step ",
            first_step_, " in ", folder_->checkpoints().string());
      recipe_.job().restore(newest.file);
    }
    await_readers();
    options_.steps = recipe_.training().steps;
    options_.schedule = recipe_.training().make_schedule();
    recipe_.decide(options_);
    set_order();
    report::Progress progress(report::Progress::Mode::quiet);
    request_.before_steps();
    result_ = train::train(recipe_.job(), *folder_, options_, first_step_, progress);
    return {*folder_, first_step_, result_};
  }

  void set_ranks(bool resumed) {
    const int ranks = world_ ? world_->size() : 1;
    recipe_.set_ranks(ranks, request_.given, resumed);
    if (ranks == 1 || options_.zero == 0) return;
    recipe_.training().check_zero(options_.zero, ranks);
    recipe_.spread({.part = world_->rank(),
                    .parts = ranks,
                    .bucket_mb = options_.bucket_mb > 0 ? options_.bucket_mb : optim::Sharding().bucket_mb,
                    .gradients = options_.zero > 1});
  }

  void choose_bucket() {
    check(
        !world_ || options_.rank_exchange != "peer" || request_.device.is_cuda(),
        "--rank-exchange peer: gradients cannot be summed by copies between GPUs, since the ranks compute on "
        "the CPU; leave it out, or take --rank-exchange communicator");
    if (world_ && options_.bucket_mb < 0)
      options_.bucket_mb = usual_bucket_mb(request_.device, *world_, options_.rank_exchange, options_.zero);
  }

  void set_order() {
    options_.world = world_;
    options_.global_order = recipe_.training().order == "global";
  }

  /// Settings and options, of the command or of the run that goes on: a resumed run is the one that its
  /// folder describes.
  void settle() {
    SettingList kept = kept_options();
    if (resumed_) {
      folder_ = RunFolder::open(request_.resume);
      lock_.emplace(folder_->lock());
      settings_ = folder_->settings_of(recipe_.name());
      const std::string path = (folder_->path() / "run.json").string();
      recipe_.resume(path, settings_, request_.given);
      take_options(kept, settings_, path, request_.given);
    } else {
      recipe_.begin(request_.given, request_.device);
    }
    choose_bucket();
    set_ranks(resumed_);
    recipe_.check_options(options_);
    if (request_.check) request_.check(recipe_, kept);
  }

  SettingList kept_options() {
    SettingList kept = options_.list();
    kept.append(recipe_.options());
    return kept;
  }

  void describe() {
    settings_ = {{"model", recipe_.name()},
                 {"started", report::utc_now()},
                 {"device", request_.device.name()},
                 {"gpu", request_.device.info().name}};
  }

  /// Nothing in the folder is changed before all checks have passed.
  void restore() {
    const io::CheckpointFolder checkpoints(folder_->checkpoints().string(), int(options_.keep));
    checkpoints.check_writable();
    const auto newest = checkpoints.latest();
    for (const std::string& warning : newest.warnings)
      report::tell(fmt::format("tessera: warning: {}\n", warning));
    if (newest.step) first_step_ = recipe_.job().restore(newest.file);
    check_steps();
    check_evaluation();
    request_.say(newest.step ? fmt::format("resuming from {} (step {})\n", newest.file, first_step_)
                             : "the run ended before its first checkpoint: starting again at step 0\n");
    folder_->truncate_metrics(first_step_);
    std::error_code ignored;
    fs::remove(page(), ignored);
  }

  fs::path page() const { return folder_->path() / "report.html"; }

  void check_steps() const {
    const int64_t steps = recipe_.training().steps;
    const std::string train = std::string("train ") + recipe_.name();
    check(first_step_ <= steps, train, ": the run is at step ", first_step_, " already, past --steps ", steps,
          "; give a larger --steps to continue");
    // The page is the last thing that a run writes: without it the run was killed after its last step.
    std::error_code ignored;
    if (first_step_ < steps || !fs::exists(page(), ignored)) return;
    const json before = settings_.value("job", json::object()).value("steps", json());
    check(before == steps, train, ": the run is at step ", first_step_, " already, the last of --steps ",
          steps, "; give a larger --steps to continue");
    fail_at(Site::here(), train, ": the run has finished its ", first_step_,
            " steps; give a larger --steps to continue");
  }

  /// Whether there are evaluations that the resumed run keeps.
  bool has_evaluated() const {
    return std::ranges::any_of(folder_->metrics(), [&](const StepRecord& record) {
      return record.step <= first_step_ && !record.values.contains("interrupted") &&
             std::ranges::any_of(record.values,
                                 [](const auto& value) { return value.first.starts_with("eval_"); });
    });
  }

  /// The best evaluation, --patience and the curves compare all evaluations of a run: they must measure the
  /// same thing.
  void check_evaluation() const {
    const json before = settings_.value("evaluation", json::object());
    if (before.empty() || !has_evaluated()) return;
    const json now = recipe_.facts().value("evaluation", json::object());
    std::string was, would, flags;
    const auto add = [](std::string& text, const std::string& part) {
      text += (text.empty() ? "" : ", ") + part;
    };
    for (const auto& [name, value] : before.items()) {
      const json other = now.value(name, json());
      if (other == value) continue;
      add(was, fmt::format("{} {}", name, value.dump()));
      add(would, fmt::format("{} {}", name, other.dump()));
    }
    for (const std::string& flag : request_.given)
      if (flag.starts_with("--eval-") && flag != "--eval-every") add(flags, flag);
    check(was.empty(), "train ", recipe_.name(), ": the run in ", folder_->path().string(),
          " has been evaluated with ", was, ", and would be with ", would,
          " from here on, though its evaluations are compared with each other; ",
          flags.empty() ? "restore the text that it was evaluated on" : "leave " + flags + " out",
          ", or start a new run");
  }

  /// "  optimizer muon: 16 tensors by muon, 37 by adamw".
  std::string optimizer_line() {
    const TrainingSettings& settings = recipe_.training();
    std::string text = fmt::format("  optimizer {}", settings.optimizer);
    const optim::Optimizer* const optimizer = recipe_.job().trained_by().counted();
    std::map<std::string, int64_t> tensors;
    for (size_t i = 0; optimizer && i < optimizer->parameters().size(); ++i) ++tensors[optimizer->rule_of(i)];
    const char* before = ":";
    for (auto it = tensors.rbegin(); tensors.size() > 1 && it != tensors.rend(); ++it, before = ",")
      text += fmt::format("{} {} tensors by {}", before, it->second, it->first);
    return text + "\n";
  }

  void write_settings() {
    settings_["job"] = recipe_.job().settings_json();
    const json facts = recipe_.facts();
    for (const auto& [name, value] : facts.items())
      if (value.is_null())
        settings_.erase(name);
      else
        settings_[name] = value;
    settings_["build"] = report::build_facts();
    settings_["options"] = to_json(kept_options(), Kept::option);
    folder_->write_settings(settings_);
  }

  void train() {
    options_.steps = recipe_.training().steps;
    options_.schedule = recipe_.training().make_schedule();
    recipe_.decide(options_);
    set_order();
    report::Progress progress(request_.quiet ? report::Progress::Mode::quiet
                                             : report::Progress::Mode::automatic);
    try {
      request_.before_steps();
      result_ = train::train(recipe_.job(), *folder_, options_, first_step_, progress);
      if (result_.loss_scale > 0) {
        settings_["loss_scale"] = {{"skipped_steps", result_.skipped}, {"last", result_.loss_scale}};
        folder_->write_settings(settings_);
      }
      // The page says that a run has nothing left to do: one that is stopped after its last step gets none.
      if (result_.outcome == Outcome::finished || result_.step < options_.steps)
        recipe_.report(*folder_, result_);
    } catch (const Interrupted& interrupted) {  // during an export: the last step is saved
      progress.finish();
      result_.outcome = Outcome::interrupted;
      result_.signal = interrupted.signal();
    } catch (...) {
      progress.finish();
      record("failed");
      throw;
    }
  }

  void record(const char* status) const {
    record_or_warn(folder_->path().parent_path() / "runs.sqlite", *folder_, status);
  }

  void write_summary() const {
    const Device device = request_.device;
    json out = {{"config", recipe_.job().settings_json()},
                {"build", report::build_facts()},
                {"device", device.name()},
                {"gpu", device.info().name},
                {"run", folder_->path().string()},
                {"steps", result_.step},
                {"outcome", result_.outcome == Outcome::finished ? "finished" : "interrupted"},
                {"loss", result_.loss},
                {"skipped_steps", result_.skipped},
                {"loss_scale", result_.loss_scale > 0 ? json(result_.loss_scale) : json()},
                {"evaluation", result_.evaluation}};
    out.update(costs_json(recipe_, result_, device));
    io::write_file(request_.summary, io::json_text(out, 2) + "\n");
  }

  Recipe& recipe_;
  const RunRequest& request_;
  const dist::World* const world_ = request_.world && request_.world->size() > 1 ? request_.world : nullptr;
  TrainerOptions options_;
  const bool resumed_;
  std::optional<RunFolder> folder_;
  std::optional<FolderLock> lock_;
  json settings_;  // run.json
  int64_t first_step_ = 0;
  TrainResult result_;
};

}  // namespace

std::string device_line(const std::string& model, Device device, Precision precision, bool captured) {
  return fmt::format("{} on {} ({}), {}{}\n", model, device.name(), device.info().name, name_of(precision),
                     device.is_cuda() ? captured ? ", one captured graph a step" : ", eager" : "");
}

json costs_json(const Recipe& recipe, const TrainResult& result, Device device) {
  json throughput = recipe.throughput(result);
  throughput["tokens_per_s"] = result.tokens_per_s;
  return {{"timing_s", {{"total", result.seconds}}},
          {"throughput", throughput},
          {"avg_step_ms", result.ms_per_step},
          {"peak_mem_bytes", device.allocator().stats().reserved_peak}};
}

RunEnd run_recipe(Recipe& recipe, const RunRequest& request) {
  return Run(recipe, request).run();
}

}  // namespace tessera::train
