#include "train/glue_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "io/utf8.h"
#include "plan/ranks.h"
#include "runtime/error.h"
#include "train/glue_submission.h"

namespace tessera::train {

namespace fs = std::filesystem;
using nlohmann::json;

namespace {

fs::path predictions_of(const RunFolder& run) {
  return run.path() / "predictions";
}
fs::path model_of(const RunFolder& run) {
  return run.path() / "model";
}

}  // namespace

GlueRecipe::GlueRecipe(const GlueGroup& group, uint64_t seed)
    : group_(group), settings_(group.settings()), options_(group.options()) {
  settings_.seed = seed;
}

void GlueRecipe::spread(const optim::Sharding& sharding) {
  const char* const measures = settings_.drop.calibrates()       ? "--dropbp-rates sensitivity"
                               : settings_.slice.is_auto()       ? "--rows auto"
                               : settings_.slice.probe_every > 0 ? "--probe-gradient"
                                                                 : nullptr;
  check(!sharding.gradients || !measures, "train bert: ", measures ? measures : "",
        " measures whole gradients, of which each rank has a part alone with --zero 2; use --zero 1");
  settings_.sharding = sharding;
}

void GlueRecipe::prepare(const RunFolder& run, Device device, bool resumed) {
  const bool restored = resumed && run.has_checkpoints();
  job_.emplace(settings_, device, &group_.set(), restored);
}

std::string GlueRecipe::header(const RunFolder& run, bool captured, int64_t first_step) {
  const Device device = job_->device();
  std::string text = fmt::format("seed {} on {} ({}), {}{}: steps {} to {}, {}\n", settings_.seed,
                                 device.name(), device.info().name, name_of(settings_.precision()),
                                 device.is_cuda() ? captured ? ", captured" : ", eager" : "", first_step,
                                 settings_.steps, run.path().string());
  text += settings_.memory_line(settings_.planned(device),
                                plan::arena_sizes(settings_.bert, settings_.planned_step(device)), device,
                                ranks_);
  return first_step == 0 ? text + origin() : text;
}

/// Which weights come from the file and which do not: a head that is new learns, one that was expected in the
/// file and is not there would be missed.
std::string GlueRecipe::origin() const {
  if (settings_.model.empty()) return "  weights   all initialised at random\n";
  const auto listed = [](const std::vector<std::string>& names) {
    constexpr size_t kShown = 8;
    std::string text;
    for (size_t i = 0; i < std::min(kShown, names.size()); ++i) text += (i ? ", " : "") + io::shown(names[i]);
    return names.size() > kShown ? text + fmt::format(" and {} more", names.size() - kShown) : text;
  };
  const pretrained::LoadReport& loaded = job_->loaded();
  std::string text = fmt::format(
      "  weights   from {}; {}\n", settings_.model,
      loaded.fresh.empty() ? "none initialised at random" : "initialised at random: " + listed(loaded.fresh));
  if (!loaded.ignored.empty())
    text += fmt::format("            in the file, but not used: {}\n", listed(loaded.ignored));
  return text;
}

void GlueRecipe::report(const RunFolder& run, const TrainResult& result) {
  if (result.outcome == Outcome::finished) write_extras(run);
  write_page(run);
}

void GlueRecipe::complete(const RunFolder& run) {
  write_extras(run);
  write_page(run);
}

/// The page is written last: where it is, all is that the run was asked for then.
void GlueRecipe::write_extras(const RunFolder& run) {
  if (options_.predict)
    for (const std::string& file : write_submissions(*job_, group_.set(), predictions_of(run)))
      group_.say(fmt::format("predictions: {}\n", file));
  if (!options_.save_model) return;
  group_.save_model(job_->model(), model_of(run));
  group_.say(fmt::format("model: {}\n", model_of(run).string()));
}

bool GlueRecipe::lacks(const RunFolder& run) const {
  std::error_code ignored;
  const auto files = submission_files(group_.set(), predictions_of(run));
  const auto missing = [&](const std::string& file) { return !fs::exists(file, ignored); };
  return (options_.predict && std::ranges::any_of(files, missing)) ||
         (options_.save_model && !fs::is_directory(model_of(run), ignored));
}

void GlueRecipe::write_page(const RunFolder& run) const {
  write_run_report(run.path() / "report.html",
                   fmt::format("BERT on {}, seed {}", group_.set().info().folder, settings_.seed), run,
                   report_rows(settings_));
}

json GlueRecipe::throughput(const TrainResult& result) const {
  const double texts = double(settings_.texts_per_step());
  return {{"texts_per_s", result.ms_per_step > 0 ? texts / result.ms_per_step * 1e3 : 0.0}};
}

std::string GlueRecipe::conclusion(const RunFolder&, const TrainResult& result) const {
  std::string line;
  for (const auto& [name, value] : result.evaluation)
    line += fmt::format("{}{} {:.4f}", line.empty() ? "" : ", ", name.substr(5), value);
  return fmt::format("evaluation: {}\n", line);
}

}  // namespace tessera::train
