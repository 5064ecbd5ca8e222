#include "train/language_job.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "autograd/gradient.h"
#include "autograd/tape.h"
#include "eval/activation_sparsity.h"
#include "io/file.h"
#include "nn/hidden_l1.h"
#include "ops/attention/attention.h"
#include "ops/bits/bits.h"
#include "ops/pointwise/pointwise.h"
#include "pretrained/language_model.h"
#include "runtime/allocator.h"
#include "runtime/error.h"
#include "runtime/interrupt.h"
#include "train/random_purpose.h"

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

void LanguageSettings::add_sizes(SettingList& list) {
  list.group("Data");
  list.add("length", length, "Tokens per sequence").range(int64_t{1}, kLargest);
  list.add("batch", batch, "Sequences per micro-batch")
      .named("--batch-size")
      .formerly("--batch")
      .range(int64_t{1}, kLargest);
}

void LanguageSettings::add_averages(SettingList& list) {
  list.group("Training");
  list.add("ema", ema,
           "Evaluate and export a moving average of the weights with this decay per step, such as 0.999; 0: "
           "off")
      .range(0.0, 0.9999999);
}

plan::Memory LanguageSettings::planned(Device device) const {
  plan::Memory memory = with_states(plan::count_memory(model, batch, length, forms()),
                                    plan::hidden_matrices(model, forms()), dtype(), device);
  if (ema > 0) memory.averages = memory.gradients;
  return memory;
}

SettingList LanguageSettings::list() {
  SettingList list;
  list.group("Data");
  list.add("data", data, "Directory of token shards (tessera data tokenize), instead of --text");
  add_sizes(list);
  list.add("stride", stride,
           "Tokens between the starts of sequences; default: 1 if the run reads the text more than once, "
           "else --length")
      .range(int64_t{1}, kLargest)
      .unset_is(0)
      .shown_as("");
  list.add("documents", documents, "End sequences at document boundaries, packed without padding");
  list.add_hidden("fingerprint", fingerprint);
  list.group("Model");
  list.add("start", start,
           "Hugging Face model directory, or run folder of a finished run, whose weights to start from")
      .named("--model");
  list.add("dropout", dropout, "Dropout of embeddings and residual branches").range(0.0, 0.95);
  list.add_json("model",
                {.get =
                     [this] {
                       return json::parse(std::visit(
                           [](const auto& config) { return pretrained::config_text(config); }, model));
                     },
                 .set = [this](const json& stored) { set_model(stored); }});
  factors.add_to(list);
  add_to(list);
  add_ranks(list);
  add_data_order(list);
  list.add("min_lr_ratio", min_lr_ratio, "Final learning rate, as a share of the peak")
      .formerly("--final-lr")
      .range(0.0, 1.0);
  list.add("beta2", beta2, "Decay of AdamW's second moment (beta2)").range(1e-7, 0.9999999);
  add_averages(list);
  list.add("keep_zeros", keep_zeros,
           "Keep the zero weights of the blocks of a pruned --model at 0 (tessera prune)")
      .absent_means(false);
  list.add("activation_l1", activation_l1,
           "L1 penalty: add this times the mean hidden activation of every feed-forward network to the loss; "
           "needs train llama --ffn relu2 or relu, or a --model with relu (OPT)")
      .range(0.0, 1e6)
      .absent_means(0);
  sparse24.add_to(list);
  weights24.add_to(list);
  return list;
}

void LanguageSettings::set_model(const json& stored) {
  const pretrained::Config config = pretrained::parse_config("model", stored.dump());
  const auto* gpt = std::get_if<models::GptConfig>(&config.model);
  const auto* llama = std::get_if<models::LlamaConfig>(&config.model);
  check(gpt || llama, "language job: \"model\" is of the type ", config.type,
        "; expected gpt2, opt, llama, mistral, qwen2, qwen3, phi3 or arcee");
  if (gpt) model = *gpt;
  if (llama) model = *llama;
}

