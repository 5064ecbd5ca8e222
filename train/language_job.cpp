#include "train/language_job.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "io/file.h"
#include "ops/attention/attention.h"
#include "pretrained/load.h"
#include "runtime/allocator.h"
#include "runtime/error.h"
#include "runtime/interrupt.h"
#include "train/settings_json.h"

namespace tessera::train {

using nlohmann::json;

// ---- the settings ----

DType LanguageSettings::dtype() const {
  return std::visit([](const auto& config) { return config.dtype; }, model);
}

void LanguageSettings::set_precision(Precision precision) {
  std::visit([&](auto& config) { config.dtype = precision.dtype; }, model);
  f32_math = precision.math;
}

void LanguageSettings::validate() const {
  std::visit([](const auto& config) { config.validate(); }, model);
  check(f32_math == F32Math::ieee || dtype() == DType::f32, family(), ": f32_math is ", name_of(f32_math),
        ", but the model is ", dtype(), "; only f32 has it");
  constexpr int64_t kWidest = 1 << 20;
  std::visit(
      [&](const auto& config) {
        for (const auto& [name, size] :
             {std::pair("d_model (--d-model)", config.d_model), std::pair("d_ff (--d-ff)", config.d_ff),
              std::pair("layers (--layers)", config.layers)})
          check(size <= kWidest, family(), ": ", name, " is ", size, "; it must be at most ", kWidest);
        check(length <= config.positions, family(), ": length is ", length, "; the model has ",
              config.positions, " positions");
      },
      model);
  const std::pair<const char*, int64_t> sizes[] = {{"length (--length)", length},
                                                   {"batch (--batch)", batch},
                                                   {"accumulate (--accumulate)", accumulate},
                                                   {"steps", steps}};
  for (const auto& [name, size] : sizes)
    check(size >= 1 && size <= kLargest, family(), ": ", name, " is ", size, "; it must be from 1 to ",
          kLargest);
  check(batch * length <= kLargest, family(), ": ", batch, " sequences of ", length,
        " tokens; a micro-batch has at most ", kLargest);
  check(accumulate <= 1 << 20, family(), ": accumulate is ", accumulate);
  check(stride >= 0 && stride <= length, family(), ": stride is ", stride, "; the length is ", length);
  check(warmup >= 0, family(), ": warmup is ", warmup);
  check(lr > 0 && std::isfinite(lr), family(), ": lr is ", lr, "; it must be positive");
  check(weight_decay >= 0 && clip_norm >= 0, family(), ": weight_decay is ", weight_decay, " and clip_norm ",
        clip_norm, "; they must not be negative");
  check(final_lr >= 0 && final_lr <= 1, family(), ": final_lr is ", final_lr, "; expected 0 to 1");
  check(beta2 > 0 && beta2 < 1, family(), ": beta2 is ", beta2, "; expected more than 0 and less than 1");
  check(dropout >= 0 && dropout < 1 && ema >= 0 && ema < 1, family(), ": dropout is ", dropout, " and ema ",
        ema, "; expected 0 to less than 1");
  check(dropout == 0 || is_llama(), family(), ": dropout is ", dropout, "; the model says it itself");
  std::visit([](const auto& config) { ops::applied_dropout(config.attention_dropout); }, model);  // or throws
  make_schedule(*this);
}

json to_json(const LanguageSettings& settings) {
  json out = settings_to_json(settings);
  out["model"] = json::parse(
      std::visit([](const auto& config) { return pretrained::config_text(config); }, settings.model));
  return out;
}

LanguageSettings language_settings_from_json(const json& in) {
  check(in.is_object() && in.contains("model"), "language job: \"model\" is missing");
  json rest = in;
  rest.erase("model");
  const pretrained::Config config = pretrained::parse_config("model", in["model"].dump());
  const auto* gpt = std::get_if<models::GptConfig>(&config.model);
  const auto* llama = std::get_if<models::LlamaConfig>(&config.model);
  check(gpt || llama, "language job: \"model\" is of the type ", config.type,
        "; expected gpt2, opt or llama");
  // The length is compared with the model's positions, so the model comes first.
  struct Job : LanguageSettings {
    void validate() const {}
  };
  LanguageSettings job = settings_from_json<Job>(rest, "language job");
  if (gpt) job.model = *gpt;
  if (llama) job.model = *llama;
  job.validate();
  return job;
}

// ---- sizes ----

namespace {

struct Size {
  const char* name;
  int64_t layers, d_model, heads, d_ff;
};
constexpr Size kGptSizes[] = {{"demo", 4, 128, 4, 512},
                              {"small", 12, 768, 12, 3072},
                              {"medium", 24, 1024, 16, 4096},
                              {"large", 36, 1280, 20, 5120},
                              {"xl", 48, 1600, 25, 6400}};
constexpr Size kLlamaSizes[] = {{"demo", 4, 128, 4, 344},    {"60m", 8, 512, 8, 1376},
                                {"130m", 12, 768, 12, 2048}, {"350m", 24, 1024, 16, 2736},
                                {"1b", 24, 2048, 32, 5461},  {"7b", 32, 4096, 32, 11008}};

std::span<const Size> sizes_of(bool llama) {
  return llama ? std::span<const Size>(kLlamaSizes) : std::span<const Size>(kGptSizes);
}

}  // namespace

std::vector<std::string> size_names(bool llama) {
  std::vector<std::string> names;
  for (const Size& size : sizes_of(llama)) names.push_back(size.name);
  return names;
}

void apply_size(LanguageConfig& config, const std::string& name) {
  const auto sizes = sizes_of(std::holds_alternative<models::LlamaConfig>(config));
  const auto found = std::find_if(sizes.begin(), sizes.end(), [&](const Size& s) { return s.name == name; });
  check(found != sizes.end(), "there is no size \"", name, "\"");
  std::visit(
      [&](auto& model) {
        model.layers = found->layers, model.d_model = found->d_model;
        model.heads = found->heads, model.d_ff = found->d_ff;
        if constexpr (requires { model.kv_heads; }) model.kv_heads = found->heads;
        // 0.02 is for widths near 1,000: there it is about 1 / sqrt(d_model), which narrow models need too.
        if (name == "demo") model.init_deviation = 0.1;
      },
      config);
}

optim::Schedule make_schedule(const LanguageSettings& settings) {
  return optim::Schedule({.kind = optim::parse_schedule(settings.schedule),
                          .lr = settings.lr,
                          .steps = settings.steps,
                          .warmup = std::min(settings.warmup, settings.steps / 2),
                          .final_factor = settings.final_lr});
}

// ---- the job ----

LanguageJob::Model LanguageJob::make(const LanguageSettings& settings, Rng& rng, Device device,
                                     const std::string& weights) {
  const MemoryTag tag("parameters");
  const pretrained::LoadOptions options{.dtype = settings.dtype()};
  if (const auto* config = std::get_if<models::LlamaConfig>(&settings.model)) {
    if (!weights.empty()) return pretrained::load_llama(weights, rng, device, options);
    models::LlamaConfig own = *config;
    own.embedding_dropout = own.residual_dropout = settings.dropout;
    return models::Llama(own, rng, device);
  }
  if (!weights.empty()) return pretrained::load_gpt(weights, rng, device, options);
  return models::Gpt(std::get<models::GptConfig>(settings.model), rng, device);
}

LanguageJob::LanguageJob(const LanguageSettings& settings, Device device, const std::string& weights)
    : Job(device),
      settings_(settings),
      rng_(settings.seed),
      model_(make(settings, rng_, device, weights)),
      optimizer_([&] {
        const MemoryTag tag("optimizer");
        // Rows of a table are seen seldom: decay would be most of what happens to them.
        return optim::AdamW(nn::parameters(model_),
                            {.lr = settings.lr,
                             .beta2 = settings.beta2,
                             .weight_decay = settings.weight_decay,
                             .max_norm = settings.clip_norm,
                             .groups = {{.contains = "token.weight", .weight_decay = 0.0},
                                        {.contains = "position.weight", .weight_decay = 0.0}},
                             .loss_scale = optim::default_loss_scale(settings.dtype())});
      }()) {
  if (settings.ema > 0) ema_.emplace(optimizer_, optim::EmaOptions{.decay = settings.ema});
  const MemoryTag tag("batch");
  inputs_ = Tensor::empty_packed({settings.batch, settings.length}, DType::i64, device);
  targets_ = Tensor::empty_packed({settings.batch, settings.length}, DType::i64, device);
  std::visit([](auto& model) { nn::set_training(model, true); }, model_);
  keep("model", model_);
  train_with(optimizer_);
  keep("ema", ema_), keep("rng", rng_), keep("loader", position_);
}

namespace {

nn::Sequences sequences_of(const datasets::TokenBatch& batch) {
  nn::Sequences sequences;
  const std::vector<int64_t> ends = batch.lengths.to_vector<int64_t>();
  for (size_t i = 1; i < ends.size(); ++i) sequences.lengths.push_back(ends[i] - ends[i - 1]);
  return sequences;
}

Tensor flat(const Tensor& tokens) {
  return tokens.reshape({tokens.count()});
}

}  // namespace

void LanguageJob::load(const datasets::TokenBatch& batch) {
  inputs_.copy_from(batch.inputs);
  targets_.copy_from(batch.targets);
  if (settings_.documents) sequences_ = sequences_of(batch);
}

Tensor LanguageJob::loss() {
  const F32MathScope math(settings_.f32_math);
  return std::visit(
      [&](const auto& model) {
        return settings_.documents ? model.loss(flat(inputs_), targets_, sequences_)
                                   : model.loss(inputs_, targets_);
      },
      model_);
}

void LanguageJob::updated() {
  if (ema_) ema_->update();
}

template <class F>
auto LanguageJob::as_used(F&& f) {
  const F32MathScope math(settings_.f32_math);
  return std::visit(
      [&](auto& model) {
        nn::set_training(model, false);
        if (ema_) ema_->apply();
        const auto back = [&] {
          if (ema_) ema_->restore();
          nn::set_training(model, true);
        };
        try {
          auto result = f(model);
          back();
          return result;
        } catch (...) {
          back();
          throw;
        }
      },
      model_);
}

Perplexity LanguageJob::measure(std::span<const PerplexityWindow> windows) {
  const auto progress = [](const Perplexity&) {
    check_interrupt();
    return true;
  };
  return as_used(
      [&](auto& model) { return measure_perplexity(model, windows, device(), settings_.batch, progress); });
}

std::vector<int64_t> LanguageJob::generate(std::span<const int64_t> prompt,
                                           const models::GenerateOptions& options) {
  models::GenerateOptions own = options;
  own.on_token = [&](int64_t token) {
    check_interrupt();
    return !options.on_token || options.on_token(token);
  };
  return as_used([&](auto& model) { return models::generate(model, prompt, own); });
}

void LanguageJob::save(const std::string& folder) {
  as_used([&](auto& model) { return pretrained::save(model, folder), 0; });
}

}  // namespace tessera::train
