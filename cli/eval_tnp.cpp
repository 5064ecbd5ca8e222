#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <optional>

#include "cli/eval.h"
#include "eval/tnp.h"
#include "io/checkpoint_folder.h"
#include "io/utf8.h"
#include "report/progress.h"
#include "runtime/error.h"
#include "train/run_folder.h"
#include "train/tnp_job.h"

namespace tessera::cli {
namespace {

struct EvalArgs {
  std::string run, device;
  int64_t tasks = 4096, batch = 64;
  std::optional<double> most_gap;
  bool json = false;
};

int run_eval(const EvalArgs& args) {
  const Device device = args.device.empty() ? Device::best() : Device::parse(args.device);
  const train::RunFolder run = train::RunFolder::open(args.run);
  const train::TnpSettings settings = train::settings_of_run<train::TnpSettings>(
      (run.path() / "run.json").string(), run.settings_of("tnp"), "tnp");
  train::TnpJob job(settings, device);
  const auto newest = io::CheckpointFolder(run.checkpoints().string()).latest();
  for (const std::string& warning : newest.warnings)
    report::tell(fmt::format("tessera: warning: {}\n", warning));
  check(newest.step.has_value(), run.checkpoints().string(), ": it holds no checkpoint yet");
  const int64_t step = job.restore(newest.file);
  const F32MathScope math(settings.f32_math);
  const eval::TnpEvaluation e = eval::evaluate_tnp(
      job.model(), train::fresh_tasks(settings, std::min(args.tasks, args.batch), device), args.tasks);
  const bool has_error = e.tasks > 1;  // of the mean over tasks
  const bool within = !args.most_gap || e.gap <= *args.most_gap;
  if (args.json) {
    fmt::print("{}\n",
               io::json_text({{"run", run.path().string()},
                              {"prior", settings.prior},
                              {"features", settings.model.features},
                              {"M", settings.context},
                              {"N", settings.targets},
                              {"step", step},
                              {"tasks", e.tasks},
                              {"points", e.points},
                              {"nll", e.nll},
                              {"optimal_nll", e.optimal_nll},
                              {"gap", e.gap},
                              {"gap_error", has_error ? nlohmann::json(e.gap_error) : nlohmann::json()},
                              {"within", within}},
                             2));
  } else {
    fmt::print("{:<10} {:>3} {:>6} {:>6} {:>8} {:>8} {:>10} {:>10} {:>9} {:>9}\n", "prior", "F", "M", "N",
               "step", "tasks", "model nll", "optimal", "gap", "+-");
    fmt::print("{:<10} {:>3} {:>6} {:>6} {:>8} {:>8} {:>10.4f} {:>10.4f} {:>9.4f} {:>9}\n", settings.prior,
               settings.model.features, settings.context, settings.targets, step, e.tasks, e.nll,
               e.optimal_nll, e.gap, has_error ? fmt::format("{:.4f}", e.gap_error) : "");
  }
  if (!within)
    report::tell(
        fmt::format("tessera: the gap {:.4f} is above {:.4f} nats per point\n", e.gap, *args.most_gap));
  return within ? 0 : 1;
}

}  // namespace

void add_eval_tnp(CLI::App& eval, Action& action) {
  auto* tnp = eval.add_subcommand(
      "tnp", "Measure the negative log-likelihood on fresh tasks, next to the Bayes-optimal one");
  auto args = std::make_shared<EvalArgs>();
  tnp->add_option("run", args->run, "Run folder")->required();
  tnp->add_option("--eval-tasks,--tasks", args->tasks, "Number of fresh tasks")
      ->check(kDecimal)
      ->check(CLI::Range(1, 1 << 24));
  tnp->add_option("--batch-size", args->batch, "Tasks per batch; with another number other tasks are drawn")
      ->check(kDecimal)
      ->check(CLI::Range(1, 1 << 20));
  tnp->add_option("--most-gap", args->most_gap,
                  "Exit with status 1 if the gap is larger than this, in nats per point; default: any gap")
      ->check(kFinite);
  add_device(*tnp, args->device);
  tnp->add_flag("--json", args->json, "Print the result as JSON");
  tnp->callback([&action, args] { action = [args] { return run_eval(*args); }; });
}

}  // namespace tessera::cli