void LanguageSettings::validate() const {
  std::visit([](const auto& config) { config.validate(); }, model);
  constexpr int64_t kWidest = 1 << 20;
  std::visit(
      [&](const auto& config) {
        for (const auto& [name, size] :
             {Size("d_model (--d-model)", config.d_model), Size("d_ff (--d-ff)", config.d_ff),
              Size("layers (--layers)", config.layers)})
          check(size <= kWidest, family(), ": ", name, " is ", size, "; it must be at most ", kWidest);
        check(length <= config.positions, family(), ": length is ", length, "; the model has ",
              config.positions, " positions");
      },
      model);
  check_values(LanguageSettings(*this).list(), family());
  check_training(family(), dtype());
  check(batch * length <= kLargest, family(), ": ", batch, " sequences of ", length,
        " tokens; a micro-batch has at most ", kLargest);
  check(stride <= length, family(), ": stride is ", stride, "; the length is ", length);
  check(!keep_zeros || !start.empty(), family(),
        ": keep_zeros keeps the zeros of a pruned model; name its directory (--model)");
  check(!keep_zeros || (optimizer != "muon" && optimizer != "galore"), family(),
        ": keep_zeros with the optimizer ", optimizer,
        ", which mixes the elements of a matrix and so moves its zeros; "
        "choose adamw or sgd (--optimizer)");
  factors.validate(!start.empty());
  check_optimizer_form(optimizer, factors);
  check(!keep_zeros || !factors.factorizes(), family(), ": keep_zeros with --form ", factors.form,
        ", which has no weights to keep zeros in; leave one of them out");
  plan::count_parameters(model, forms());  // throws for a rank that is too large
  if (const auto* const gpt = std::get_if<models::GptConfig>(&model))
    check(dropout == 0 || dropout == gpt->residual_dropout, family(), ": dropout is ", dropout,
          "; the model's config.json has ", gpt->residual_dropout, " (resid_pdrop), by which it is made");
  std::visit([](const auto& config) { ops::applied_dropout(config.attention_dropout); }, model);  // or throws
  check(activation_l1 == 0 || !factors.factorizes(), family(), ": --activation-l1 with --form ", factors.form,
        "; the penalty needs dense weights, so leave one of them out");
  if (activation_l1 > 0) check_activations("activation_l1 (--activation-l1)");
  check(!(sparse24.on() || weights24.on()) || sparse24.dense_first + sparse24.dense_last < steps, family(),
        ": ", sparse24.on() ? "sparse24: " : "weights24: ", sparse24.dense_first,
        " dense steps first (--dense-first) and ", sparse24.dense_last,
        " last (--dense-last) leave none of the ", steps, " steps sparse");
  check_sparse24();
  check_weights24();
}

std::vector<std::string> LanguageSettings::penalties() const {
  std::vector<std::string> names;
  if (activation_l1 > 0) names.push_back("activation_l1");
  if (weights24.on() && weights24.decay > 0) names.push_back("masked_decay");
  return names;
}

void LanguageSettings::check_weights24() const {
  if (!weights24.on()) return;
  const std::string flag = "--weights-24 " + weights24.layers;
  check(!factors.factorizes(), family(), ": ", flag, " with --form ", factors.form,
        "; 2:4 weights are masks of dense ones, so leave one of them out");
  check(!keep_zeros, family(), ": ", flag,
        " with keep_zeros (--keep-zeros), whose zeros have no pattern; "
        "leave one of them out");
  check(
      !sparse24.on() || !weights24.in_mlp(), family(), ": ", flag, " with --sparse24 ", sparse24.method,
      ": a GEMM has one sparse operand, the weight or the activations; give --weights-24 attn, or leave one "
      "of them out");
  check(activation_l1 == 0 || !weights24.in_mlp(), family(), ": ", flag,
        " with --activation-l1: the penalty needs dense weights in feed-forward networks; give --weights-24 "
        "attn, or leave one of them out");
}

bool LanguageSettings::has_zeros() const {
  const auto* const llama = std::get_if<models::LlamaConfig>(&model);
  const ops::Activation activation = std::visit([](const auto& config) { return config.activation; }, model);
  return !(llama && llama->gated) &&
         (activation == ops::Activation::relu || activation == ops::Activation::relu_squared);
}

void LanguageSettings::check_activations(const std::string& flag) const {
  const auto* const llama = std::get_if<models::LlamaConfig>(&model);
  const ops::Activation activation = std::visit([](const auto& config) { return config.activation; }, model);
  check(!llama || !llama->gated, family(), ": ", flag,
        " needs feed-forward networks without a gate, and these are gated (SwiGLU); add --ffn relu2");
  check(has_zeros(), family(), ": ", flag, " needs activations with zeros (relu, relu2), and these are ",
        ops::name_of(activation));
}

