#include "cli/train_run.h"

namespace tessera::cli {

void add_train(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand("train", "Train a bundled model; writes a run folder");
  command->require_subcommand(1);
  add_train_tnp(*command, action);
}

}  // namespace tessera::cli
