#include <fmt/format.h>

#include <optional>

#include "cli/tnp_flags.h"
#include "cli/train_run.h"
#include "runtime/error.h"

namespace tessera::cli {
namespace {

/// A small model on one-dimensional functions: what `tools/demo` shows, within a minute on two cores.
void apply_demo(train::TnpSettings& job) {
  job.model = {.features = 1,
               .d_model = 64,
               .d_ff = 171,
               .heads = 2,
               .layers = 3,
               .components = 5,
               .embed_hidden = 64};
  job.prior = "rbf";
  job.context = 24;
  job.targets = 24;
  job.batch = 16;
  job.steps = 1500;
  job.warmup = 100;
  job.lr = 2e-3;
}

class TrainedTnp : public TrainedModel {
 public:
  TnpFlags flags;
  int64_t eval_tasks = 512;
  bool demo = false, find_max_batch = false;

  const char* name() const override { return "tnp"; }
  train::SettingList options() override {
    train::SettingList list(train::Kept::option);
    list.group("Run");
    list.add("eval_tasks", eval_tasks, "Fresh tasks per evaluation").range(int64_t{1}, int64_t{1} << 24);
    return list;
  }
  train::SettingList settings() override { return job_.list(); }
  void from_flags(const CLI::App& command, Device device) override {
    if (demo && find_max_batch)
      throw UsageError("--demo has its own batch; --find-max-batch cannot change it");
    if (demo) {
      refuse_settings(command, "--demo has its own settings", {"--seed"});
      apply_demo(job_);
      job_.seed = flags.settings().seed;
    } else {
      job_ = flags.job();
    }
    job_.set_precision(flags.precision.on(device));
  }
  void from_settings(const std::string& path, const nlohmann::json& settings,
                     const CLI::App& command) override {
    job_ = read_job(path, settings);
    try {
      train::check_task_stream(job_);
    } catch (const Error& error) {
      fail_at(Site::here(), path, ": ", error.what());
    }
    if (command.get_option("--steps")->count() > 0) job_.steps = flags.settings().steps;
  }
  std::string default_name() const override { return "tnp-" + job_.prior; }
  void prepare(const train::RunFolder&, Device device, bool) override {
    if (find_max_batch) {
      job_.batch = train::find_max_batch(job_, device);
      fmt::print("largest batch that fits: {}\n", job_.batch);
    }
    session_.emplace(job_, device, eval_tasks);
  }
  nlohmann::json job() const override { return train::to_json(job_); }
  DType dtype() const override { return job_.model.dtype; }
  int64_t steps() const override { return job_.steps; }
  optim::Schedule schedule() const override { return job_.make_schedule(); }
  int64_t restore(const std::filesystem::path& checkpoint) override { return session_->restore(checkpoint); }

  void print_header(const train::RunFolder& run, bool graph, int64_t first_step) const override {
    const auto& m = job_.model;
    const Device device = session_->device();
    fmt::print("tnp on {} ({}), {}{}\n", device.name(), device.card().name, name_of(job_.precision()),
               device.is_cuda() ? graph ? ", one captured graph a step" : ", eager" : "");
    fmt::print("  model     {} parameters: {} blocks, d {}, {} heads of {}, d_ff {}, {} components{}\n",
               train::format_count(double(count_parameters(m))), m.layers, m.d_model, m.heads,
               m.d_model / m.heads, m.d_ff, m.components,
               m.checkpoint_every > 0 ? fmt::format(", recompute groups of {}", m.checkpoint_every) : "");
    fmt::print("  data      prior {}, {} feature{}, M={} N={} B={}, {} tokens per step, drawn on {}\n",
               job_.prior, m.features, m.features == 1 ? "" : "s", job_.context, job_.targets, job_.batch,
               job_.batch * (job_.context + job_.targets), device.name());
    fmt::print("  training  steps {} to {}, lr {:g} ({}), seed {}\n", first_step, job_.steps, job_.lr,
               job_.schedule, job_.seed);
    fmt::print("  memory    {} planned a step\n",
               format_bytes(size_t(plan_memory(m, job_.batch, job_.context, job_.targets).total())));
    fmt::print("  run       {}\n", run.path().string());
  }
  train::Job& job_to_train(train::TrainerOptions&) override { return *session_; }
  void report(const train::RunFolder& run, const train::TrainResult& result) override {
    train::write_tnp_report(run, *session_, result);
  }
  nlohmann::json throughput(const train::TrainResult& result) const override {
    const double steps_per_s = result.ms_per_step > 0 ? 1e3 / result.ms_per_step : 0.0;
    return {{"tasks_per_s", double(job_.batch) * steps_per_s},
            {"points_per_s", double(job_.batch * job_.targets) * steps_per_s}};
  }
  void print_end(const train::RunFolder&, const train::TrainResult& result) const override {
    if (const auto nll = result.evaluation.find("eval_nll"); nll != result.evaluation.end())
      fmt::print(
          "evaluation on {} fresh tasks: {:.4f} nats per point; Bayes-optimal {:.4f}; gap {:.4f} +- {:.4f}\n",
          eval_tasks, nll->second, result.evaluation.at("eval_optimal_nll"), result.evaluation.at("eval_gap"),
          result.evaluation.at("eval_gap_error"));
  }

 private:
  train::TnpSettings job_;
  std::optional<train::TnpJob> session_;
};

}  // namespace

void add_train_tnp(CLI::App& train, Action& action) {
  auto* tnp = train.add_subcommand("tnp", "Transformer Neural Process on a synthetic prior");
  auto model = std::make_shared<TrainedTnp>();
  auto run = std::make_shared<RunFlags>();
  model->flags.add_to(*tnp, true);
  run->add_to(*tnp, "tnp-<prior>-<time>");
  add_flags(*tnp, model->options());
  tnp->add_flag("--find-max-batch", model->find_max_batch,
                "Use the largest batch that fits: doubles, then bisects")
      ->group("Run");
  tnp->add_flag("--demo", model->demo, "A small model that trains within a minute on two cores")
      ->group("Run");
  tnp->callback([&action, model, run, tnp] {
    action = [model, run, tnp] {
      apply_config(*tnp, run->config);
      return run_train(*model, *run, *tnp);
    };
  });
}

}  // namespace tessera::cli