void LanguageSettings::check_on_ranks(int ranks) const {
  check(
      ranks == 1 || !sparse24.has_state(), "train: sparse24 on ", ranks,
      " ranks: counts of an earlier step and random choices are each rank's own; train on one rank, or with "
      "--dense-share 0 and naive or fast");
}

void LanguageSettings::check_averages(int64_t zero) const {
  check(ema == 0 || zero == 0 || dtype() == DType::f32, "train: --ema with --zero ", zero, " in ", dtype(),
        ": averages of 16-bit weights are made of the f32 masters, of which each rank has a part; use --zero "
        "0, or --precision f32");
}

void LanguageSettings::check_sparse24() const {
  sparse24.validate();
  if (!sparse24.on()) return;
  const std::string flag = "sparse24 (--sparse24 " + sparse24.method + ")";
  check(!sparsifies_factors() || factors.activation == "relu_squared", family(), ": ", flag,
        " with --form cola needs activations with zeros between the factors, and these are ",
        factors.activation, "; add --cola-activation relu_squared");
  // Of these forms a layer is more than GEMMs with one hidden matrix between them.
  check(!factors.factorizes(false) || (factors.form != "sltrain" && factors.form != "lost"), family(), ": ",
        flag, " with --form ", factors.form,
        " in the MLPs: hidden activations are multiplied with one matrix, and a layer of that form has two; "
        "give --form-layers attention, or take low_rank or cola");
  if (sparsifies_networks()) check_activations(flag);
  check(!sparse24.has_state() || order != "global", family(),
        ": sparse24: counts of an earlier step and random choices are not those of any number of ranks "
        "(--order "
        "global); use --order world, or --dense-share 0 with naive or fast");
}

std::vector<std::pair<int64_t, int64_t>> LanguageSettings::sparse24_sizes() const {
  std::vector<std::pair<int64_t, int64_t>> sizes;
  const auto add = [&](int64_t features, int64_t width) {
    if (std::ranges::find(sizes, std::pair(features, width)) == sizes.end())
      sizes.emplace_back(features, width);
  };
  std::visit(
      [&](const auto& config) {
        if (sparsifies_networks())
          add(config.d_ff, factors.factorizes(false) ? factors.rank_of(false) : config.d_model);
        for (const bool attention : {true, false})
          if (sparsifies_factors() && factors.factorizes(attention))
            add(factors.rank_of(attention), config.d_model);
      },
      model);
  return sizes;
}

json to_json(const LanguageSettings& settings) {
  return to_json(LanguageSettings(settings).list(), Kept::job);
}

LanguageSettings language_settings_from_json(const json& in) {
  return job_settings<LanguageSettings>(in, "language job");
}

SettingList LanguageWatch::list() {
  SettingList list(Kept::option);
  list.group("Run");
  constexpr int64_t kMost = int64_t{1} << 30;
  list.add("eval_tokens", eval_tokens, "Maximum held-out tokens per evaluation").range(int64_t{1}, kMost);
  list.add("eval_stride", eval_stride,
           "Held-out tokens that each window of --length predicts, its last ones, each with at least "
           "--length minus this as context; default: half of --length; --length: disjoint windows, whose "
           "first prediction has one token of context")
      .range(int64_t{1}, kMost)
      .shown_as("");
  list.add("sample_every", sample_every, "Steps between samples of text; 0: only at the end")
      .range(int64_t{0}, kMost);
  list.add("sample_tokens", sample_tokens, "Length of each sample in tokens; 0 turns sampling off")
      .range(int64_t{0}, int64_t{1} << 20);
  list.add("sample_prompt", sample_prompt, "Prompt of the samples; default: a new document")
      .may_be_without_text();
  list.add("ngram", ngram, "Order of the n-gram baseline; 0: none").range(0, 16);
  list.add("patience", patience,
           "Early stopping: end the run after this many evaluations (--eval-every) without a new lowest "
           "held-out loss; 0: off")
      .range(int64_t{0}, kMost);
  list.add("export", exported,
           "Weights to export to model/: of the last step (last), or of the evaluation with the lowest "
           "held-out loss (best)")
      .one_of({"last", "best"});
  return list;
}

