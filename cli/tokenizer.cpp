#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "datasets/tokenize.h"
#include "io/file.h"
#include "io/text_file.h"
#include "io/tokenizer/tokenizer.h"
#include "io/tokenizer/train.h"
#include "io/utf8.h"
#include "runtime/error.h"
#include "runtime/interrupt.h"

namespace tessera::cli {
namespace {

/// GPT-2's is built in; LLaMA-3's as its tokenizer.json has it.
constexpr const char* kLlama3Pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|)"
    R"(\s+(?!\S)|\s+)";

struct TrainArgs {
  std::vector<std::string> text, special = {"<|endoftext|>"};
  std::string out, kind = "bpe", pattern = "gpt2";
  int64_t vocab_size = 4096, least_count = 2;
  bool any_bytes = false;
};

int run_train(const TrainArgs& args, const CLI::App& command) {
  for (const char* of_bpe : {"--vocab-size", "--pattern", "--least-count"})
    if (args.kind != "bpe" && command.get_option(of_bpe)->count() > 0)
      throw UsageError(fmt::format("{}: only for --kind bpe; a {} tokenizer has as many tokens as it needs",
                                   of_bpe, args.kind));
  check_replaceable(args.out);
  const InterruptGuard interrupts(kGivingUp);
  std::vector<std::string> texts;
  uint64_t bytes = 0, invalid = 0;
  for (const std::string& path : args.text) {
    texts.push_back(io::read_text(path, datasets::kLargestText, args.any_bytes));
    bytes += texts.back().size();
    invalid += io::invalid_bytes(texts.back());
  }
  check_not_input(args.out, args.text);  // files all of them: what is a folder has not been read
  const std::string json =
      args.kind == "byte" ? io::byte_tokenizer(args.special)
      : args.kind == "character"
          ? io::character_tokenizer(texts, args.special)
          : io::train_bpe(texts, {.vocab_size = args.vocab_size,
                                  .least_count = args.least_count,
                                  .pattern = args.pattern == "llama3" ? kLlama3Pattern : "",
                                  .special = args.special});
  const io::Tokenizer tokenizer = io::Tokenizer::parse(args.out, json);
  size_t tokens = 0;
  for (const std::string& text : texts) tokens += tokenizer.encode(text).ids.size();
  io::write_file(args.out, json);
  ignore_signals();
  tell_invalid(invalid, bytes);
  fmt::print("{}: {} tokens", args.out, tokenizer.token_count());
  if (tokens > 0)
    fmt::print("; {} bytes are {} tokens, {:.2f} bytes per token", bytes, tokens,
               double(bytes) / double(tokens));
  fmt::print("\n");
  if (args.kind == "bpe" && tokenizer.token_count() < args.vocab_size)
    fmt::print("fewer than the {} asked for: no pair occurs {} times any more\n", args.vocab_size,
               args.least_count);
  return 0;
}

struct CodeArgs {
  std::string tokenizer, text, file, pair;
  std::vector<int32_t> ids;
  bool tokens = false, json = false, plain = false, keep_special = false, any_bytes = false;
  int64_t max_length = 0;
};

int run_encode(const CodeArgs& args, bool has_text, bool has_pair) {
  const io::Tokenizer tokenizer = io::Tokenizer::load(args.tokenizer);
  const std::string text =
      has_text ? args.text : read_given_text(args.file, datasets::kLargestText, args.any_bytes);
  const io::EncodeOptions options{.special = !args.plain, .max_length = args.max_length};
  const io::Encoding encoding =
      has_pair ? tokenizer.encode_pair(text, args.pair, options) : tokenizer.encode(text, options);
  if (args.json) {
    nlohmann::json tokens = nlohmann::json::array();
    for (const int32_t id : encoding.ids) tokens.push_back(tokenizer.token(id));
    fmt::print("{}\n", io::json_text({{"ids", encoding.ids}, {"types", encoding.types}, {"tokens", tokens}}));
    return 0;
  }
  for (size_t i = 0; i < encoding.ids.size(); ++i)
    if (args.tokens)
      fmt::print("{:>8}  {}\n", encoding.ids[i], io::json_text(tokenizer.token(encoding.ids[i])));
    else
      fmt::print("{}{}", i ? " " : "", encoding.ids[i]);
  if (!args.tokens) fmt::print("\n");
  return 0;
}

std::vector<int32_t> read_ids(const std::string& text) {
  std::vector<int32_t> ids;
  std::string word;
  for (const char c : text + " ") {
    if (c != ' ' && c != '\n' && c != '\t' && c != '\r' && c != ',') {
      word += c;
    } else if (!word.empty()) {
      const bool digits = word.find_first_not_of("0123456789") == std::string::npos && word.size() < 10;
      check(digits, "tokenizer: \"", word.substr(0, 40), "\" is not a token id");
      ids.push_back(std::stoi(word));
      word.clear();
    }
  }
  return ids;
}

int run_decode(const CodeArgs& args) {
  const io::Tokenizer tokenizer = io::Tokenizer::load(args.tokenizer);
  const std::vector<int32_t> ids = !args.ids.empty()
                                       ? args.ids
                                       : read_ids(args.file.empty() || args.file == "-"
                                                      ? standard_input()
                                                      : io::read_file(args.file, datasets::kLargestText));
  fmt::print("{}\n", tokenizer.decode(ids, !args.keep_special));
  return 0;
}

int run_info(const CodeArgs& args) {
  const io::Tokenizer tokenizer = io::Tokenizer::load(args.tokenizer);
  const io::SpecialTokens& special = tokenizer.special();
  const std::vector<std::pair<const char*, std::optional<int32_t>>> roles = {
      {"bos", special.bos}, {"eos", special.eos}, {"pad", special.pad},  {"unk", special.unk},
      {"cls", special.cls}, {"sep", special.sep}, {"mask", special.mask}};
  nlohmann::json named = nlohmann::json::object();
  for (const auto& [role, id] : roles)
    if (id) named[role] = {{"id", *id}, {"token", tokenizer.token(*id)}};
  if (args.json) {
    fmt::print("{}\n", io::json_text({{"file", tokenizer.path()},
                                      {"kind", tokenizer.kind()},
                                      {"tokens", tokenizer.token_count()},
                                      {"vocab_size", tokenizer.vocab_size()},
                                      {"fingerprint", tokenizer.fingerprint()},
                                      {"special", named}},
                                     2));
    return 0;
  }
  fmt::print("{:<12} {}\n{:<12} {}\n{:<12} {}\n{:<12} {}\n{:<12} {}\n", "file", tokenizer.path(), "kind",
             tokenizer.kind(), "tokens", tokenizer.token_count(), "vocab size", tokenizer.vocab_size(),
             "fingerprint", tokenizer.fingerprint());
  for (const auto& [role, token] : named.items())
    fmt::print("{:<12} {} {}\n", role, token["id"].get<int32_t>(), token["token"].get<std::string>());
  return 0;
}

}  // namespace

