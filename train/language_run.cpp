#include "train/language_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "io/checkpoint_folder.h"
#include "io/checksum.h"
#include "ops/attention/attention.h"
#include "plan/plan.h"
#include "plan/ranks.h"
#include "pretrained/config.h"
#include "runtime/allocator.h"
#include "runtime/error.h"

namespace tessera::train {

namespace fs = std::filesystem;

namespace {

/// More would take the n-gram's tables beyond 2 GB.
constexpr uint64_t kMostCounted = uint64_t{1} << 23;

}  // namespace

// ---- settings and data ----

void LanguageRecipe::resume(const std::string& path, const nlohmann::json& run, const Given& given) {
  check(run.contains("job"), path, ": it has no \"job\"; not a run of `train ", name(), "`");
  try {
    settings_ = language_settings_from_json(run["job"]);
  } catch (const Error& error) {
    fail_at(Site::here(), path, ": ", error.what());
  }
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
  bool restart = !resumed;
  if (!resumed) {
    make_data(own);
  } else {
    restart = io::CheckpointFolder(run.checkpoints().string()).steps().empty();
  }
  if (resumed) check_not_over(run);
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

// ---- what is said of it ----

nlohmann::json LanguageRecipe::facts() const {
  nlohmann::json facts = {{"data", {{"fingerprint", data_->fingerprint()}}}};
  if (held_out_.targets > 0)
    facts["evaluation"] = {{"protocol", "sliding"},       {"length", settings_.length},
                           {"stride", watch.eval_stride}, {"targets", held_out_.targets},
                           {"text", held_out_text_},      {"behind_training_part", held_out_.continued}};
  facts["baseline"] = nullptr;
  if (baseline_.order > 0)
    facts["baseline"] = {{"method", "interpolated modified Kneser-Ney"},
                         {"order", baseline_.order},
                         {"nll", baseline_.nll},
                         {"tokens", baseline_.trained},
                         {"ngrams", baseline_.ngrams}};
  return facts;
}

std::string LanguageRecipe::header(const RunFolder& run, bool captured, int64_t first_step) {
  std::string text;
  const Device device = job_->device();
  text += fmt::format("{} on {} ({}), {}{}\n", name(), device.name(), device.info().name,
                      name_of(settings_.precision()),
                      device.is_cuda() ? captured ? ", one captured graph a step" : ", eager" : "");
  std::visit(
      [&](const auto& m) {
        std::string heads = fmt::format("{} heads", m.heads);
        if constexpr (requires { m.kv_heads; })
          if (m.kv_heads != m.heads) heads += fmt::format(" ({} of keys)", m.kv_heads);
        std::string ffn;
        if constexpr (requires { m.gated; })
          if (!m.gated) ffn = fmt::format(" without a gate ({})", ops::name_of(m.activation));
        const double dropped = ops::applied_dropout(m.attention_dropout);
        text += fmt::format(
            "  model     {} parameters: {} blocks, d {}, {}, d_ff {}{}, {} tokens{}{}\n",
            report::format_count(double(plan::count_parameters(settings_.model, settings_.forms()))),
            m.layers, m.d_model, heads, m.d_ff, ffn, m.vocabulary,
            dropped > 0 ? fmt::format(", dropout of {:.4g} of the attention probabilities", dropped) : "",
            settings_.start.empty() ? "" : fmt::format(", from {}", settings_.start));
      },
      settings_.model);
  if (settings_.factors.factorizes())
    text += fmt::format("  weights   {}\n", settings_.factors.description());
  text += fmt::format(
      "  data      {} tokens to train{}, {}; sequences of {}, {} tokens per step\n",
      report::format_count(double(data_->train().tokens())),
      data_->validation()
          ? fmt::format(", {} held out", report::format_count(double(data_->validation()->tokens())))
          : ", none held out",
      data_->tokenizer().kind(), settings_.length, settings_.tokens_per_step());
  text += fmt::format("  training  steps {} to {} ({:.1f} epochs), lr {:g} ({}), seed {}\n", first_step,
                      settings_.steps, read_epochs(), settings_.lr, settings_.schedule, settings_.seed);
  text += settings_.step_line();
  if (settings_.sparse24.on()) {
    text += fmt::format("  sparse    {}, {}\n", settings_.sparse24.description(),
                        !settings_.sparsifies_factors()   ? "in the feed-forward networks"
                        : settings_.sparsifies_networks() ? "in cola layers and feed-forward networks"
                                                          : "in cola layers");
    for (const auto& [features, width] : settings_.sparse24_sizes())
      text += fmt::format("            {} features: {}\n", features,
                          Sparse24Settings::variants(settings_.batch * settings_.length, features, width,
                                                     settings_.dtype(), device));
  }
  if (settings_.weights24.on())
    std::visit(
        [&](const auto& m) {
          text += fmt::format("  weights   {}\n            {}\n", settings_.weights24.description(),
                              Weights24Settings::variants(settings_.batch * settings_.length, m.d_model,
                                                          m.d_model, settings_.dtype(), device));
        },
        settings_.model);
  text += settings_.memory_line(settings_.planned(device),
                                plan::arena_sizes(settings_.model, settings_.forms()), device, ranks_);
  if (held_out_.targets > 0)
    text += fmt::format(
        "  held out  {} tokens to predict, {} at a time, each after {} or more{}{}\n",
        report::format_count(double(held_out_.targets)), watch.eval_stride,
        settings_.length - watch.eval_stride + 1,
        held_out_.continued  ? "; a document continues after its training part"
        : data_->documents() ? "; each document alone"
                             : "; one document after the other",
        cut_at_spaces_ > 0 ? fmt::format("; documents of one line, cut at a space: {}", cut_at_spaces_) : "");
  if (baseline_.order > 0)
    text += fmt::format(
        "  baseline  {}-gram: {:.4f} nats per token{}\n", baseline_.order, baseline_.nll,
        baseline_.trained < data_->train().tokens()
            ? fmt::format(" (counted on {} tokens)", report::format_count(double(baseline_.trained)))
            : "");
  text += fmt::format("  run       {}\n", run.path().string());
  return text;
}

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

nlohmann::json LanguageRecipe::throughput(const TrainResult& result) const {
  const double seconds = result.ms_per_step / 1e3;
  const double flops = plan::count_flops(settings_.model, settings_.batch * settings_.accumulate,
                                         settings_.length, settings_.forms())
                           .step();
  return {{"tflops", seconds > 0 ? flops / seconds / 1e12 : 0.0}};
}

std::string LanguageRecipe::conclusion(const RunFolder& run, const TrainResult& result) const {
  std::string text;
  const auto& e = result.evaluation;
  if (const auto nll = e.find("eval_nll"); nll != e.end()) {
    text += fmt::format("held-out text: {:.4f} nats per token (perplexity {:.2f}), {:.4f} bits per byte\n",
                        nll->second, e.at("eval_perplexity"), e.at("eval_bits_per_byte"));
    if (baseline_.order > 0)
      text += fmt::format(
          "{}-gram on it: {:.4f} nats per token (perplexity {:.2f}), {:.4f} bits per byte; "
          "the model is {:.4f} nats per token {}\n",
          baseline_.order, baseline_.nll, std::exp(baseline_.nll), e.at("ngram_bits_per_byte"),
          std::abs(e.at("eval_gap")), e.at("eval_gap") <= 0 ? "better" : "worse");
  }
  // Picked on the text that it is measured on, it is an optimistic figure, so it stands apart.
  if (best_.evaluations > 1)
    text += fmt::format("lowest of {} evaluations: {:.4f} nats per token, after step {}{}\n",
                        best_.evaluations, best_.nll, best_.step,
                        result.step < settings_.steps ? "; the run ended early (--patience)" : "");
  if (watch.sample_tokens > 0)
    if (const auto samples = run.samples(); !samples.empty())
      text += fmt::format("it writes:\n{}\n", samples.back().text);
  text += fmt::format(
      "model: {}{}\n", fs::absolute(run.path() / "model").lexically_normal().string(),
      watch.exported == "best" ? fmt::format(" (of step {}, chosen on the held-out text)", best_.step) : "");
  if (const auto* model = std::get_if<models::LlamaConfig>(&settings_.model); model && !model->gated)
    text += model->family == models::LlamaFamily::arcee
                ? "  its networks have no gate, so its type is arcee: transformers reads it since 4.53, "
                  "programs that know only llama do not\n"
                : "  its networks have no gate, unlike a llama of other programs: only tessera reads it\n";
  return text;
}

}  // namespace tessera::train
