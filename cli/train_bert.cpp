#include <fmt/format.h>

#include <filesystem>

#include "cli/bert_flags.h"
#include "cli/language_folder.h"
#include "cli/train_run.h"
#include "runtime/error.h"
#include "runtime/interrupt.h"
#include "train/glue_run.h"
#include "train/mlm_run.h"

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;

struct BertFlags {
  train::GlueStart start;
  train::GlueOptions options;
  train::MlmStart mlm;
  train::MlmOptions mlm_options;
  PrecisionFlag precision;

  void add_to(CLI::App& command) {
    add_flags(command, start.list());
    add_flags(command, options.list());
    add_flags(command, mlm.list());
    add_any_bytes(command, mlm.text.any_bytes)->group("Data");
    add_flags(command, mlm_options.list());
    precision.add_to(command);
    command.get_option("--steps")->excludes("--epochs");
  }
};

void check_usage(const train::GlueStart& start, const train::Given& given) {
  for (const char* only : {"--text", "--tokenizer", "--validation", "--piece", "--any-bytes", "--mask"})
    if (given.contains(only))
      throw UsageError(std::string("train bert: ") + only + " is only for --task mlm");
  for (const char* needed : {"--task", "--data"})
    if (!given.contains(needed)) throw UsageError(std::string("train bert: ") + needed + " is required");
  if (start.settings.model.empty() != start.scratch)
    throw UsageError(start.scratch
                         ? "train bert: --model loads weights and --scratch initialises them; give one"
                         : "train bert: --model FOLDER is required, or --scratch");
  if (start.pad && start.packed) throw UsageError("train bert: --pad and --packed contradict each other");
  check_fine_tuning("train bert", start, given);
  check_kept_text("--data", fs::absolute(start.settings.data));
  if (!start.scratch) check_kept_text("--model", fs::absolute(start.settings.model));
}

void check_mlm_usage(const BertFlags& flags, const train::Given& given) {
  const auto refuse = [&](const char* flag, const std::string& why) {
    if (given.contains(flag)) throw UsageError(std::string("train bert --task mlm: ") + flag + ": " + why);
  };
  if (flags.mlm.text.files.empty() && flags.start.settings.data.empty())
    throw UsageError("train bert --task mlm: there is no training data; give --text FILE... or --data DIR");
  for (const char* of_text :
       {"--text", "--tokenizer", "--vocab-size", "--validation", "--piece", "--any-bytes"})
    if (!flags.start.settings.data.empty()) refuse(of_text, "--data is tokenized and split already");
  for (const char* of_task : {"--pad", "--packed"})
    refuse(of_task, "there are no labelled texts; sequences are of equal length");
  refuse("--missing-grad", "in pretraining every parameter gets a gradient");
  if (given.contains("--tokenizer")) refuse("--vocab-size", "the --tokenizer has its own vocabulary");
  if (flags.start.seeds != 1)
    refuse("--seeds", "pretraining is one run, with --seed; `tessera study` runs several");
  if (!flags.start.settings.model.empty()) refuse("--scratch", "--model loads weights; give one of them");
  check_pretraining("train bert", flags.start, given);
  for (const std::string& folder : {flags.start.settings.data, flags.start.settings.model})
    if (!folder.empty()) check_kept_text("--data or --model", fs::absolute(folder));
}

/// After the usage is checked: a folder that is missing is a later error than flags that do not fit.
void find_model(train::GlueStart& start) {
  if (!start.settings.model.empty()) start.settings.model = language_folder(start.settings.model);
}

/// Of a new run and of one that goes on.
void refuse_flag(const char* flag, const train::Given& given, const std::string& why) {
  if (given.contains(flag)) throw UsageError(std::string("train bert: ") + flag + why);
}

int run_mlm(BertFlags& flags, const RunFlags& run, const CLI::App& command) {
  refuse_flag("--predict", given_flags(command),
              " is for GLUE tasks; with --task mlm there are no labelled texts");
  if (run.resume.empty()) {
    check_mlm_usage(flags, given_flags(command));
    find_model(flags.start);
  }
  train::MlmRecipe recipe(flags.start, flags.mlm, flags.mlm_options);
  recipe.on_invalid = tell_invalid;
  recipe.eval_every = run.options.eval_every;
  return run_train(recipe, run, command, flags.start.settings.list());
}

int run_seeds(train::GlueGroup& group, const RunFlags& flags, const train::RunRequest& request) {
  const std::string resume = resume_command("bert", group.folder().path(), flags);
  const bool leads = request.world->leads();
  if (leads) fmt::print("{}", group.header());
  train::SeedGroup seeds = group.seeds();
  seeds.ended = [&](train::Recipe& recipe, const train::RunEnd& end) { print_end(recipe, end, resume); };
  const train::SeedsEnd end = train::run_seeds(seeds, request);
  if (end.signal != 0) {
    if (!end.in_run && leads)  // between two steps of a run that began
      fmt::print("interrupted; the progress is saved. To continue:\n  {}\n", resume);
    return 128 + end.signal;
  }
  if (leads) {
    const fs::path page = group.write_results(end, request.device, flags.json);
    fmt::print("\n{}report: {}\n", train::format_seeds(end.results),
               fs::absolute(page).lexically_normal().string());
  }
  ignore_signals();
  return end.results.diverged.empty() ? 0 : 1;
}

int run_glue(BertFlags& flags, const RunFlags& run, const CLI::App& command) {
  refuse_flag("--eval-tokens", given_flags(command), " is only for --task mlm");
  if (run.resume.empty()) {
    check_usage(flags.start, given_flags(command));
    find_model(flags.start);
  }
  if (!run.json.empty()) check_replaceable(run.json);
  const dist::World world = join_job(run.device);
  train::RunRequest request = request_of(run, command, device_of(run.device, world.place()));
  request.world = &world;
  return world.told([&] {
    train::GlueGroup group = train::GlueGroup::open(flags.start, flags.options, request);
    group.say = request.say;
    try {
      return run_seeds(group, run, request);
    } catch (...) {  // a new folder that holds no run goes with the error that kept the first from beginning
      group.discard_folder();
      throw;
    }
  });
}

int run_bert(BertFlags flags, const RunFlags& run, const CLI::App& command) {
  check_run_flags(run, command);
  const InterruptGuard interrupts(kStoppingEarly);
  const bool resumed = !run.resume.empty();
  flags.start.precision = flags.precision.given();
  if (resumed)
    refuse_settings(command, "--resume continues a run as it was", {}, flags.start.settings.list());
  if (resumed ? train::is_mlm_run(train::RunFolder::open(run.resume).settings())
              : flags.start.settings.task == "mlm")
    return run_mlm(flags, run, command);
  return run_glue(flags, run, command);
}

}  // namespace

void add_train_bert(CLI::App& train, Action& action) {
  auto* bert = train.add_subcommand(
      "bert", "Fine-tune BERT or RoBERTa on a GLUE task over several seeds, or pretrain one on text");
  auto flags = std::make_shared<BertFlags>();
  auto run = std::make_shared<RunFlags>();
  flags->add_to(*bert);
  run->add_to(*bert, "bert-<task>-<time>");
  bert->get_option("--eval-every")
      ->description("Steps between evaluations; 0: only at the end; default: an epoch, with --task mlm 0")
      ->default_str("");
  bert->callback([&action, flags, run, bert] {
    action = [flags, run, bert] {
      apply_config(*bert, run->config);
      return run_bert(*flags, *run, *bert);
    };
  });
}

}  // namespace tessera::cli