void add_tokenizer(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand("tokenizer", "Train tokenizers, encode and decode text");
  command->require_subcommand(1);

  auto* train =
      command->add_subcommand("train", "Train a tokenizer.json on text; the same text gives the same file");
  auto args = std::make_shared<TrainArgs>();
  add_text_files(*train, args->text, args->any_bytes);
  train->add_option("--out", args->out, "The tokenizer.json to write")->required();
  train->add_option("--kind", args->kind, "Kind of tokenizer: bpe (byte-level), character or byte")
      ->check(CLI::IsMember({"bpe", "character", "byte"}));
  train
      ->add_option("--vocab-size", args->vocab_size,
                   "bpe: vocabulary size, including special tokens and the 256 bytes")
      ->check(kDecimal)
      ->check(CLI::Range(257, (1 << 22) - 1));
  train->add_option("--pattern", args->pattern, "bpe: pattern that splits text into words, gpt2 or llama3")
      ->check(CLI::IsMember({"gpt2", "llama3"}));
  train
      ->add_option("--least-count", args->least_count,
                   "bpe: minimum number of occurrences of a pair to merge")
      ->check(kDecimal)
      ->check(CLI::Range(1, 1 << 30));
  train->add_option("--special", args->special, "Special tokens, which get the first ids");
  train->callback([&action, args, train] { action = [args, train] { return run_train(*args, *train); }; });

  const auto add = [&](const char* name, const char* what) {
    auto* sub = command->add_subcommand(name, what);
    auto code = std::make_shared<CodeArgs>();
    add_tokenizer_path(*sub, "tokenizer", code->tokenizer);
    return std::make_pair(sub, code);
  };
  {
    auto [sub, code] = add("encode", "Encode text to token ids");
    auto* const text = sub->add_option("--text", code->text, "Text; default: --file, else standard input")
                           ->check(kMayBeEmpty);
    sub->add_option("--file", code->file, "Text file, or - for standard input")->excludes(text);
    add_any_bytes(*sub, code->any_bytes);
    auto* const pair =
        sub->add_option("--pair", code->pair, "Second text of a BERT sentence pair")->check(kMayBeEmpty);
    sub->add_option("--max-length", code->max_length, "Truncate to this many tokens; 0: no limit")
        ->check(kDecimal)
        ->check(CLI::Range(0, 1 << 30));
    sub->add_flag("--plain", code->plain, "Do not add the special tokens around the text");
    sub->add_flag("--tokens", code->tokens, "Print one line per token, with its text");
    sub->add_flag("--json", code->json, "Print the result as JSON");
    sub->callback([&action, code = code, text, pair] {
      action = [code, has_text = text->count() > 0, has_pair = pair->count() > 0] {
        return run_encode(*code, has_text, has_pair);
      };
    });
  }
  {
    auto [sub, code] = add("decode", "Decode token ids to text");
    auto* const ids = sub->add_option("--ids", code->ids, "Token ids; default: --file, else standard input")
                          ->check(kDecimal)
                          ->check(CLI::Range(0, (1 << 22) - 1));
    sub->add_option("--file", code->file, "File of token ids, or - for standard input")->excludes(ids);
    sub->add_flag("--special", code->keep_special, "Keep special tokens");
    sub->callback([&action, code = code] { action = [code] { return run_decode(*code); }; });
  }
  {
    auto [sub, code] = add("info", "Show a tokenizer's kind, size, special tokens and fingerprint");
    sub->add_flag("--json", code->json, "Print the result as JSON");
    sub->callback([&action, code = code] { action = [code] { return run_info(*code); }; });
  }
}

}  // namespace tessera::cli
