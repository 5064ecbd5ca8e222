#include "cli/train_run.h"

namespace tessera::cli {

void add_train(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand("train", "Train a bundled model; writes a run folder");
  command->require_subcommand(1);
  add_train_tnp(*command, action);
  add_train_language(*command, action, false);
  add_train_language(*command, action, true);
  add_train_bert(*command, action);
}

}  // namespace tessera::cli
