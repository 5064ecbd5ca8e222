#include <fmt/format.h>

#include <filesystem>
#include <memory>

#include "cli/commands.h"
#include "cli/study_file.h"
#include "cli/train_run.h"
#include "runtime/error.h"
#include "runtime/interrupt.h"
#include "study/report.h"
#include "study/run.h"

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;

struct StudyArgs {
  std::string file, out, gpus;
  bool list = false;
  study::Request request;
};

constexpr const char* kStoppingStudy =
    "\ntessera: stopping; the running cell finishes its step and is saved first (another Ctrl-C ends at "
    "once, "
    "without saving)\n";

/// This program, also when it was found by PATH or moved since.
std::string own_program() {
  std::error_code code;
  const fs::path path = fs::read_symlink("/proc/self/exe", code);
  check(!code, "study: /proc/self/exe: ", code.message(), "; a study starts this program for each cell");
  return path.string();
}

std::string command_of(const study::Plan& plan, const study::Cell& cell, const fs::path& cells) {
  std::error_code ignored;
  std::string line = "tessera";
  for (const std::string& word :
       study::arguments_of(plan, cell, cells, fs::exists(cells / cell.name / "run.json", ignored)))
    line += " " + quoted(word);
  return line;
}

/// Throws, naming file, arm and flag, if an input of a cell that has not begun is missing: each would fail by
/// itself.
void check_inputs(const std::string& file, const study::Plan& plan, const fs::path& cells) {
  std::error_code ignored;
  for (const study::Cell& cell : study::cells_of(plan)) {
    if (fs::exists(cells / cell.name / "run.json", ignored)) continue;
    for (const char* const flag : {"--text", "--tokenizer", "--data", "--model", "--config"})
      if (const auto given = cell.flags.find(flag); given != cell.flags.end())
        for (const std::string& path : given->second)
          check(fs::exists(path, ignored), file, ": arm \"", cell.arm, "\": ", flag, " ", path,
                ": there is no such file or folder");
  }
}

int list_study(const study::Plan& plan, const fs::path& out) {
  const bool begun = fs::exists(out / "study.json");
  const auto folder = begun ? std::optional(study::Folder::open(out)) : std::optional<study::Folder>();
  for (const study::Cell& cell : study::cells_of(plan))
    fmt::print("{:<12} {}\n",
               study::name_of(folder ? folder->record_of(cell).status : study::CellStatus::pending),
               command_of(plan, cell, out / "cells"));
  return 0;
}

/// Writes the results and says where; nothing if no cell has one.
void print_results(const study::Folder& folder) {
  const study::Results results = study::collect(folder);
  const fs::path page = study::write_report(folder.path(), results);
  fmt::print("{}\nreport: {}\n", study::format_comparisons(results),
             fs::absolute(page).lexically_normal().string());
}

int run_study_file(const StudyArgs& args) {
  const std::vector<std::string> gpus =
      args.gpus.empty() ? std::vector<std::string>() : split_list(args.gpus, "--gpus");
  const study::Plan plan = read_study(args.file);
  const fs::path out = args.out.empty() ? fs::path("runs") / fs::path(args.file).stem() : fs::path(args.out);
  if (args.list) return list_study(plan, out);
  check_inputs(args.file, plan, out / "cells");
  const InterruptGuard interrupts(kStoppingStudy);
  study::Folder folder = study::Folder::begin(out, plan);
  fmt::print(
      "study \"{}\": {} arms, {} tasks, {} learning rates, {} seeds: {} cells of tessera train {}, in {}\n",
      plan.title, plan.arms.size(), std::max<size_t>(1, plan.tasks.size()),
      std::max<size_t>(1, plan.rates.size()), plan.seeds.size(), study::cells_of(plan).size(), plan.command,
      out.string());
  std::fflush(stdout);
  study::Request request = args.request;
  request.program = own_program();
  request.gpus = gpus;
  request.say = [](const std::string& text) {
    fmt::print("{}", text);
    std::fflush(stdout);
  };
  const study::End end = study::run_cells(folder, request);
  print_results(folder);
  if (!end.refused.empty()) throw UsageError(args.file + ": " + end.refused);
  const std::string again = fmt::format("tessera study run {}{}", quoted(args.file),
                                        args.out.empty() ? "" : " --out " + quoted(args.out));
  if (end.signal != 0 || end.out_of_time)
    fmt::print("{} after {} of {} cells. To continue:\n  {}\n",
               end.signal != 0 ? "interrupted" : fmt::format("stopped by --minutes {:g}", request.minutes),
               end.finished, end.cells, again);
  if (end.signal != 0) return 128 + end.signal;
  check(end.failed == 0, "study: ", end.failed, " of ", end.cells, " runs failed, first ", end.failure,
        "; logs in ", (out / "logs").string(), "; the same command tries them again");
  return 0;
}

}  // namespace

void add_study(CLI::App& app, Action& action) {
  auto* study = app.add_subcommand("study", "Compare settings of a training run over tasks and seeds");
  study->require_subcommand(1);
  auto args = std::make_shared<StudyArgs>();

  auto* run = study->add_subcommand("run", "Run the unfinished cells of a study (docs/studies.md)");
  run->add_option("file", args->file, "TOML file: command, seeds, [flags], [[arm]], [[task]]")->required();
  run->add_option("--out", args->out, "Directory of the study; default: runs/<name of the file>");
  run->add_option("--minutes", args->request.minutes,
                  "Time limit in minutes, after which running cells stop after a step; 0: no limit")
      ->check(kFinite)
      ->check(between(0.0, 1e6));
  run->add_option("--jobs", args->request.jobs,
                  "Number of cells to run at the same time; step times then come from separate runs")
      ->check(whole(1, 1024));
  run->add_option(
      "--gpus", args->gpus,
      "GPUs for the cells in turn, as CUDA_VISIBLE_DEVICES names them, such as 0,1; each cell sees one");
  run->add_option("--timing-steps", args->request.timing_steps,
                  "Number of steps of a separate run for step times")
      ->check(whole(10, 1'000'000));
  run->add_flag("--list", args->list, "Print the cells with their state and command; run nothing");
  run->footer("Example: tessera study run studies/demo.toml --minutes 5");
  run->callback([&action, args] { action = [args] { return run_study_file(*args); }; });

  auto* page = study->add_subcommand("page", "Rewrite the tables and the page of a study from its cells");
  page->add_option("folder", args->out, "Directory of a study")->required();
  page->footer("Example: tessera study page runs/demo");
  page->callback([&action, args] {
    action = [args] {
      print_results(study::Folder::open(args->out));
      return 0;
    };
  });
}

}  // namespace tessera::cli
