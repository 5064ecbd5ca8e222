#include "cli/language_flags.h"

#include <limits>

#include "runtime/error.h"

namespace tessera::cli {
namespace {

const CLI::Validator& sizes() {
  static const CLI::Validator validator = whole(1, train::LanguageSettings::kLargest);
  return validator;
}

}  // namespace

LanguageFlags::LanguageFlags(bool llama) {
  if (llama) job_.model = models::LlamaConfig{};
}

void LanguageFlags::add_sizes(CLI::App& command, const char* default_size, bool with_precision) {
  const bool llama = job_.is_llama();
  const auto add = [&](const char* flag, int64_t& value, const char* what, const char* group) {
    // What is not given is that of --size: a default to show would be a wrong one.
    auto* option = command.add_option(flag, value, what)->check(sizes())->group(group);
    if (value == 0) option->default_str("");
  };
  size_ = default_size;
  command.add_option("--size", size_, "Sizes known by a name; those given by themselves win")
      ->check(CLI::IsMember(train::size_names(llama)))
      ->group("Model");
  add("--layers", layers_, "Blocks", "Model");
  add("--d-model", d_model_, "Width", "Model");
  add("--heads,--n-head", heads_, "Attention heads", "Model");
  if (llama) add("--kv-heads", kv_heads_, "Heads of keys and values; default: as many as heads", "Model");
  add("--d-ff", d_ff_, "Hidden width of the MLPs", "Model");
  if (llama)
    command.add_flag("--tied", tied_, "The head is the token table")->group("Model");
  else
    command.add_flag("--untied", untied_, "The head has a matrix of its own")->group("Model");
  if (with_precision) precision.add_to(command);
  add("--length", job_.length, "Tokens of a sequence", "Data");
  add("--batch,--batch-size", job_.batch, "Sequences of a micro-batch", "Data");
}

void LanguageFlags::add_vocabulary(CLI::App& command) {
  vocabulary_ = std::visit([](const auto& model) { return model.vocabulary; }, job_.model);
  command.add_option("--vocab-size", vocabulary_, "Tokens that there are")->check(sizes())->group("Model");
}

void LanguageFlags::add_training(CLI::App& command) {
  const auto share = [&](const char* flag, double& value, const char* what, const char* group, double most) {
    command.add_option(flag, value, what)->check(kFinite)->check(between(0.0, most))->group(group);
  };
  command.add_option("--text", text.files, "Text files; a document each")->group("Data");
  add_any_bytes(command, text.any_bytes)->group("Data");
  command.add_option("--data", data, "Folder of token shards (tessera data tokenize) in place of --text")
      ->group("Data");
  command
      .add_option("--tokenizer", text.tokenizer,
                  "tokenizer.json, .model or folder; default: that of --data or --model, else made of --text")
      ->group("Data");
  command.add_option("--tokenizer-kind", text.kind, "What is made of --text")
      ->check(CLI::IsMember({"character", "bpe", "byte"}))
      ->group("Data");
  command.add_option("--vocab-size", text.vocab_size, "Tokens of a bpe made of --text")
      ->check(kDecimal)
      ->check(CLI::Range(257, (1 << 22) - 1))
      ->group("Data");
  share("--validation", text.validation, "Share at the end of each document that is held out", "Data", 0.9);
  command
      .add_option("--piece", text.piece,
                  "Documents are pieces of about so many bytes, each with its held-out share; 0: files")
      ->check(kDecimal)
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 40))
      ->group("Data");
  command
      .add_option(
          "--stride", job_.stride,
          "From the beginning of a sequence to that of the next; default: 1 where the run reads the text "
          "more than once, else the length")
      ->check(sizes())
      ->default_str("")
      ->group("Data");
  command.add_flag("--documents", job_.documents, "Sequences end where documents do, packed without padding")
      ->group("Data");
  command.add_option("--seed", job_.seed, "Of parameters, order and samples")
      ->check(kDecimal)
      ->check(CLI::Range(int64_t(0), std::numeric_limits<int64_t>::max()))
      ->group("Data");
  command.add_option("--model", model, "Folder of Hugging Face whose weights to start from")->group("Model");
  share("--dropout", dropout_, "Of embeddings and residual branches", "Model", 0.95);
  command.add_option("--accumulate", job_.accumulate, "Micro-batches a step")
      ->check(sizes())
      ->group("Training");
  command.add_option("--steps", job_.steps, "Training steps")->check(sizes())->group("Training");
  const auto in_place_of_steps = [&](const char* flag, double& value, const char* what) {
    command.add_option(flag, value, what)
        ->check(kFinite)
        ->check(between(1e-6, 1e6))
        ->default_str("")
        ->group("Training");
  };
  in_place_of_steps("--epochs", epochs, "Passes over the training text, in place of --steps");
  in_place_of_steps("--minutes", minutes,
                    "As many steps as fit, by the time of the first few, in place of --steps");
  command.add_option("--lr", job_.lr, "Peak learning rate")
      ->check(kFinite)
      ->check(between(1e-30, 1e30))
      ->group("Training");
  share("--final-lr", job_.final_lr, "Share of it at the end", "Training", 1.0);
  command.add_option("--warmup", job_.warmup, "Steps of linear warm-up, at most half of all")
      ->check(kDecimal)
      ->check(CLI::Range(int64_t(0), train::LanguageSettings::kLargest))
      ->group("Training");
  command.add_option("--schedule", job_.schedule, "Learning rate after warm-up")
      ->check(CLI::IsMember({"constant", "linear", "cosine", "wsd"}))
      ->group("Training");
  share("--weight-decay", job_.weight_decay, "Decoupled; not of norms, biases and tables", "Training", 1e6);
  share("--beta2", job_.beta2, "AdamW's, of the squares", "Training", 0.9999999);
  share("--ema", job_.ema,
        "Evaluate and export averages of the weights that decay by this a step, as 0.999; 0: the weights",
        "Training", 0.9999999);
  share("--clip,--clip-norm", job_.clip_norm, "Largest gradient norm; 0: no clipping", "Training", 1e30);
}

train::LanguageSettings LanguageFlags::job() const {
  train::LanguageSettings job = job_;
  try {
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
            model.tied = tied_;
            job.dropout = dropout_;
          } else {
            model.tied = !untied_;
            model.embedding_dropout = model.residual_dropout = dropout_;
          }
        },
        job.model);
    job.validate();
  } catch (const Error& error) {
    throw UsageError(error.what());
  }
  return job;
}

}  // namespace tessera::cli
