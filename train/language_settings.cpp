#include "train/language_settings.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "ops/attention/attention.h"
#include "pretrained/config.h"
#include "runtime/error.h"

namespace tessera::train {

using nlohmann::json;

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
  check(!weights24.draws() || order != "global", family(), ": ", flag,
        " with --weights-24-gradient mvue: random choices are not those of any number of ranks (--order "
        "global); use --order world, or --weights-24-gradient dense");
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
  check(ranks == 1 || !weights24.draws(), "train: weights24 on ", ranks,
        " ranks: random choices are each rank's own; train on one rank, or with --weights-24-gradient dense");
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

void LanguageSettings::check_required(Device device) const {
  for (const auto& [features, width] : sparse24_sizes())
    sparse24.check_required(batch * length, features, width, dtype(), device);
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

int64_t evaluation_stride(const LanguageSettings& settings, const LanguageWatch& watch) {
  check(watch.eval_stride >= 0 && watch.eval_stride <= settings.length, "train: --eval-stride ",
        watch.eval_stride, " is more than the --length of ", settings.length);
  return watch.eval_stride > 0 ? watch.eval_stride : std::max<int64_t>(1, settings.length / 2);
}

}  // namespace tessera::train
