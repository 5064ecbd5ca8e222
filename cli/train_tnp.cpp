#include "cli/tnp_flags.h"
#include "cli/train_run.h"
#include "train/tnp_run.h"

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

class TnpCommand : public train::TnpRecipe {
 public:
  TnpFlags flags;
  bool demo = false;

  void begin(const train::Given& given, Device device) override {
    try {
      check_given(given);
    } catch (const Error& error) {
      throw UsageError(error.what());
    }
    if (demo && find_max_batch)
      throw UsageError("--demo has its own batch; --find-max-batch cannot change it");
    if (demo) {
      refuse_settings(*command, "--demo has its own settings", {"--seed"});
      apply_demo(settings_);
      settings_.seed = flags.settings().seed;
      settings_.set_precision(flags.precision.on(device));
    } else {
      settings_ = flags.job(device);
    }
  }
  const train::TnpSettings& given_settings() const override { return flags.given_settings(); }
  const CLI::App* command = nullptr;
};

}  // namespace

void add_train_tnp(CLI::App& train, Action& action) {
  auto* tnp = train.add_subcommand("tnp", "Train a Transformer Neural Process on a synthetic prior");
  auto model = std::make_shared<TnpCommand>();
  model->command = tnp;
  auto run = std::make_shared<RunFlags>();
  model->flags.add_to(*tnp, true);
  run->add_to(*tnp, "tnp-<prior>-<time>");
  add_flags(*tnp, model->options());
  tnp->add_flag("--find-max-batch", model->find_max_batch,
                "Use the largest batch size that fits, found by doubling and bisection")
      ->group("Run");
  tnp->add_flag("--demo", model->demo, "Train a small model, within a minute on two cores")->group("Run");
  tnp->callback([&action, model, run, tnp] {
    action = [model, run, tnp] {
      apply_config(*tnp, run->config);
      return run_train(*model, *run, *tnp, model->flags.settings().list());
    };
  });
}

}  // namespace tessera::cli
