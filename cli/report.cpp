#include <fmt/format.h>

#include <cmath>

#include "cli/commands.h"
#include "runtime/error.h"
#include "study/runs_report.h"

namespace tessera::cli {
namespace {

struct ReportArgs {
  std::vector<std::string> runs;
  std::string by, out = "report.html";
  int64_t last = 100;
  bool check = false;
};

/// Throws unless the final losses of the group can be told from those of another one.
void check_tells_noise(const study::RunGroup& group) {
  for (size_t i = 0; i < group.runs.size(); ++i)
    if (!std::isfinite(group.final_loss[i]))
      throw UsageError(
          fmt::format("report: --check: {} diverged: its final loss is not finite, so that it cannot be "
                      "compared; leave it out",
                      group.runs[i].path().string()));
  if (group.runs.size() < 2)
    throw UsageError(
        fmt::format("report: --check: \"{}\" is one run, which does not tell the noise over runs; give "
                    "at least two of each group",
                    group.name));
  if (!eval::tells_noise(group.final_loss))
    throw UsageError(
        fmt::format("report: --check: the runs of \"{}\" have equal final losses, as repeats of one "
                    "run, which do not tell the noise over runs; give runs of different seeds",
                    group.name));
}

int run_report(const ReportArgs& args) {
  check_replaceable(args.out);
  check_not_input(args.out, args.runs);
  std::vector<train::RunFolder> runs;
  for (const std::string& path : args.runs) runs.push_back(train::RunFolder::open(path));
  const study::RunsReportOptions options{.by = args.by, .last = args.last};
  const auto groups = study::group_runs(runs, options);
  if (args.check && groups.size() < 2)
    throw UsageError(fmt::format("report: --check compares two groups or more; --by {} makes {}",
                                 args.by.empty() ? "<nothing>" : args.by, groups.size()));
  if (args.check)
    for (const study::RunGroup& group : groups) check_tells_noise(group);
  if (const std::string why = study::incomparable(groups); args.check && !why.empty())
    throw UsageError("report: --check: " + why + "; give runs that agree in that");
  fmt::print("{}", study::format_groups(groups));
  study::write_runs_report(args.out, groups, options);
  fmt::print("{}\n", args.out);
  return !args.check || study::agree(groups) ? 0 : 1;
}

}  // namespace

void add_report(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand("report", "Overlay the curves of several training runs on one page");
  auto args = std::make_shared<ReportArgs>();
  command->add_option("runs", args->runs, "Run folders")->required();
  command->add_option("--by", args->by,
                      "Group runs by this setting of run.json, such as lr (the precision: torch_dtype; of a "
                      "TNP: model.dtype); "
                      "those without it are one group; default: one group per run");
  command->add_option("--last", args->last, "Number of last steps to average for the final loss")
      ->check(kDecimal)
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40));
  command->add_option("--out", args->out, "HTML page to write");
  command->add_flag("--check", args->check,
                    "Exit with status 1 if the final losses of two groups differ beyond the noise (Welch's "
                    "t-test at 95 %, with Holm's correction for the number of pairs)");
  command->callback([&action, args] { action = [args] { return run_report(*args); }; });
}

}  // namespace tessera::cli
