#include "train/tnp_run.h"

#include <fmt/format.h>

#include "plan/plan.h"
#include "plan/ranks.h"
#include "runtime/allocator.h"
#include "runtime/error.h"
#include "runtime/integers.h"
#include "train/tnp_batch_size.h"
#include "train/tnp_report.h"

namespace tessera::train {

SettingList TnpRecipe::options() {
  SettingList list(Kept::option);
  list.group("Run");
  list.add("eval_tasks", eval_tasks, "Number of fresh tasks per evaluation")
      .range(int64_t{1}, int64_t{1} << 24);
  list.add("context_parallel", context_parallel,
           "Consecutive ranks that share the points of each task; must divide the ranks")
      .range(int64_t{1}, int64_t{1} << 16)
      .absent_means(1);
  list.add("context_split", context_split,
           "How such ranks divide attention: rows of queries, or heads, which they must divide")
      .one_of({"rows", "heads"})
      .absent_means("rows");
  return list;
}

void TnpRecipe::resume(const std::string& path, const nlohmann::json& run, const Given& given) {
  settings_ = settings_of_run<TnpSettings>(path, run, name());
  try {
    check_task_stream(settings_);
  } catch (const Error& error) {
    fail_at(Site::here(), path, ": ", error.what());
  }
  take_steps(settings_, given_settings(), given);
}

void TnpRecipe::check_given(const Given& given) const {
  check(context_parallel > 1 || !given.contains("--context-split"),
        "train tnp: --context-split divides the tasks of --context-parallel, which is 1; leave it out");
}

void TnpRecipe::set_ranks(int ranks, const Given& given, bool resumed) {
  ranks_ = ranks;
  const int64_t each = context_parallel;
  check_given(given);
  if (each == 1) return settings_.set_ranks(ranks, given, resumed);
  const std::string flag = fmt::format("train tnp: --context-parallel {}", each);
  check(ranks % each == 0, flag, " on ", ranks, " rank", ranks == 1 ? "" : "s",
        ": it must divide the ranks; start a multiple of ", each, " (tessera launch -n ", each,
        " -- train tnp ...), or give another --context-parallel");
  check(!find_max_batch, flag,
        " shares each task, and --find-max-batch tries steps on one rank; see tessera ",
        "plan tnp --context-parallel ", each, ", and give --batch-size");
  check(!given.contains("--bucket-mb"), flag, " with --bucket-mb: the backward pass makes calls between the ",
        "ranks itself, and gradients are summed after it; leave --bucket-mb out");
  Given settled = given;
  if (!resumed && settled.insert("--order").second) settings_.order = "world";
  check(settings_.order == "world", flag, " with --order global, which promises the bits of any number of ",
        "ranks: those of a task depend on how many share it. ",
        resumed ? "The run was begun so; continue it with --context-parallel 1" : "Leave --order out");
  settings_.set_ranks(int(ranks / each), settled, resumed);
  settings_.split = {each, nn::parse_attention_split(context_split)};
  settings_.check_split();
}

void TnpRecipe::decide(TrainerOptions& options) const {
  if (context_parallel > 1) options.bucket_mb = 0;
}

void TnpRecipe::prepare(const RunFolder&, Device device, bool resumed) {
  if (find_max_batch && !resumed) {
    TnpSettings own = settings_;  // a step as one rank makes it
    own.accumulate /= ranks_;
    own.sharding = {};  // which needs the other ranks; whole states take more memory
    settings_.batch = train::find_max_batch(own, device);
  }
  job_.emplace(settings_, device, eval_tasks);
}

int64_t TnpRecipe::share_of_points(int64_t points) const {
  return ceil_div(points, settings_.split.ranks);
}

std::string TnpRecipe::header(const RunFolder& run, bool captured, int64_t first_step) {
  const auto& m = settings_.model;
  const Device device = job_->device();
  std::string text =
      find_max_batch ? fmt::format("largest batch that fits: {}\n", settings_.batch) : std::string();
  text += device_line(name(), device, settings_.precision(), captured);
  text +=
      fmt::format("  model     {} parameters: {} blocks, d {}, {} heads of {}, d_ff {}, {} components{}\n",
                  report::format_count(double(plan::count_parameters(m))), m.layers, m.d_model, m.heads,
                  m.d_model / m.heads, m.d_ff, m.components,
                  m.checkpoint_every > 0 ? fmt::format(", recompute groups of {}", m.checkpoint_every) : "");
  text += fmt::format("  data      prior {}, {} feature{}, M={} N={} B={}, {} tokens per step, drawn on {}\n",
                      settings_.prior, m.features, m.features == 1 ? "" : "s", settings_.context,
                      settings_.targets, settings_.batch,
                      settings_.accumulate * settings_.batch * (settings_.context + settings_.targets),
                      device.name());
  text += settings_.step_line();
  if (settings_.split.ranks > 1)
    text += fmt::format("  ranks     {} share each task, attention by {}: at most M={} N={} on each\n",
                        settings_.split.ranks, nn::name_of(settings_.split.by),
                        share_of_points(settings_.context), share_of_points(settings_.targets));
  text += fmt::format("  training  steps {} to {}, lr {:g} ({}), seed {}\n", first_step, settings_.steps,
                      settings_.lr, settings_.schedule, settings_.seed);
  text += settings_.memory_line(settings_.planned(device), plan::arena_sizes(m), device, ranks_,
                                context_parallel);
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
