#include <fmt/format.h>

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "ops/attention/attention.h"
#include "plan/plan.h"
#include "plan/ranks.h"
#include "runtime/error.h"
#include "train/language_run.h"

/// What a run of a language model says of itself: in its header, in run.json and at its end.

namespace tessera::train {

namespace fs = std::filesystem;

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

namespace {

std::string model_lines(const LanguageSettings& settings) {
  std::string text;
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
            report::format_count(double(plan::count_parameters(settings.model, settings.forms()))), m.layers,
            m.d_model, heads, m.d_ff, ffn, m.vocabulary,
            dropped > 0 ? fmt::format(", dropout of {:.4g} of the attention probabilities", dropped) : "",
            settings.start.empty() ? "" : fmt::format(", from {}", settings.start));
      },
      settings.model);
  if (settings.factors.factorizes()) text += fmt::format("  weights   {}\n", settings.factors.description());
  return text;
}

/// What is 2:4, and by which kernels.
std::string sparsity_lines(const LanguageSettings& settings, Device device) {
  std::string text;
  if (settings.sparse24.on()) {
    text += fmt::format("  sparse    {}, {}\n", settings.sparse24.description(),
                        !settings.sparsifies_factors()   ? "in the feed-forward networks"
                        : settings.sparsifies_networks() ? "in cola layers and feed-forward networks"
                                                         : "in cola layers");
    for (const auto& [features, width] : settings.sparse24_sizes())
      text += fmt::format("            {} features: {}\n", features,
                          Sparse24Settings::variants(settings.batch * settings.length, features, width,
                                                     settings.dtype(), device));
  }
  if (settings.weights24.on())
    std::visit(
        [&](const auto& m) {
          text += fmt::format("  weights   {}\n            {}\n", settings.weights24.description(),
                              settings.weights24.variants(settings.batch * settings.length, m.d_model,
                                                          m.d_model, settings.dtype(), device));
        },
        settings.model);
  return text;
}

}  // namespace

std::string LanguageRecipe::data_lines(int64_t first_step) const {
  std::string text = fmt::format(
      "  data      {} tokens to train{}, {}; sequences of {}, {} tokens per step\n",
      report::format_count(double(data_->train().tokens())),
      data_->validation()
          ? fmt::format(", {} held out", report::format_count(double(data_->validation()->tokens())))
          : ", none held out",
      data_->tokenizer().kind(), settings_.length, settings_.tokens_per_step());
  text += fmt::format("  training  steps {} to {} ({:.1f} epochs), lr {:g} ({}), seed {}\n", first_step,
                      settings_.steps, read_epochs(), settings_.lr, settings_.schedule, settings_.seed);
  return text;
}

std::string LanguageRecipe::evaluation_lines() const {
  std::string text;
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
  return text;
}

std::string LanguageRecipe::header(const RunFolder& run, bool captured, int64_t first_step) {
  const Device device = job_->device();
  std::string text = device_line(name(), device, settings_.precision(), captured);
  text += model_lines(settings_) + data_lines(first_step) + settings_.step_line();
  text += sparsity_lines(settings_, device);
  text += settings_.memory_line(settings_.planned(device),
                                plan::arena_sizes(settings_.model, settings_.forms()), device, ranks_);
  text += evaluation_lines();
  return text + fmt::format("  run       {}\n", run.path().string());
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
