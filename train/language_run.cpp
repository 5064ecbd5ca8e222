#include "train/language_run.h"

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "io/checkpoint_folder.h"
#include "io/checksum.h"
#include "runtime/error.h"
#include "train/language_export.h"
#include "train/language_pace.h"
#include "train/language_report.h"
#include "train/tokenizer_files.h"

namespace tessera::train {

namespace fs = std::filesystem;

namespace {

/// More would take the n-gram's tables beyond 2 GB.
constexpr uint64_t kMostCounted = uint64_t{1} << 23;

}  // namespace

// ---- settings and data ----

void LanguageRecipe::resume(const std::string& path, const nlohmann::json& run, const Given& given) {
  settings_ = settings_of_run<LanguageSettings>(path, run, name());
  check(settings_.is_llama() == llama_, path, ": a run of `train ", settings_.family(), "`, not of `train ",
        name(), "`");
  take_steps(settings_, given_settings(), given);
  had_evaluation_ = run.contains("evaluation");
  note_evaluation(given);
}

void LanguageRecipe::set_ranks(int ranks, const Given& given, bool resumed) {
  ranks_ = ranks;
  settings_.set_ranks(ranks, given, resumed);
  settings_.check_on_ranks(ranks);
}

void LanguageRecipe::note_evaluation(const Given& given) {
  for (const auto& [flag, value] : {std::pair("--eval-every", eval_every),
                                    {"--eval-stride", watch.eval_stride},
                                    {"--ngram", watch.ngram}})
    if (wants_evaluation_.empty() && given.contains(flag) && value > 0) wants_evaluation_ = flag;
}

void LanguageRecipe::prepare(const RunFolder& run, Device device, bool resumed) {
  const std::string own = (run.path() / "data").string();
  const bool restart = !resumed || !run.has_checkpoints();
  resumed ? check_not_over(run) : make_data(own);
  open_data(own);
  const std::string& fingerprint = data_->tokenizer().fingerprint();
  if (!resumed) settings_.fingerprint = fingerprint;
  check(settings_.fingerprint == fingerprint, "train: the tokenizer in ", own, " has the fingerprint ",
        fingerprint, "; the run's had ", settings_.fingerprint);
  if (resumed) check_same_data(run.settings(), *data_, settings_.data.empty() ? own : settings_.data);
  if (watch.sample_tokens > 0) sample_prompt(*data_, watch);  // complains now, not at the first sample
  check_held_out(run);
  if (held_out_.targets > 0 && watch.ngram > 0)
    baseline_ = ngram_baseline(*data_, int(watch.ngram), held_out_, kMostCounted);
  if (!resumed) {
    set_steps(device);
    // Read more than once, a text is better cut elsewhere each time.
    if (settings_.stride == 0) settings_.stride = read_epochs() > 1 ? 1 : settings_.length;
    open_data(own);
  }
  FactorStart start{.restored = !restart};
  if (restart && settings_.factors.needs_gradient()) start.gradients = first_gradients(device);
  job_.emplace(settings_, device, restart ? settings_.start : std::string(), std::move(start));
  job_->set_data(*data_, watch, held_out_, baseline_);
}

/// Of the dense model on the first micro-batch.
std::map<std::string, Tensor> LanguageRecipe::first_gradients(Device device) {
  LanguageSettings dense = settings_;
  dense.factors = {}, dense.sparse24 = {}, dense.optimizer = "sgd", dense.ema = 0;
  dense.sharding = {};  // with --zero 2 buckets share memory, so that not all gradients are there at once
  LanguageJob job(dense, device, settings_.start);
  job.set_data(*data_, watch, held_out_, baseline_);
  return job.weight_gradients();
}

void LanguageRecipe::check_not_over(const RunFolder& run) const {
  const int64_t since = best_evaluation(run).since;
  if (watch.patience == 0 || since < watch.patience) return;
  std::error_code ignored;
  check(!fs::exists(run.path() / "report.html", ignored), "train: the run in ", run.path().string(),
        " has ended after step ", run.metrics().back().step, ", ", since,
        " evaluations after its lowest held-out loss; give a larger --patience to continue");
}

/// The model of the lowest held-out loss is exported from its checkpoint, which a run without --export best
/// has not kept.
void LanguageRecipe::check_export(const RunFolder& run) const {
  if (watch.exported != "best") return;
  const std::vector<int64_t> steps = io::CheckpointFolder(run.checkpoints().string()).steps();
  if (steps.empty()) return;
  const int64_t best = best_evaluation(run, steps.front()).step;  // later evaluations are made again
  check(best == 0 || std::ranges::find(steps, best) != steps.end(),
        "train: --export best: the lowest held-out loss was after step ", best,
        ", whose checkpoint was not kept; resume with --export last");
}

void LanguageRecipe::check_held_out(const RunFolder& run) {
  watch.eval_stride = evaluation_stride(settings_, watch);
  check(watch.exported == "last" || watch.exported == "best", "train: --export is \"", watch.exported,
        "\"; expected last or best");
  held_out_ = held_out(*data_, watch.eval_tokens);
  io::Xxh3 hash;
  hash.add(target_text(*data_, held_out_));
  held_out_text_ = hash.digits();
  check_export(run);
  if (held_out_.targets > 0) return;
  const bool chooses = watch.patience > 0 || watch.exported != "last";
  check(!chooses || had_evaluation_,
        "train: nothing is held out, so --patience and --export best have no "
        "evaluation to choose; give a --validation share");
  check_not_evaluated(had_evaluation_, wants_evaluation_,
                      settings_.data.empty() ? (run.path() / "data").string() : settings_.data);
}

/// Shards and tokenizer in the run's folder, or the tokenizer alone if the shards lie elsewhere.
void LanguageRecipe::make_data(const std::string& own) {
  if (const std::string given = settings_.data; !given.empty()) {
    settings_.data = fs::absolute(given).lexically_normal().string();
    check(fs::is_directory(settings_.data), "train: --data: ", given,
          " is not a directory; tessera data tokenize makes one from text");
    copy_tokenizer(
        !text.tokenizer.empty() ? text.tokenizer : tokenizer_folder(settings_.data, settings_.start), own);
  } else {
    LanguageText own_text = text;
    if (own_text.tokenizer.empty() && !settings_.start.empty()) own_text.tokenizer = settings_.start;
    const datasets::Tokenized done = write_language_data(own_text, own);
    on_invalid(done.invalid, done.bytes);
    cut_at_spaces_ = done.one_line;
  }
  if (!settings_.start.empty()) keep_base_configs(settings_.start, own);
  const int64_t tokens = io::Tokenizer::load(own).vocab_size();
  std::visit(
      [&](auto& model) {
        if (settings_.start.empty()) model.vocabulary = tokens;
        check(tokens <= model.vocabulary, "train: the tokenizer has ", tokens, " tokens, the model in ",
              settings_.start, " has ", model.vocabulary);
      },
      settings_.model);
}

void LanguageRecipe::open_data(const std::string& own) {
  data_.emplace(settings_.data.empty() ? own : settings_.data, own, settings_.length, settings_.documents,
                settings_.stride);
}

double LanguageRecipe::read_epochs() const {
  return double(settings_.steps) * double(settings_.tokens_per_step()) / double(data_->train().tokens());
}

void LanguageRecipe::set_steps(Device device) {
  if (epochs > 0)
    settings_.steps = std::max<int64_t>(
        1, std::llround(epochs * double(data_->train().tokens()) / double(settings_.tokens_per_step())));
  if (minutes > 0) {
    LanguageSettings own = settings_;  // a step as one rank makes it
    own.accumulate /= ranks_;
    own.sharding = {};  // which needs the other ranks
    const int64_t within = steps_within(own, device, minutes * 60);
    settings_.steps = epochs > 0 ? std::min(settings_.steps, within) : within;
  }
  settings_.validate();
}

// ---- after the run ----

void LanguageRecipe::report(const RunFolder& run, const TrainResult& result) {
  best_ = best_evaluation(run);
  if (best_.step > 0) {
    nlohmann::json settings = run.settings();
    settings["best"] = {{"step", best_.step}, {"eval_nll", best_.nll}, {"evaluations", best_.evaluations}};
    run.write_settings(settings);
  }
  if (result.outcome == Outcome::finished) {
    check(watch.exported != "best" || best_.step > 0, "train: --export best: no evaluation of the run in ",
          run.path().string(),
          " had a finite loss; resume with --export last to export the last step's weights");
    if (watch.exported == "best" && best_.step != result.step)
      job_->restore(io::CheckpointFolder(run.checkpoints().string()).file_of(best_.step));
    export_language(*job_, *data_, (run.path() / "data").string(), (run.path() / "model").string());
  }
  write_language_report(run, *job_, result);
}

}  // namespace tessera::train
