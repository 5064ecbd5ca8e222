#include "train/job.h"

#include <algorithm>

#include "optim/whole_state.h"
#include "runtime/error.h"
#include "train/setting.h"

namespace tessera::train {

using nlohmann::json;

namespace {

/// Throws, naming the checkpoint `file` and the setting, unless the settings written in it are `ours`; only
/// the number of steps may differ.
void check_same_settings(const std::string& file, const std::string& stored, const json& ours) {
  json theirs = json::parse(stored, nullptr, false);
  check(theirs.is_object(), file, ": its \"job\" is not a JSON object");
  rename_settings(theirs, ours);
  for (const auto& [name, value] : ours.items())
    check(name == "steps" || theirs.value(name, json()) == value, file, ": it belongs to another job: \"",
          name, "\" is ", theirs.value(name, json()).dump(), " in it, ", value.dump(),
          " here; restore run.json, or start a new run");
  for (const auto& [name, value] : theirs.items())
    check(ours.contains(name), file, ": it belongs to another job: \"", name, "\" is ", value.dump(),
          " in it, and missing here; restore run.json, or start a new run");
}

}  // namespace

const OptimizerRef& Job::trained_by() const {
  check(trained_by_.has_value(), "job: no optimizer is set; call train_with(optimizer) in its constructor");
  return *trained_by_;
}

bool Job::may_be_missing(const std::string& name) {
  for (const char* field : {optim::Optimizer::kScaleField, optim::Optimizer::kScaleCountsField})
    if (name == std::string("optimizer.") + field) return true;
  return false;
}

std::string Job::former_name(std::string name) {
  const std::string present = ".lm_head.", former = ".head.";
  const size_t place = name.find(present);
  return place == name.npos ? name : name.replace(place, present.size(), former);
}

/// At once: an error of the first checkpoint would lose what was trained until then.
void Job::check_name(const std::string& name) const {
  check(name != "step" && name != "job", "job: keep(\"", name,
        "\", ...): checkpoints have an entry of that name already; take another one");
  for (const Kept& part : kept_)
    check(part.name != name, "job: keep(\"", name,
          "\", ...): something is kept under that name already; take another one",
          name == "optimizer" ? " (train_with() keeps the optimizer)" : "");
}

Job::Leaves Job::kept_leaves() const {
  Leaves all;
  for (const Kept& part : kept_)
    if (part.name != "optimizer" || !trained_by_->counted()) part.list(all);  // it may be sharded
  return all;
}

void Job::check_keeps_parameters() const {
  if (!trained_by_ || !trained_by_->counted()) return;
  const Leaves kept = kept_leaves();
  std::vector<std::string> missing;
  for (const auto& [name, tensor] : trained_by_->counted()->parameters()) {
    const auto is_same = [&](const Tensor& other) {
      return other.grad_state() == tensor.grad_state() || other.same_elements(tensor);
    };
    if (std::ranges::none_of(kept.tensors, is_same)) missing.push_back(name);
  }
  if (missing.empty()) return;
  fail_at(Site::here(), "job: the optimizer trains '", missing.front(), "'",
          missing.size() > 1 ? " and " + std::to_string(missing.size() - 1) + " other parameters" : "",
          ", which no checkpoint would have; call keep(\"model\", model) in the job's constructor");
}

void Job::check_keeps(const std::vector<Rng>& drawn) const {
  const Leaves kept = kept_leaves();
  for (const Rng& rng : drawn)
    check(std::ranges::find(kept.generators, rng) != kept.generators.end(),
          "job: loss() draws random numbers from a generator (seed ", rng.state().seed,
          ") that no checkpoint would have, so that a resumed run would draw others; call "
          "draws_from(\"rng\", rng) in the job's constructor");
}

void Job::check_seed(const std::string& name, const Rng& rng) const {
  for (const Rng& other : random_)
    check(other.state().seed != rng.state().seed, "job: draws_from(\"", name,
          "\", ...): another generator has the seed ", rng.state().seed,
          ", too, and both would draw the same numbers; give them different seeds");
}

io::Checkpoint Job::checkpoint(int64_t step) const {
  io::Checkpoint whole;
  for (const Kept& part : kept_) part.add(whole);
  return std::move(whole.add("step", step).add("job", settings_json().dump()));
}

int64_t Job::restore(const std::filesystem::path& file) {
  io::Checkpoint stored = io::Checkpoint::read(file.string());
  std::optional<optim::WholeState> whole;
  if (trained_by_ && trained_by_->counted()) whole.emplace(*trained_by_->counted());
  int64_t step = 0;
  std::string written = stored.get<std::string>("job");
  check_same_settings(file.string(), written, settings_json());
  for (const Kept& part : kept_) part.complete(stored);
  io::Checkpoint::Restoring restoring(stored);
  for (const Kept& part : kept_) part.compare(restoring);
  restoring.compare("step", step), restoring.compare("job", written);
  restoring.finish();
  for (const Kept& part : kept_) part.assign(restoring);
  restoring.assign("step", step);
  if (whole) whole->take();
  return step;
}

}  // namespace tessera::train