// ---- sizes ----

namespace {

struct ModelSize {
  const char* name;
  int64_t layers, d_model, heads, d_ff;
};
constexpr ModelSize kGptSizes[] = {{"demo", 4, 128, 4, 512},
                                   {"small", 12, 768, 12, 3072},
                                   {"medium", 24, 1024, 16, 4096},
                                   {"large", 36, 1280, 20, 5120},
                                   {"xl", 48, 1600, 25, 6400}};
constexpr ModelSize kLlamaSizes[] = {{"demo", 4, 128, 4, 344},    {"60m", 8, 512, 8, 1376},
                                     {"130m", 12, 768, 12, 2048}, {"350m", 24, 1024, 16, 2736},
                                     {"1b", 24, 2048, 32, 5461},  {"7b", 32, 4096, 32, 11008}};

std::span<const ModelSize> sizes_of(bool llama) {
  return llama ? std::span<const ModelSize>(kLlamaSizes) : std::span<const ModelSize>(kGptSizes);
}

}  // namespace

std::vector<std::string> size_names(bool llama) {
  std::vector<std::string> names;
  for (const ModelSize& size : sizes_of(llama)) names.push_back(size.name);
  return names;
}

void apply_size(LanguageConfig& config, const std::string& name) {
  const auto sizes = sizes_of(std::holds_alternative<models::LlamaConfig>(config));
  const auto found =
      std::find_if(sizes.begin(), sizes.end(), [&](const ModelSize& s) { return s.name == name; });
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

// ---- the job ----

namespace {

/// With initial weights.
models::LanguageModel initial_model(const LanguageSettings& settings, const Rng& rng, Device device) {
  if (const auto* config = std::get_if<models::GptConfig>(&settings.model))
    return models::Gpt(*config, rng, device);
  models::LlamaConfig config = std::get<models::LlamaConfig>(settings.model);
  config.embedding_dropout = config.residual_dropout = settings.dropout;
  return models::Llama(config, rng, device);
}

}  // namespace

models::LanguageModel LanguageJob::make(const LanguageSettings& settings, const Rng& rng, Device device,
                                        const std::string& weights, FactorStart start) {
  const MemoryTag tag("parameters");
  models::LanguageModel model =
      weights.empty() ? initial_model(settings, rng, device)
                      : pretrained::load_dense_language(weights, rng, device, {.dtype = settings.dtype()});
  start.has_weights = !weights.empty();
  if (settings.factors.factorizes()) settings.factors.apply(pretrained::linear_modules(model), rng, start);
  return model;
}

LanguageJob::LanguageJob(const LanguageSettings& settings, Device device, const std::string& weights,
                         FactorStart start)
    : Job(device),
      settings_(settings),
      rng_(seed_for(RandomPurpose::initialisation, settings.seed)),
      model_(make(settings, rng_, device, weights, std::move(start))),
      sparse24_rng_(seed_for(RandomPurpose::activation_choice, settings.seed)),
      // Rows of a table are seen seldom: decay would be most of what happens to them.
      optimizer_(
          settings.make_optimizer(nn::parameters(model_), settings.dtype(), settings.beta2,
                                  {{.contains = "token.weight", .weight_decay = 0.0, .optional = true},
                                   {.contains = "position.weight", .weight_decay = 0.0, .optional = true}},
                                  structure_of(pretrained::linear_modules(model_)))) {
  use_for(RandomPurpose::dropout, settings.seed, rng_);
  if (settings.ema > 0) ema_.emplace(optimizer_, optim::EmaOptions{.decay = settings.ema});
  if (settings.keep_zeros) find_zeros(!weights.empty());
  if (settings.sparse24.on())
    settings.sparse24.apply(model_, settings.sparsifies_networks(),
                            seed_for(RandomPurpose::activation_choice, settings.seed), sparse24_rng_);
  settings.weights24.apply(model_);
  const MemoryTag tag("batch");
  inputs_ = Tensor::empty_packed({settings.batch, settings.length}, DType::i64, device);
  targets_ = Tensor::empty_packed({settings.batch, settings.length}, DType::i64, device);
  nn::set_training(model_, true);
  keep("model", model_);
  train_with(optimizer_);
  keep("ema", ema_), keep("loader", position_);
  if (settings.sparse24.on()) keep("sparse24_rng", sparse24_rng_);
  draws_from("rng", rng_);
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
  std::optional<nn::HiddenL1> hidden;
  if (settings_.activation_l1 > 0) hidden.emplace();
  const Tensor loss =
      settings_.documents ? model_.loss(flat(inputs_), targets_, sequences_) : model_.loss(inputs_, targets_);
  l1_ = hidden && hidden->sum().defined() ? ops::scale(hidden->sum(), settings_.activation_l1) : Tensor();
  decay_ = settings_.weights24.decay > 0 ? decay_of_pruned() : Tensor();
  return loss;
}

/// Of the layers with 2:4 weights, while they are sparse.
Tensor LanguageJob::decay_of_pruned() const {
  Tensor sum;
  nn::for_each_weights24(model_, [&](const std::string&, const nn::Linear& layer) {
    const Tensor own = nn::masked_decay(layer);
    if (own.defined()) sum = sum.defined() ? ops::add(sum, own) : own;
  });
  return sum.defined() ? ops::scale(sum, settings_.weights24.decay) : sum;
}

std::vector<Tensor> LanguageJob::penalties() {
  std::vector<Tensor> all;
  if (settings_.activation_l1 > 0) all.push_back(std::exchange(l1_, {}));
  if (settings_.weights24.on() && settings_.weights24.decay > 0) all.push_back(std::exchange(decay_, {}));
  return all;
}

void LanguageJob::find_zeros(bool of_start) {
  const MemoryTag tag("masks");
  int64_t zeros = 0;
  nn::for_each<nn::Linear>(model_, [&](const std::string& name, nn::Linear& layer) {
    if (!name.starts_with("blocks.")) return;
    const Tensor bits = ops::pack_bits(layer.weight.detach());
    for (const int64_t ones : ops::count_bits(bits).to_vector<int64_t>()) zeros += layer.in - ones;
    sparse_.push_back({layer.weight, bits});
  });
  // A run that goes on gets the bits, as the weights, from its checkpoint.
  check(!of_start || zeros > 0, settings_.family(), ": keep_zeros: no weight of ", settings_.start,
        "'s blocks is 0; prune the model first (tessera prune)");
  // Elementwise rules leave a 0 with the gradient 0 as it is, and its master too.
  for (const Sparse& matrix : sparse_)
    on_grad(matrix.weight, [&matrix](const Tensor& gradient) {
      gradient.copy_from(
          ops::mul(gradient, ops::unpack_bits(matrix.bits, gradient.size(1), gradient.dtype())));
    });
  keep("zeros", sparse_);
}

std::map<std::string, Tensor> LanguageJob::weight_gradients() {
  batch(0);
  Tape tape({.loss_scale = optimizer_.loss_scale()});
  tape.backward(loss());
  std::map<std::string, Tensor> gradients;
  nn::for_each<nn::Linear>(model_, [&](const std::string& name, nn::Linear& layer) {
    if (layer.weight.defined()) gradients.emplace(name, grad(layer.weight));
  });
  return gradients;
}

void LanguageJob::updated() {
  if (ema_) ema_->update();
}

template <class F>
auto LanguageJob::as_used(F&& f) {
  const F32MathScope math(settings_.f32_math);
  nn::set_training(model_, false);
  if (ema_) ema_->apply();
  const auto back = [&] {
    if (ema_) ema_->restore();
    nn::set_training(model_, true);
  };
  try {
    auto result = f();
    back();
    return result;
  } catch (...) {
    back();
    throw;
  }
}

eval::Perplexity LanguageJob::measure(std::span<const eval::PerplexityWindow> windows) {
  return as_used([&] { return eval::measure_perplexity(model_, windows, device(), settings_.batch); });
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

std::vector<int64_t> LanguageJob::generate(std::span<const int64_t> prompt,
                                           const models::GenerateOptions& options) {
  const auto unless_interrupted = [](int64_t) {
    check_interrupt();
    return true;
  };
  return as_used([&] { return models::generate(model_, prompt, options, unless_interrupted); });
}

void LanguageJob::save(const std::string& folder) {
  as_used([&] { return pretrained::save(model_, folder), 0; });
}

}  // namespace tessera::train
