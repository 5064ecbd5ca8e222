#include "cli/bert_flags.h"

#include "cli/commands.h"
#include "runtime/error.h"

namespace tessera::cli {
namespace {

/// The sizes of an encoder that begins from nothing.
void check_sizes(const std::string& command, const train::GlueStart& start, const train::Given& given) {
  for (const char* only : {"--size", "--layers", "--d-model", "--n-head", "--d-ff", "--vocab-size"})
    if (!start.settings.model.empty() && given.contains(only))
      throw UsageError(command + ": " + only + " is for --scratch; a --model has its own sizes");
  try {
    if (start.settings.model.empty()) start.scratch_config(given).validate();
  } catch (const Error& error) {
    throw UsageError(command + ": " + error.what());
  }
}

/// Of training and of weights made of factors, as far as the flags alone tell.
void check_training(const train::GlueStart& start, const train::Given& given) {
  train::GlueSettings settings = start.settings;
  if (!given.contains("--steps")) settings.steps = train::GlueSettings::kLargest;
  settings.check_training("training", start.precision.value_or(Precision()).dtype);
  start.settings.factors.check_given(given);
  start.settings.check_optimizer_flags(given);
  train::check_optimizer_form(start.settings.optimizer, start.settings.factors);
  start.settings.factors.validate(!start.settings.model.empty());
}

}  // namespace

void check_fine_tuning(const std::string& command, const train::GlueStart& start, const train::Given& given) {
  try {
    datasets::parse_glue_task(start.settings.task);
    start.settings.slice.check_given(given);
    start.settings.slice.validate();
    check_training(start, given);
    start.settings.drop.check_given(given);
    start.settings.drop.validate();
    start.settings.check_together();
    check(!given.contains("--steps") || start.settings.warmup <= start.settings.steps, "--warmup is ",
          start.settings.warmup, " of ", start.settings.steps, " steps; warm up within them");
  } catch (const Error& error) {
    throw UsageError(command + ": " + error.what());
  }
  check_sizes(command, start, given);
}

void check_pretraining(const std::string& command, const train::GlueStart& start, const train::Given& given) {
  const std::string own = command + " --task mlm: ";
  const auto refuse = [&](const char* flag, const char* why) {
    if (given.contains(flag)) throw UsageError(own + flag + ": " + why);
  };
  for (const char* of_slice : {"--slice", "--rows", "--variance", "--estimate-every", "--slice-threshold",
                               "--weight-grad", "--slice-layers", "--probe-gradient"})
    refuse(of_slice, "backward passes are sliced in fine-tuning only");
  for (const char* of_drops : {"--dropbp", "--dropbp-rates"})
    refuse(of_drops, "branches are dropped in fine-tuning only");
  if (start.settings.factors.form == "cola")
    refuse(
        "--form",
        "nothing loads an encoder whose factors have an activation between them; take low_rank, sltrain or "
        "lost");
  refuse("--train", "pretraining trains every parameter");
  check_sizes(command, start, given);
  try {
    check_training(start, given);
  } catch (const Error& error) {
    throw UsageError(own + error.what());
  }
}

}  // namespace tessera::cli
