#include "cli/language_flags.h"

#include <algorithm>
#include <cmath>

#include "cli/setting_flags.h"
#include "runtime/error.h"
#include "train/language_sizes.h"

namespace tessera::cli {
LanguageFlags::LanguageFlags(bool llama) {
  if (llama) job_.model = models::LlamaConfig{};
}

/// Sizes that say what the model is; the settings keep its config.json.
train::SettingList LanguageFlags::model_list() {
  const bool llama = job_.is_llama();
  train::SettingList list(train::Kept::never);
  list.group("Model");
  list.add("size", size_, "Model size by name; flags for single sizes take precedence")
      .one_of(train::size_names(llama));
  // What is not given is that of --size: a default to show would be a wrong one.
  const auto add = [&](const char* key, int64_t& value, const char* help) -> train::Setting& {
    return list.add(key, value, help).range(int64_t{1}, train::LanguageSettings::kLargest).shown_as("");
  };
  add("layers", layers_, "Number of blocks");
  add("d_model", d_model_, "Hidden size");
  add("n_head", heads_, "Number of attention heads").formerly("--heads");
  if (llama) {
    add("kv_heads", kv_heads_, "Number of key/value heads; default: --n-head");
    add("head_dim", head_dim_, "Size of each head; default: --d-model / --n-head, for qwen3 128");
    list.add("type", type_, "Model type").one_of({"llama", "mistral", "qwen2", "qwen3", "phi3", "arcee"});
  }
  add("d_ff", d_ff_, "Hidden size of the feed-forward networks");
  if (llama) {
    list.add("ffn", ffn_,
             "Feed-forward networks: swiglu, or without a gate (as in arcee) relu2 (squared ReLU) or relu")
        .one_of({"swiglu", "relu2", "relu"})
        .shown_as("swiglu; relu2 for --type arcee");
    list.add("ffn_ratio", ffn_ratio_,
             "Hidden size of the feed-forward networks relative to that of --size, rounded to a multiple of "
             "8; default: 1, or 1.5 without a gate (the same number of parameters)")
        .range(0.01, 100.0)
        .shown_as("");
  }
  if (llama)
    list.add("tied", tied_, "Share the token embedding's matrix with the LM head");
  else
    list.add("untied", untied_, "Give the LM head a separate matrix");
  return list;
}

/// Text, its tokenizer, and how long to train: run.json keeps what follows from them.
train::SettingList LanguageFlags::text_list() {
  train::SettingList list(train::Kept::never);
  list.group("Data");
  list.add("text", text.files, "Text files, one document each");
  list.add("tokenizer", text.tokenizer,
           "tokenizer.json, .model file or directory; default: that of --data or --model, else one trained "
           "on --text");
  list.add("tokenizer_kind", text.kind, "Kind of tokenizer to train on --text")
      .one_of({"character", "bpe", "byte"});
  list.add("vocab_size", text.vocab_size, "Vocabulary size of a bpe tokenizer trained on --text")
      .range(int64_t{257}, (int64_t{1} << 22) - 1);
  list.add("validation", text.validation, "Share of each document, at its end, held out for validation")
      .range(0.0, 0.9);
  list.add("piece", text.piece,
           "Cut the text into documents of about this many bytes, each with its held-out share; 0: one "
           "document per file")
      .range(int64_t{0}, int64_t{1} << 40);
  list.group("Training");
  list.add("epochs", epochs, "Epochs over the training text, instead of --steps")
      .range(1e-6, 1e6)
      .shown_as("");
  list.add("minutes", minutes,
           "Training time in minutes, instead of --steps; estimated from the time of the first few steps; "
           "with --epochs at most those")
      .range(1e-6, 1e6)
      .shown_as("");
  return list;
}

void LanguageFlags::add_sizes(CLI::App& command, const char* default_size, bool with_precision) {
  size_ = default_size;
  add_flags(command, model_list());
  if (with_precision) precision.add_to(command);
  train::SettingList batch;
  job_.add_sizes(batch);
  job_.factors.add_to(batch);
  job_.sparse24.add_to(batch);
  job_.weights24.add_to(batch);
  add_flags(command, batch);
}

void LanguageFlags::add_vocabulary(CLI::App& command) {
  vocabulary_ = std::visit([](const auto& model) { return model.vocabulary; }, job_.model);
  train::SettingList list(train::Kept::never);
  list.group("Model");
  list.add("vocab_size", vocabulary_, "Vocabulary size").range(int64_t{1}, train::LanguageSettings::kLargest);
  add_flags(command, list);
}

void LanguageFlags::add_training(CLI::App& command, const char* default_size) {
  size_ = default_size, trains_ = true;
  add_flags(command, text_list());
  add_any_bytes(command, text.any_bytes)->group("Data");
  add_flags(command, job_.list());
  add_flags(command, model_list());
  precision.add_to(command);
}

/// Sizes are those of SwiGLU networks, whose gate is a third of the parameters.
void LanguageFlags::set_ffn(models::LlamaConfig& model) const {
  const std::string ffn = !ffn_.empty() ? ffn_ : type_ == "arcee" ? "relu2" : "swiglu";
  if (ffn != "swiglu") {
    if (type_ != "llama" && type_ != "arcee")
      throw UsageError("--ffn " + ffn + " and --type " + type_ + ": its networks have a gate; leave one out");
    model.family = models::LlamaFamily::arcee;
    model.gated = false;
    model.activation = ffn == "relu" ? ops::Activation::relu : ops::Activation::relu_squared;
  } else if (type_ == "arcee") {
    throw UsageError("--ffn swiglu and --type arcee: its networks have no gate; leave one out");
  }
  if (d_ff_ && ffn_ratio_ > 0) throw UsageError("--d-ff and --ffn-ratio: both set the hidden size; give one");
  const double ratio = ffn_ratio_ > 0 ? ffn_ratio_ : model.gated ? 1 : 1.5;
  if (!d_ff_ && ratio != 1)
    model.d_ff = std::max<int64_t>(8, std::llround(double(model.d_ff) * ratio / 8) * 8);
}

train::LanguageSettings LanguageFlags::job(const train::Given& given, std::optional<Device> device) const {
  train::LanguageSettings job = job_;
  try {
    job.factors.check_given(given);
    job.check_optimizer_flags(given);
    job.sparse24.check_given(given, job.weights24.on());
    job.weights24.check_given(given);
    // Settings that a number of steps limits are checked again when it is known.
    if (!trains_ || epochs > 0 || minutes > 0) job.steps = train::LanguageSettings::kLargest;
    train::apply_size(job.model, size_);
    std::visit(
        [&](auto& model) {
          if (layers_) model.layers = layers_;
          if (d_model_) model.d_model = d_model_;
          if (heads_) model.heads = heads_;
          if (d_ff_) model.d_ff = d_ff_;
          if (vocabulary_) model.vocabulary = vocabulary_;
          model.positions = job.length;
          if constexpr (requires { model.kv_heads; }) {
            model.kv_heads = kv_heads_ ? kv_heads_ : model.heads;
            model.family = models::parse_llama_family(type_);
            model.head_dim = head_dim_ ? head_dim_ : model.qk_norm() ? 128 : 0;
            model.tied = tied_;
            set_ffn(model);
          } else {
            model.tied = !untied_;
            model.embedding_dropout = model.residual_dropout = job.dropout;
          }
        },
        job.model);
    if (device) job.set_precision(precision.on(*device));
    if (job.start.empty())
      job.validate();
    else
      job.factors.validate(true);  // the rest needs the sizes of --model
  } catch (const Error& error) {
    throw UsageError(error.what());
  }
  return job;
}

}  // namespace tessera::cli
