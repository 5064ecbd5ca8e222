#include "cli/tnp_flags.h"

#include <limits>
#include <nlohmann/json.hpp>

#include "runtime/error.h"

namespace tessera::cli {

void TnpFlags::add_to(CLI::App& command, bool training) {
  const CLI::Validator size = whole(1, train::TnpSettings::kLargest);
  models::TnpConfig& model = job_.model;
  command.add_option("--m", job_.context, "Context points a task")->check(size)->group("Data");
  command.add_option("--n", job_.targets, "Target points a task")->check(size)->group("Data");
  command.add_option("--batch-size", job_.batch, "Tasks a step")->check(size)->group("Data");
  features_ =
      command.add_option("--features", model.features, "Features of an input x")->check(size)->group("Data");
  command.add_option("--d-model", model.d_model, "Width")->check(size)->group("Model");
  command.add_option("--d-ff", model.d_ff, "Hidden width of the MLPs and heads")->check(size)->group("Model");
  command.add_option("--n-head", model.heads, "Attention heads")->check(size)->group("Model");
  command.add_option("--layers", model.layers, "Blocks")->check(size)->group("Model");
  command.add_option("--components", model.components, "Gaussians of the mixture")
      ->check(size)
      ->group("Model");
  command.add_option("--emb-hidden", model.embed_hidden, "Hidden width of the embedder")
      ->check(size)
      ->group("Model");
  command.add_flag("--pre-norm", model.pre_norm, "Norms inside the residual branches")->group("Model");
  command
      .add_option("--checkpoint-interval", model.checkpoint_every,
                  "Activation checkpointing: recompute groups of that many blocks; 0: keep all")
      ->check(kDecimal)
      ->check(CLI::Range(0, 1 << 20))
      ->group("Model");
  precision.add_to(command);
  if (!training) return;
  features_->description("Features of an input x; default: 10 for linear, 1 for the Gaussian processes");
  features_->default_str("");
  const CLI::Validator positive = between(1e-30, 1e30);
  command.add_option("--prior", job_.prior, "Where tasks come from")
      ->check(CLI::IsMember({"linear", "rbf", "matern52", "periodic"}))
      ->group("Data");
  command.add_option("--seed", job_.seed, "Of parameters and data")
      ->check(kDecimal)
      ->check(CLI::Range(int64_t(0), std::numeric_limits<int64_t>::max()))
      ->group("Data");
  command.add_option("--steps", job_.steps, "Training steps")->check(size)->group("Training");
  command.add_option("--lr", job_.lr, "Peak learning rate")
      ->check(kFinite)
      ->check(positive)
      ->group("Training");
  command.add_option("--warmup", job_.warmup, "Steps of linear warm-up, at most half of all")
      ->check(kDecimal)
      ->check(CLI::Range(int64_t(0), train::TnpSettings::kLargest))
      ->group("Training");
  command.add_option("--schedule", job_.schedule, "Learning rate after warm-up")
      ->check(CLI::IsMember({"constant", "linear", "cosine", "wsd"}))
      ->group("Training");
  command.add_option("--weight-decay", job_.weight_decay, "Decoupled, on matrices only")
      ->check(kFinite)
      ->check(between(0.0, 1e6))
      ->group("Training");
  command.add_option("--clip-norm", job_.clip_norm, "Largest gradient norm; 0: no clipping")
      ->check(kFinite)
      ->check(between(0.0, 1e30))
      ->group("Training");
}

train::TnpSettings TnpFlags::job() const {
  train::TnpSettings job = job_;
  if (features_->count() == 0) job.model.features = train::default_features(job.prior);
  try {
    job.validate();
  } catch (const Error& error) {
    throw UsageError(error.what());
  }
  return job;
}

train::TnpSettings read_job(const std::string& path, const nlohmann::json& settings) {
  check(settings.contains("job"), path, ": it has no \"job\"; not a run of `train tnp`");
  try {
    return train::tnp_settings_from_json(settings["job"]);
  } catch (const Error& error) {
    fail_at(Site::here(), path, ": ", error.what());
  }
}

}  // namespace tessera::cli
