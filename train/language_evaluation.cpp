#include <algorithm>
#include <cmath>
#include <iterator>

#include "eval/activation_sparsity.h"
#include "pretrained/language_model.h"
#include "runtime/error.h"
#include "runtime/interrupt.h"
#include "train/evaluating.h"
#include "train/language_job.h"

namespace tessera::train {

template <class F>
auto LanguageJob::as_used(F&& f) {
  const F32MathScope math(settings_.f32_math);
  const Evaluating evaluating(model_);
  if (!ema_) return f();
  ema_->apply();
  try {
    auto result = f();
    ema_->restore();
    return result;
  } catch (...) {
    ema_->restore();
    throw;
  }
}

eval::Perplexity LanguageJob::measure(std::span<const eval::PerplexityWindow> windows) {
  return as_used([&] { return eval::measure_perplexity(model_, windows, device(), settings_.batch); });
}

Values LanguageJob::evaluate() {
  const double nll = measure(windows_).nats;
  const auto bits = [&](double nats) { return nats * tokens_per_byte_ / std::log(2.0); };
  Values values = {{"eval_nll", nll}, {"eval_perplexity", std::exp(nll)}, {"eval_bits_per_byte", bits(nll)}};
  if (baseline_.order > 0) {
    values["ngram_nll"] = baseline_.nll;
    values["ngram_bits_per_byte"] = bits(baseline_.nll);
    values["eval_gap"] = nll - baseline_.nll;
  }
  if (settings_.sparse24.on()) add_sparsity(values);
  return values;
}

/// Of the first windows of the evaluation: zeros of what is sparse, and the energy that 2:4 drops of it.
void LanguageJob::add_sparsity(Values& values) {
  const auto first = std::span(windows_).first(std::min(windows_.size(), size_t(settings_.batch)));
  const auto measured = as_used([&] {
    const eval::ActivationMeter meter(model_, settings_.sparse24.dense_share, true);
    eval::measure_perplexity(model_, first, device(), settings_.batch);
    return meter.networks();
  });
  double zeros = 0, dropped = 0;
  for (const auto& [name, one] : measured) {
    values["zeros." + name] = one.zeros();
    values["dropped." + name] = one.dropped_both_split;
    zeros += one.zeros(), dropped += one.dropped_both_split;
  }
  const double networks = double(std::max<size_t>(1, measured.size()));
  values["activation_zeros"] = zeros / networks, values["dropped_energy"] = dropped / networks;
}

bool LanguageJob::begin(const RunFolder& run) {
  best_ = best_evaluation(run);
  // Stopped after it had ended early: what is left to do is what a run does at its end.
  return has_ended();
}

Verdict LanguageJob::judge(int64_t step, const Values& values) {
  best_.add(step, values.at("eval_nll"));
  return {.save = keeps_best() && best_.since == 0, .stop = has_ended()};
}

std::optional<int64_t> LanguageJob::spared() const {
  return keeps_best() ? std::optional(best_.step) : std::nullopt;
}

// ---- texts, and the model for others ----

std::vector<int64_t> sample_prompt(const LanguageData& data, const LanguageWatch& watch) {
  const io::Tokenizer& tokenizer = data.tokenizer();
  if (watch.sample_prompt.empty()) {
    if (tokenizer.special().eos) return {*tokenizer.special().eos};
    return read_tokens(data.train(), 0, 1);
  }
  const std::vector<int32_t> ids = tokenizer.encode(watch.sample_prompt).ids;
  check(!ids.empty(), "train: the prompt of samples has no tokens");
  check(int64_t(ids.size()) <= data.length(), "train: the prompt of samples has ", ids.size(),
        " tokens; sequences have ", data.length(), ": give a shorter --sample-prompt");
  return {ids.begin(), ids.end()};
}

std::vector<int64_t> LanguageJob::generate(std::span<const int64_t> prompt,
                                           const models::GenerateOptions& options) {
  const auto unless_interrupted = [](int64_t) {
    check_interrupt();
    return true;
  };
  return as_used([&] { return models::generate(model_, prompt, options, unless_interrupted); });
}

void LanguageJob::sample(int64_t step, const RunFolder& run) {
  // Not longer than a training sequence: the tables that a captured step reads stay as they are.
  const int64_t room = settings_.length - int64_t(prompt_.size()) + 1;
  const auto text = generate(prompt_, {.most_tokens = std::min(watch_.sample_tokens, room),
                                       .sampling = {.temperature = 0.8, .top_k = 200},
                                       .seed = settings_.seed ^ uint64_t(step)});
  std::vector<int32_t> ids(prompt_.begin(), prompt_.end());
  // A model may have more rows than the tokenizer has tokens.
  for (const int64_t token : text)
    if (data_->tokenizer().has(int32_t(token))) ids.push_back(int32_t(token));
  run.append(Sample{step, data_->tokenizer().decode(ids)});
}

void LanguageJob::save(const std::string& folder) {
  as_used([&] { return pretrained::save(model_, folder), 0; });
}

}  // namespace tessera::train
