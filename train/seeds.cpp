#include "train/seeds.h"

#include <exception>
#include <nlohmann/json.hpp>
#include <utility>

#include "comm/deadline.h"
#include "eval/statistics.h"
#include "io/checkpoint_folder.h"
#include "runtime/interrupt.h"

namespace tessera::train {

namespace fs = std::filesystem;

namespace {

/// Whether the seed's run has reached its end, evaluation and all.
bool is_done(const fs::path& path, int64_t steps) {
  const auto newest = io::CheckpointFolder((path / "checkpoints").string()).latest();
  if (newest.step.value_or(0) < steps) return false;
  const auto records = RunFolder::open(path).metrics();
  return !records.empty() && records.back().step >= steps && records.back().values.contains("eval_score");
}

/// The entry of run.json that says that a seed has diverged, which stays when the run is resumed: the step of
/// its last record by then.
constexpr const char* kDiverged = "diverged";

void mark_diverged(const RunFolder& run) {
  const std::vector<StepRecord> records = run.metrics();
  nlohmann::json settings = run.settings();
  settings[kDiverged] = records.empty() ? 0 : records.back().step;
  run.write_settings(settings);
}

int signal_of(const RunEnd& end) {
  return end.result.outcome == Outcome::interrupted ? end.result.signal : 0;
}

/// The largest value of any rank, which all call this. Rank 0 may take hours over what it does alone.
int agreed(const dist::World* world, int value) {
  if (world == nullptr || world->size() == 1) return value;
  const comm::TimeoutScope patience(world->limit_after_rank_zero());
  return int(world->host().largest(value));
}

/// Trains the seed, which adds to `trained`, or completes what it left. Returns the signal that interrupted
/// it, or 0. `recipe`: what ran, also where it throws. Ranks destroy it together, so not while one of them
/// unwinds.
int run_seed(const SeedGroup& group, uint64_t seed, RunRequest& request, std::unique_ptr<SeedRecipe>& recipe,
             std::vector<TrainResult>& trained) {
  const fs::path path = group.folder_of(seed);
  std::error_code ignored;
  const bool begun = fs::exists(path / "run.json", ignored);
  if (!begun) fs::remove_all(path, ignored);  // killed before it said what it is
  request.resume = begun ? path.string() : "";
  request.name = begun ? "" : path.filename().string();
  recipe = group.make(seed);
  // The group has settled the options: those in a seed's run.json may be older.
  for (const SettingList& list : {request.options.list(), recipe->options()})
    for (const Setting& setting : list.all()) request.given.insert(setting.flag);
  const bool trains = !begun || !is_done(path, group.steps);
  agreed(request.world, trains);
  if (trains) {
    const RunEnd end = run_recipe(*recipe, request);
    group.ended(*recipe, end);
    trained.push_back(end.result);
    return signal_of(end);
  }
  const RunFolder folder = RunFolder::open(path);
  if (fs::exists(path / "report.html", ignored) && !recipe->lacks(folder)) return 0;
  // Killed between its last step and its page, or asked for more than before.
  recipe->prepare(folder, request.device, true);
  recipe->job().restore(io::CheckpointFolder(folder.checkpoints().string()).latest().file);
  recipe->complete(folder);
  return 0;
}

/// A rank but the first: follows it through the seeds.
SeedsEnd follow_seeds(const SeedGroup& group, const RunRequest& request) {
  SeedsEnd end;
  for (uint64_t seed = group.first_seed; seed < group.first_seed + uint64_t(group.count); ++seed) {
    std::unique_ptr<SeedRecipe> recipe;  // destroyed where rank 0 does it, in run_seeds
    if (agreed(request.world, 0) != 0) {
      recipe = group.make(seed);
      try {
        end.signal = signal_of(run_recipe(*recipe, request));
      } catch (const Diverged&) {  // rank 0 says so, and goes on
        continue;
      }
      end.in_run = end.signal != 0;
    }
    end.signal = agreed(request.world, end.signal);
    if (end.signal != 0) break;
  }
  return end;
}

RunFigures figures_of(const SeedGroup& group, const SeedResults& results) {
  const auto mean = [&](const char* metric) -> std::optional<double> {
    const auto found = results.values.find(metric);
    if (found == results.values.end()) return {};
    return eval::spread_of(found->second).mean;
  };
  return {.steps = group.steps, .loss = mean("loss"), .best_evaluation = mean("eval_score")};
}

}  // namespace

SeedsEnd run_seeds(const SeedGroup& group, RunRequest request) {
  if (request.world && !request.world->leads()) return follow_seeds(group, request);
  const fs::path database = group.folder.path().parent_path() / "runs.sqlite";
  const auto record = [&](const char* status, const RunFigures& figures = {}) {
    record_or_warn(database, group.folder, status, figures);
  };
  request.runs = group.folder.path().string(), request.summary = "";
  bool begun = false;  // a run has said what it is
  request.say = [&, say = request.say](const std::string& text) {
    if (!std::exchange(begun, true)) record("running");
    say(text);
  };
  SeedsEnd end;
  std::vector<RunFolder> runs;
  std::vector<std::string> diverged;
  std::exception_ptr first_diverged;
  try {
    for (uint64_t seed = group.first_seed; seed < group.first_seed + uint64_t(group.count); ++seed) {
      std::unique_ptr<SeedRecipe> recipe;
      try {
        end.signal = run_seed(group, seed, request, recipe, end.trained);
        end.in_run = end.signal != 0;
      } catch (const Interrupted& interrupted) {
        if (seed == group.first_seed && !request.name.empty()) throw;  // nothing is there that could go on
        end.signal = interrupted.signal();
      } catch (const Diverged& error) {
        if (!first_diverged) first_diverged = std::current_exception();
        diverged.push_back(group.folder_of(seed).filename().string());
        mark_diverged(RunFolder::open(group.folder_of(seed)));
        report::tell("tessera: " + diverged.back() + " diverged: " + error.message() + "\n");
        continue;
      }
      end.signal = agreed(request.world, end.signal);
      if (end.signal != 0) return record("interrupted"), end;
      runs.push_back(RunFolder::open(group.folder_of(seed)));
    }
    if (runs.empty()) std::rethrow_exception(first_diverged);
  } catch (...) {
    if (begun) record("failed");
    throw;
  }
  end.results = collect_seeds(runs);
  end.results.diverged = diverged;
  for (const RunFolder& run : runs)
    if (run.settings().contains(kDiverged)) end.results.resumed.push_back(run.path().filename().string());
  record(diverged.empty() ? "finished" : "failed", figures_of(group, end.results));
  return end;
}

}  // namespace tessera::train
