#include "train/tnp_run.h"

#include <fmt/format.h>

#include "plan/plan.h"
#include "runtime/allocator.h"
#include "runtime/error.h"

namespace tessera::train {

SettingList TnpRecipe::options() {
  SettingList list(Kept::option);
  list.group("Run");
  list.add("eval_tasks", eval_tasks, "Number of fresh tasks per evaluation")
      .range(int64_t{1}, int64_t{1} << 24);
  return list;
}

void TnpRecipe::resume(const std::string& path, const nlohmann::json& run, const Given& given) {
  settings_ = tnp_settings_of_run(path, run);
  try {
    check_task_stream(settings_);
  } catch (const Error& error) {
    fail_at(Site::here(), path, ": ", error.what());
  }
  if (given.contains("--steps")) settings_.steps = given_settings().steps;
}

void TnpRecipe::set_ranks(int ranks, const Given& given, bool resumed) {
  settings_.set_ranks(ranks, given, resumed);
}

void TnpRecipe::prepare(const RunFolder&, Device device, bool resumed) {
  if (find_max_batch && !resumed) settings_.batch = train::find_max_batch(settings_, device);
  job_.emplace(settings_, device, eval_tasks);
}

std::string TnpRecipe::header(const RunFolder& run, bool graph, int64_t first_step) {
  const auto& m = settings_.model;
  const Device device = job_->device();
  std::string text =
      find_max_batch ? fmt::format("largest batch that fits: {}\n", settings_.batch) : std::string();
  text +=
      fmt::format("tnp on {} ({}), {}{}\n", device.name(), device.info().name, name_of(settings_.precision()),
                  device.is_cuda() ? graph ? ", one captured graph a step" : ", eager" : "");
  text +=
      fmt::format("  model     {} parameters: {} blocks, d {}, {} heads of {}, d_ff {}, {} components{}\n",
                  format_count(double(plan::count_parameters(m))), m.layers, m.d_model, m.heads,
                  m.d_model / m.heads, m.d_ff, m.components,
                  m.checkpoint_every > 0 ? fmt::format(", recompute groups of {}", m.checkpoint_every) : "");
  text += fmt::format("  data      prior {}, {} feature{}, M={} N={} B={}, {} tokens per step, drawn on {}\n",
                      settings_.prior, m.features, m.features == 1 ? "" : "s", settings_.context,
                      settings_.targets, settings_.batch,
                      settings_.accumulate * settings_.batch * (settings_.context + settings_.targets),
                      device.name());
  text += settings_.step_line();
  text += fmt::format("  training  steps {} to {}, lr {:g} ({}), seed {}\n", first_step, settings_.steps,
                      settings_.lr, settings_.schedule, settings_.seed);
  text += fmt::format(
      "  memory    {} planned a step\n",
      format_bytes(
          size_t(plan::count_memory(m, settings_.batch, settings_.context, settings_.targets).total())));
  text += fmt::format("  run       {}\n", run.path().string());
  return text;
}

void TnpRecipe::report(const RunFolder& run, const TrainResult& result) {
  write_tnp_report(run, *job_, result);
}

nlohmann::json TnpRecipe::throughput(const TrainResult& result) const {
  const double steps_per_s = result.ms_per_step > 0 ? 1e3 / result.ms_per_step : 0.0;
  const double tasks = double(settings_.accumulate * settings_.batch);
  return {{"tasks_per_s", tasks * steps_per_s},
          {"points_per_s", tasks * double(settings_.targets) * steps_per_s}};
}

std::string TnpRecipe::conclusion(const RunFolder&, const TrainResult& result) const {
  const auto nll = result.evaluation.find("eval_nll");
  if (nll == result.evaluation.end()) return {};
  return fmt::format(
      "evaluation on {} fresh tasks: {:.4f} nats per point; Bayes-optimal {:.4f}; gap {:.4f} +- {:.4f}\n",
      eval_tasks, nll->second, result.evaluation.at("eval_optimal_nll"), result.evaluation.at("eval_gap"),
      result.evaluation.at("eval_gap_error"));
}

}  // namespace tessera::train
