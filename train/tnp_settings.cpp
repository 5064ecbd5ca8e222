#include "train/tnp_settings.h"

#include "plan/plan.h"
#include "runtime/error.h"
#include "train/random_purpose.h"

namespace tessera::train {

namespace {

constexpr int64_t kWidest = 1 << 18;  // of the model's widths

}  // namespace

void TnpSettings::add_sizes(SettingList& list) {
  list.group("Data");
  list.add("context", context, "Context points per task").named("--m").range(int64_t{1}, kLargest);
  list.add("targets", targets, "Target points per task").named("--n").range(int64_t{1}, kLargest);
  list.add("batch", batch, "Tasks per micro-batch; a step has --accumulate micro-batches")
      .named("--batch-size")
      .range(int64_t{1}, kLargest);
  const auto size = [&](const char* key, int64_t& value, const char* help) -> Setting& {
    return list.add(std::string("model.") + key, value, help).range(int64_t{1}, kWidest);
  };
  size("features", model.features,
       "Features per input x; default: 10 for the prior linear, 1 for the Gaussian processes")
      .shown_as("");
  list.group("Model");
  size("d_model", model.d_model, "Hidden size");
  size("d_ff", model.d_ff, "Hidden size of the MLPs and heads");
  size("heads", model.heads, "Number of attention heads").named("--n-head");
  size("layers", model.layers, "Number of blocks");
  size("components", model.components, "Number of Gaussians in the mixture");
  size("embed_hidden", model.embed_hidden, "Hidden size of the embedder").named("--emb-hidden");
  list.add("model.pre_norm", model.pre_norm, "Pre-norm instead of post-norm");
  list.add("model.checkpoint_every", model.checkpoint_every,
           "Activation checkpointing: number of blocks per recomputed group; 0: off")
      .named("--checkpoint-interval")
      .range(int64_t{0}, int64_t{1} << 20);
  list.add_hidden("model.dtype", model.dtype);
}

SettingList TnpSettings::list() {
  SettingList list;
  add_sizes(list);
  list.group("Data");
  list.add("prior", prior, "Prior that tasks are drawn from")
      .one_of({"linear", "rbf", "matern52", "periodic"});
  list.add_hidden("task_stream", task_stream).absent_means(1);
  add_to(list);
  add_ranks(list).absent_means(1);  // newer than runs that can still be read
  return list;
}

plan::Memory TnpSettings::planned(Device device) const {
  return with_states(plan::count_memory(model, batch, context, targets, split), plan::hidden_matrices(model),
                     model.dtype, device);
}

void TnpSettings::validate() const {
  model.validate();
  check_values(TnpSettings(*this).list(), "tnp");
  check_training("tnp", model.dtype);
  check(optimizer != "loro",
        "tnp: the optimizer is loro, which updates weights made of two factors alone, and a TNP has none; "
        "give another --optimizer");
  check(prior == "linear" || model.features == 1, "tnp: the prior ", prior,
        " is one-dimensional; features is ", model.features, ", expected 1");
  check(task_stream >= 1 && task_stream <= datasets::kTaskStream, "tnp: \"task_stream\" is ", task_stream,
        "; this build knows 1 to ", datasets::kTaskStream);
  make_prior(*this);
}

void TnpSettings::check_split() const {
  for (const auto& [name, points] : {Size("context points (--m)", context), Size("targets (--n)", targets)})
    check(points >= split.ranks, "tnp: ", split.ranks, " ranks cannot share ", points, " ", name,
          "; expected at least one for each rank");
  check(split.by == nn::AttentionSplit::By::rows || model.heads % split.ranks == 0, "tnp: ", split.ranks,
        " ranks do not divide ", model.heads,
        " attention heads (--n-head), as --context-split heads needs; --context-split rows takes any number");
}

void check_task_stream(const TnpSettings& settings) {
  check(settings.task_stream == datasets::kTaskStream, "the run draws its tasks with version ",
        settings.task_stream, " of the priors, this build with version ", datasets::kTaskStream,
        ": it cannot continue with the same tasks. Finish it with the build that started it, or start a new "
        "run; `tessera eval tnp` and `tessera report` still read it");
}

int64_t default_features(const std::string& prior) {
  return prior == "linear" ? models::TnpConfig{}.features : 1;
}

namespace {

datasets::Prior prior_of(const TnpSettings& settings, int64_t batch, uint64_t seed, Device device) {
  return datasets::Prior({.kind = datasets::parse_prior(settings.prior),
                          .batch = batch,
                          .context = settings.context,
                          .targets = settings.targets,
                          .features = settings.model.features,
                          .seed = seed},
                         device);
}

}  // namespace

datasets::Prior make_prior(const TnpSettings& settings, Device device) {
  return prior_of(settings, settings.batch, settings.seed, device);
}

datasets::Prior fresh_tasks(const TnpSettings& settings, int64_t batch, Device device) {
  return prior_of(settings, batch, seed_for(RandomPurpose::evaluation, settings.seed), device);
}

}  // namespace tessera::train
