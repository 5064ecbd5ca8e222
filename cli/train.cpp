#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/tnp_flags.h"
#include "io/checkpoint_folder.h"
#include "io/file.h"
#include "runtime/error.h"

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;

struct TrainArgs {
  TnpFlags tnp;
  std::string config, device, runs = "runs", name, resume, json_out, graph = "on";
  int64_t log_every = 10, eval_every = 0, save_every = 0, eval_tasks = 512, keep = 3;
  bool demo = false, quiet = false, check_finite = false, find_max_batch = false;
};

/// A small model on one-dimensional functions: what `tools/demo` shows, within a minute on two cores.
void apply_demo(train::TnpJob& job) {
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

std::string default_name(const train::TnpJob& job) {
  std::string time = train::utc_now();
  std::erase_if(time, [](char c) { return c == '-' || c == ':'; });
  return fmt::format("tnp-{}-{}", job.prior, time);
}

void print_header(const train::TnpJob& job, Device device, const train::RunFolder& run, bool graph,
                  int64_t first_step) {
  const auto& m = job.model;
  fmt::print("tnp on {} ({}), {}{}\n", device.name(), device.card().name, name_of(m.dtype),
             device.is_cuda() ? graph ? ", one captured graph a step" : ", eager" : "");
  fmt::print("  model     {} parameters: {} blocks, d {}, {} heads of {}, d_ff {}, {} components{}\n",
             train::format_count(double(count_parameters(m))), m.layers, m.d_model, m.heads,
             m.d_model / m.heads, m.d_ff, m.components,
             m.checkpoint_every > 0 ? fmt::format(", recompute groups of {}", m.checkpoint_every) : "");
  fmt::print("  data      prior {}, M={} N={} B={}, {} tokens a step\n", job.prior, job.context, job.targets,
             job.batch, job.batch * (job.context + job.targets));
  fmt::print("  training  steps {} to {}, lr {:g} ({}), seed {}\n", first_step, job.steps, job.lr,
             job.schedule, job.seed);
  fmt::print("  memory    {} planned a step\n",
             format_bytes(size_t(plan_memory(m, job.batch, job.context, job.targets).total())));
  fmt::print("  run       {}\n", run.path().string());
  std::fflush(stdout);  // a pipe's reader sees it before the first step
}

/// As a shell reads it back.
std::string quoted(const std::string& text) {
  const bool plain = std::all_of(text.begin(), text.end(), [](unsigned char c) {
    return std::isalnum(c) || std::string_view("/._-+:,@%").find(char(c)) != std::string_view::npos;
  });
  if (plain && !text.empty()) return text;
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

std::string resume_command(const train::RunFolder& run, const TrainArgs& args) {
  std::string command = "tessera train tnp --resume " + quoted(run.path().string());
  if (!args.device.empty()) command += " --device " + args.device;
  return command;
}

void write_summary(const std::string& path, const train::TnpJob& job, const train::TrainResult& result,
                   Device device, const train::RunFolder& run) {
  nlohmann::json out = {
      {"config", train::to_json(job)},
      {"build", train::build_facts()},
      {"device", device.name()},
      {"card", device.card().name},
      {"run", run.path().string()},
      {"steps", result.step},
      {"outcome", result.outcome == train::Outcome::finished ? "finished" : "interrupted"},
      {"loss", result.loss},
      {"evaluation", result.evaluation},
      {"timing_s", {{"total", result.seconds}}},
      {"throughput",
       {{"tokens_per_s", result.tokens_per_s},
        {"tasks_per_s", result.ms_per_step > 0 ? double(job.batch) / result.ms_per_step * 1e3 : 0.0},
        {"points_per_s",
         result.ms_per_step > 0 ? double(job.batch * job.targets) / result.ms_per_step * 1e3 : 0.0}}},
      {"avg_step_ms", result.ms_per_step},
      {"peak_mem_bytes", device.allocator().stats().reserved_peak}};
  io::write_file(path, out.dump(2) + "\n");
}

/// The first flag given of those that say what is trained: a run that has its settings elsewhere would ignore
/// it.
void refuse_settings(const CLI::App& command, const char* mode, const std::vector<std::string>& allowed) {
  for (const CLI::Option* option : command.get_options()) {
    const std::string &group = option->get_group(), name = option->get_name();
    const bool setting = group == "Model" || group == "Data" || group == "Training";
    if (setting && option->count() > 0 && std::find(allowed.begin(), allowed.end(), name) == allowed.end())
      throw UsageError(std::string(mode) + "; " + name + " cannot change it");
  }
}

nlohmann::json options_json(const TrainArgs& args) {
  return {{"graph", args.graph},
          {"log_every", args.log_every},
          {"eval_every", args.eval_every},
          {"eval_tasks", args.eval_tasks},
          {"save_every", args.save_every},
          {"keep", args.keep},
          {"check_finite", args.check_finite}};
}

/// What a resumed run is not told again it does as before.
void adopt_options(TrainArgs& args, const nlohmann::json& settings, const std::string& path,
                   const CLI::App& command) {
  const auto options = settings.find("options");
  if (options == settings.end()) return;
  check(options->is_object(), path, ": \"options\" is not an object");
  const auto adopt = [&](const char* flag, const char* key, auto& value, int64_t least) {
    const auto found = options->find(key);
    if (found == options->end() || command.get_option(flag)->count() > 0) return;
    using T = std::remove_reference_t<decltype(value)>;
    bool good = false;
    if constexpr (std::is_same_v<T, std::string>) {
      good = found->is_string();
    } else if constexpr (std::is_same_v<T, bool>) {
      good = found->is_boolean();
    } else {
      good = found->is_number_unsigned() && found->template get<uint64_t>() <= uint64_t(1) << 30 &&
             found->template get<int64_t>() >= least;
    }
    check(good, path, ": options: \"", key, "\" is ", found->dump(), ", which is no value of ", flag);
    value = found->template get<T>();
  };
  adopt("--graph", "graph", args.graph, 0);
  adopt("--log-every", "log_every", args.log_every, 1);
  adopt("--eval-every", "eval_every", args.eval_every, 0);
  adopt("--eval-tasks", "eval_tasks", args.eval_tasks, 1);
  adopt("--save-every", "save_every", args.save_every, 0);
  adopt("--keep", "keep", args.keep, 1);
  adopt("--check-finite", "check_finite", args.check_finite, 0);
  check(args.graph == "on" || args.graph == "off", path, ": options: \"graph\" is \"", args.graph,
        "\"; expected on or off");
}

/// The row in runs.sqlite is a convenience: that it cannot be written must not hide how the run ended.
void record_end(const fs::path& database, const train::RunFolder& run, const char* status) {
  try {
    train::record_run(database, run, status);
  } catch (const std::exception& error) {
    fmt::print(stderr, "tessera: warning: {}\n", error.what());
  }
}

int run_train(TrainArgs args, const CLI::App& command) {
  if (args.name.find('/') != std::string::npos || args.name == "." || args.name == "..")
    throw UsageError("--name: \"" + args.name + "\": expected a plain name; --runs says where");
  for (const char* other : {"--name", "--runs", "--demo", "--find-max-batch"})
    if (!args.resume.empty() && command.get_option(other)->count() > 0)
      throw UsageError(std::string("--resume continues a run where it is; ") + other + " cannot go with it");
  if (args.demo && args.find_max_batch)
    throw UsageError("--demo has its own batch; --find-max-batch cannot change it");
  std::optional<train::RunFolder> run;
  train::TnpJob job;
  nlohmann::json settings;
  if (!args.resume.empty()) {
    // A resumed run is the one that its folder describes; flags that would change the curve are refused.
    refuse_settings(command, "--resume continues a run as it was", {"--steps"});
    run = train::RunFolder::open(args.resume);
    settings = run->settings();
    const std::string path = (run->path() / "run.json").string();
    job = read_job(path, settings);
    adopt_options(args, settings, path, command);
    if (command.get_option("--steps")->count() > 0) job.steps = args.tnp.settings().steps;
  } else {
    if (args.demo) {
      refuse_settings(command, "--demo has its own settings", {"--seed"});
      apply_demo(job);
      job.seed = args.tnp.settings().seed;
    } else {
      job = args.tnp.job();
    }
  }
  const bool graph = args.graph == "on";
  if (!args.json_out.empty()) check_writable(args.json_out);
  const Device device = args.device.empty() ? Device::best() : Device::parse(args.device);
  if (args.find_max_batch) {
    job.batch = train::find_max_batch(job, device);
    fmt::print("largest batch that fits: {}\n", job.batch);
  }

  train::TnpSession session(job, device);
  int64_t first_step = 0;
  if (run) {
    const auto newest = io::CheckpointFolder(run->checkpoints().string(), int(args.keep)).latest();
    for (const std::string& warning : newest.warnings) fmt::print(stderr, "tessera: warning: {}\n", warning);
    if (newest.step) {
      first_step = session.restore(newest.file);
      fmt::print("resuming from {} (step {})\n", newest.file, first_step);
    } else {
      fmt::print("the run ended before its first checkpoint: starting again at step 0\n");
    }
    run->truncate_metrics(first_step);
    check(first_step < job.steps, "train tnp: the run has done its ", job.steps,
          " steps; give --steps to go further");
  } else {
    run = train::RunFolder::create(args.runs, args.name.empty() ? default_name(job) : args.name);
    settings = {{"model", "tnp"},
                {"started", train::utc_now()},
                {"device", device.name()},
                {"card", device.card().name}};
  }
  settings["job"] = train::to_json(job);
  settings["build"] = train::build_facts();
  settings["options"] = options_json(args);
  run->write_settings(settings);
  const fs::path database = run->path().parent_path() / "runs.sqlite";
  train::record_run(database, *run, "running");
  print_header(job, device, *run, graph, first_step);

  train::Progress progress(args.quiet ? train::Progress::Mode::quiet : train::Progress::Mode::automatic);
  train::TrainerOptions options{.steps = job.steps,
                                .log_every = args.log_every,
                                .eval_every = args.eval_every,
                                .checkpoint_every = args.save_every,
                                .keep = int(args.keep),
                                .graph = graph,
                                .check_finite = args.check_finite,
                                .schedule = train::make_schedule(job)};
  train::TrainResult result;
  try {
    result = train::train_tnp(session, *run, options, first_step, args.eval_tasks, progress);
    train::write_tnp_report(*run, session, result);
  } catch (...) {
    progress.finish();
    record_end(database, *run, "failed");
    throw;
  }
  const bool finished = result.outcome == train::Outcome::finished;
  record_end(database, *run, finished ? "finished" : "interrupted");
  if (!args.json_out.empty()) write_summary(args.json_out, job, result, device, *run);
  if (!finished) {
    fmt::print("interrupted after step {}; saved. To go on:\n  {}\n", result.step,
               resume_command(*run, args));
    return 128 + result.signal;
  }
  fmt::print("trained {} steps in {:.1f} s: loss {:.4f}, {} tokens/s, {:.2f} ms/step\n",
             result.step - first_step, result.seconds, result.loss, train::format_count(result.tokens_per_s),
             result.ms_per_step);
  if (const auto nll = result.evaluation.find("eval_nll"); nll != result.evaluation.end())
    fmt::print(
        "evaluation on {} fresh tasks: {:.4f} nats per point; Bayes-optimal {:.4f}; gap {:.4f} +- {:.4f}\n",
        args.eval_tasks, nll->second, result.evaluation.at("eval_optimal_nll"),
        result.evaluation.at("eval_gap"), result.evaluation.at("eval_gap_error"));
  fmt::print("report: {}\n", fs::absolute(run->path() / "report.html").lexically_normal().string());
  return 0;
}

}  // namespace

void add_train(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand("train", "Train a bundled model; writes a run folder");
  command->require_subcommand(1);
  auto* tnp = command->add_subcommand("tnp", "Transformer Neural Process on a synthetic prior");
  auto args = std::make_shared<TrainArgs>();
  tnp->add_option("--config", args->config, "TOML file with any of these flags; the command line wins");
  args->tnp.add_to(*tnp, true);
  tnp->add_option("--device", args->device, "cpu, cuda or cuda:<index>; default: the first GPU, else the CPU")
      ->check(kDeviceName)
      ->group("Run");
  tnp->add_option("--graph", args->graph, "on or off: the step as one captured graph (GPU)")
      ->check(CLI::IsMember({"on", "off"}))
      ->group("Run");
  tnp->add_option("--runs", args->runs, "Folder of the run folders and of runs.sqlite")->group("Run");
  tnp->add_option("--name", args->name, "Of the run folder; default: tnp-<prior>-<time>")->group("Run");
  tnp->add_option("--resume", args->resume, "Run folder to go on with, from its newest whole checkpoint")
      ->group("Run");
  tnp->add_option("--log-every", args->log_every, "Steps")
      ->check(kDecimal)
      ->check(CLI::Range(1, 1 << 30))
      ->group("Run");
  tnp->add_option("--eval-every", args->eval_every, "Steps; 0: at the end")
      ->check(kDecimal)
      ->check(CLI::Range(0, 1 << 30))
      ->group("Run");
  tnp->add_option("--eval-tasks", args->eval_tasks, "Fresh tasks of an evaluation")
      ->check(kDecimal)
      ->check(CLI::Range(1, 1 << 24))
      ->group("Run");
  tnp->add_option("--save-every", args->save_every, "Steps between saved checkpoints; 0: at the end")
      ->check(kDecimal)
      ->check(CLI::Range(0, 1 << 30))
      ->group("Run");
  tnp->add_option("--keep", args->keep, "Saved checkpoints kept")
      ->check(kDecimal)
      ->check(CLI::Range(1, 1 << 20))
      ->group("Run");
  tnp->add_flag("--find-max-batch", args->find_max_batch,
                "Use the largest batch that fits: doubles, then bisects")
      ->group("Run");
  tnp->add_flag("--check-finite", args->check_finite,
                "Stop at the first NaN or infinity, naming operator and site; slow")
      ->group("Run");
  tnp->add_option("--json-out", args->json_out,
                  "Write settings, timings and throughput of the run to this file")
      ->group("Run");
  tnp->add_flag("--demo", args->demo, "A small model that trains within a minute on two cores")->group("Run");
  tnp->add_flag("--quiet", args->quiet, "No progress line")->group("Run");
  tnp->callback([&action, args, tnp] {
    action = [args, tnp] {
      apply_config(*tnp, args->config);
      return run_train(*args, *tnp);
    };
  });
}

}  // namespace tessera::cli
