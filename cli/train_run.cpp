#include "cli/train_run.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "comm/status.h"
#include "report/facts.h"
#include "report/progress.h"
#include "runtime/interrupt.h"

namespace tessera::cli {

namespace fs = std::filesystem;

namespace {

/// All words of the command but the program's name.
std::string arguments_of_process() {
  std::ifstream file("/proc/self/cmdline");
  std::string text((std::istreambuf_iterator<char>(file)), {});
  text.erase(0, std::min(text.find('\0') + 1, text.size()));
  std::ranges::replace(text, '\0', ' ');
  return text;
}

}  // namespace

// ---- flags ----

train::SettingList RunFlags::list(const std::string& default_name) {
  train::SettingList list(train::Kept::never);
  list.group("Run");
  list.add("runs", runs, "Directory for run folders and runs.sqlite");
  list.add("name", name, "Name of the run folder; a taken one gets -2, -3, ...; default: " + default_name);
  list.add("resume", resume, "Run folder to resume from its newest complete checkpoint");
  list.add("json", json, "Write settings, timings and throughput of the run to this file")
      .formerly("--json-out");
  list.add("quiet", quiet, "Hide the progress line");
  return list;
}

void RunFlags::add_to(CLI::App& command, const std::string& default_name) {
  command.add_option("--config", config,
                     "TOML file with any of these flags; the command line takes precedence");
  add_device(command, device)->group("Run");
  add_flags(command, options.list());
  add_flags(command, list(default_name));
}

Device device_of(const std::string& device, const dist::Place& place) {
  if (place.size == 1) return device.empty() ? Device::best() : Device::parse(device);
  if (device.starts_with("cuda:"))
    throw UsageError("--device " + device +
                     ": each rank has a GPU of its own; give --device cuda, or leave it out");
  if (device == "cuda") Device::parse(device);  // or throws
  return device == "cpu" ? Device::cpu() : dist::device_at(place);
}

dist::World join_job(const std::string& device) {
  device_of(device,
            dist::own_place());  // what is wrong on all ranks, all of them say, none waiting for another
  const dist::World world = dist::World::join(fmt::format("{} {}", report::kRevision, arguments_of_process()),
                                              [](const std::string& message) {
                                                comm::Status& status = comm::own_status();
                                                comm::copy_text(status.error, sizeof(status.error), message);
                                                report::tell("tessera: " + message + "\n");
                                                ::_exit(1);  // a hanging kernel would hold up any other end
                                              });
  if (world.size() > 1) world.check_own_gpu(device_of(device, world.place()));  // before it is filled
  return world;
}

void check_run_flags(const RunFlags& flags, const CLI::App& command) {
  if (flags.name.find('/') != std::string::npos || flags.name == "." || flags.name == "..")
    throw UsageError("--name: \"" + flags.name + "\": expected a plain name; --runs says where");
  for (const char* other : {"--name", "--runs", "--demo", "--find-max-batch"})
    if (const CLI::Option* option = command.get_option_no_throw(other);
        !flags.resume.empty() && option && option->count() > 0)
      throw UsageError(std::string("--resume continues a run where it is; ") + other + " cannot go with it");
  if (!flags.resume.empty() && command.get_option("--loss-scale")->count() > 0)
    throw UsageError(
        "--resume continues with the loss scale that the run has reached; --loss-scale cannot change it");
  check_not_input(flags.json, values_given(command, {"--config", "--resume", "--text", "--data",
                                                     "--tokenizer", "--model"}));
}

// ---- the run ----

const char* const kStoppingEarly = "\ntessera: stopping; no step has run yet\n";
const char* const kStopping =
    "\ntessera: stopping; the current step is finished and saved first (another Ctrl-C ends at once, without "
    "saving)\n";

std::string quoted(const std::string& text) {
  const bool plain = std::all_of(text.begin(), text.end(), [](unsigned char c) {
    return std::isalnum(c) || std::string_view("/._-+:,@%").find(char(c)) != std::string_view::npos;
  });
  if (plain && !text.empty()) return text;
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

std::string resume_command(const std::string& model, const fs::path& folder, const RunFlags& flags) {
  const char* const launched = std::getenv(kLaunchedVariable);
  std::string command = launched ? launched : "tessera ";
  command += "train " + model + " --resume " + quoted(folder.string());
  if (!flags.device.empty()) command += " --device " + flags.device;
  return command;
}

train::RunRequest request_of(const RunFlags& flags, const CLI::App& command, Device device) {
  return {.device = device,
          .runs = flags.runs,
          .name = flags.name,
          .resume = flags.resume,
          .summary = flags.json,
          .quiet = flags.quiet,
          .options = flags.options,
          .given = given_flags(command),
          .check =
              [&command](train::Recipe& recipe, const train::SettingList& options) {
                if (recipe.dtype() != DType::f16)
                  for (const char* flag : {"--loss-scale", "--loss-scale-interval"})
                    if (command.get_option(flag)->count() > 0)
                      throw UsageError(fmt::format(
                          "{} is for --precision f16; the run is in {}, which needs no loss scale", flag,
                          name_of(recipe.dtype())));
                check_kept_texts(options);
              },
          .before_steps = [] { InterruptGuard::set_notice(kStopping); },
          .say =
              [](const std::string& text) {
                fmt::print("{}", text);
                std::fflush(stdout);  // a pipe's reader sees it before the first step
              }};
}

void print_end(train::Recipe& recipe, const train::RunEnd& end, const std::string& resume) {
  const train::TrainResult& result = end.result;
  if (result.outcome == train::Outcome::interrupted) {
    fmt::print("interrupted after step {}; saved. To continue:\n  {}\n", result.step, resume);
    return;
  }
  fmt::print("trained {} steps in {:.1f} s: loss {:.4f}, {} tokens/s, {:.2f} ms/step\n",
             result.step - end.first_step, result.seconds, result.loss,
             report::format_count(result.tokens_per_s), result.ms_per_step);
  if (result.skipped > 0 || result.loss_scale > 0)
    fmt::print("skipped {} steps whose gradients were not finite{}\n", result.skipped,
               result.loss_scale > 0 ? fmt::format("; loss scale {} at the end", result.loss_scale) : "");
  const optim::Optimizer* const optimizer = recipe.job().trained_by().counted();
  fmt::print("{}{}report: {}\n", optimizer ? optimizer->report() : "", recipe.conclusion(end.folder, result),
             fs::absolute(end.folder.path() / "report.html").lexically_normal().string());
}

int run_train(train::Recipe& recipe, const RunFlags& flags, const CLI::App& command,
              const train::SettingList& settings) {
  check_run_flags(flags, command);
  const InterruptGuard interrupts(kStoppingEarly);
  // A resumed run is the one that its folder describes; flags that would change the curve are refused.
  if (!flags.resume.empty()) refuse_settings(command, "--resume continues a run as it was", {}, settings);
  const dist::World world = join_job(flags.device);
  train::RunRequest request = request_of(flags, command, device_of(flags.device, world.place()));
  request.world = &world;
  request.check = [check = request.check, &flags](train::Recipe& model, const train::SettingList& options) {
    check(model, options);
    if (!flags.json.empty()) check_replaceable(flags.json);
  };
  const train::RunEnd end = train::run_recipe(recipe, request);
  if (world.leads()) print_end(recipe, end, resume_command(recipe.name(), end.folder.path(), flags));
  if (end.result.outcome == train::Outcome::interrupted) return 128 + end.result.signal;
  ignore_signals();
  return 0;
}

}  // namespace tessera::cli
