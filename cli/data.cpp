#include <fmt/format.h>

#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "datasets/glue_synthetic.h"
#include "datasets/tokenize.h"
#include "datasets/tokens.h"
#include "io/file.h"
#include "io/tokenizer/tokenizer.h"
#include "io/utf8.h"
#include "report/progress.h"
#include "runtime/error.h"
#include "runtime/interrupt.h"
#include "train/tokenizer_files.h"

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;

/// "3 documents (1 of them empty)": without text in this part, as short documents are in one of the parts.
std::string documents_text(uint64_t documents, uint64_t empty) {
  return fmt::format("{} documents{}", documents, empty > 0 ? fmt::format(" ({} of them empty)", empty) : "");
}

struct TokenizeArgs {
  std::vector<std::string> text;
  std::string tokenizer, out;
  datasets::TokenizeOptions options;
};

int run_tokenize(const TokenizeArgs& args) {
  const io::Tokenizer tokenizer = io::Tokenizer::load(args.tokenizer);
  const InterruptGuard interrupts(kGivingUp);
  io::AtomicFolder files(args.out, io::AtomicFolder::Existing::merge, datasets::check_no_shards);
  const datasets::Tokenized done = datasets::tokenize_files(args.text, tokenizer, files.path(), args.options);
  // The tokenizer stays with its tokens: training on them needs it for decoding.
  train::copy_tokenizer(args.tokenizer, files.path());
  files.publish();
  ignore_signals();
  tell_invalid(done.invalid, done.bytes);
  if (args.options.validation > 0 && done.validation.tokens == 0)
    report::tell(fmt::format(
        "tessera: warning: --validation {:g} holds nothing out: a held-out part begins with a line of its "
        "own, in a text of one line with a word; give longer texts (or a larger --piece), or --validation "
        "0\n",
        args.options.validation));
  for (const auto& [name, part] : {std::pair("train", done.train), std::pair("validation", done.validation)})
    fmt::print("{}: {} tokens, {}, {} shards\n", name, part.tokens,
               documents_text(part.documents, part.empty_documents), part.shards);
  if (done.one_line > 0) fmt::print("documents of one line, cut at a space: {}\n", done.one_line);
  const std::optional<int32_t> end = tokenizer.special().eos;
  fmt::print("{} bytes of {} files; documents end with {}; tokenizer {}\n", done.bytes, args.text.size(),
             end ? "token " + std::to_string(*end) + " (" + tokenizer.token(*end) + ")" : "no token",
             tokenizer.fingerprint());
  return 0;
}

int run_info(const std::vector<std::string>& paths, bool json) {
  nlohmann::json all = nlohmann::json::array();
  for (const std::string& path : paths) {
    const datasets::TokenShard shard(path);
    const datasets::ShardInfo& info = shard.info();
    all.push_back({{"file", path},
                   {"tokens", info.tokens},
                   {"documents", info.documents},
                   {"empty_documents", shard.empty_documents()},
                   {"vocab_size", info.vocab_size},
                   {"end_token", info.end_token},
                   {"fingerprint", info.fingerprint}});
    if (!json)
      fmt::print("{}: {} tokens, {}, vocabulary {}, tokenizer {}, checksum good\n", path, info.tokens,
                 documents_text(info.documents, shard.empty_documents()), info.vocab_size, info.fingerprint);
  }
  if (json) fmt::print("{}\n", io::json_text(all, 2));
  return 0;
}

struct GlueArgs {
  std::string out, task = "all";
  datasets::SyntheticGlueOptions options;
};

int run_glue(const GlueArgs& args) {
  const InterruptGuard interrupts(kGivingUp);
  for (const datasets::GlueInfo& info : datasets::glue_tasks()) {
    if (args.task != "all" && datasets::parse_glue_task(args.task).task != info.task) continue;
    check_interrupt();
    datasets::write_synthetic_glue(info.task, args.out, args.options);
    fmt::print("{}: {} to train, {} to develop, {} to test\n", (fs::path(args.out) / info.folder).string(),
               args.options.train, args.options.dev, args.options.test);
  }
  return 0;
}

}  // namespace

void add_data(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand("data", "Prepare data: tokenize text, generate small GLUE-like tasks");
  command->require_subcommand(1);

  auto* tokenize =
      command->add_subcommand("tokenize", "Tokenize text files into shards; each file is a document");
  auto args = std::make_shared<TokenizeArgs>();
  add_text_files(*tokenize, args->text, args->options.any_bytes);
  add_tokenizer_path(*tokenize, "--tokenizer", args->tokenizer);
  tokenize->add_option("--out", args->out, "Directory for the shards; created if it does not exist")
      ->required();
  tokenize
      ->add_option("--validation", args->options.validation,
                   "Fraction at the end of each document that becomes the validation split")
      ->check(kFinite)
      ->check(between(0.0, 0.99));
  tokenize
      ->add_option("--piece", args->options.piece,
                   "Cut files into documents of about this many bytes, each with its own validation split; "
                   "0: one document per file")
      ->check(kDecimal)
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 40));
  tokenize
      ->add_option("--shard-tokens", args->options.shard_tokens,
                   "Tokens of a shard after which the next one begins; no document is split")
      ->check(kDecimal)
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40));
  tokenize
      ->add_option("--workers", args->options.workers, "Number of threads; the result does not depend on it")
      ->check(kDecimal)
      ->check(CLI::Range(1, 256));
  tokenize->callback([&action, args] { action = [args] { return run_tokenize(*args); }; });

  auto* info = command->add_subcommand("info", "Show and verify the contents of token shards");
  auto paths = std::make_shared<std::vector<std::string>>();
  auto json = std::make_shared<bool>(false);
  info->add_option("shards", *paths, "Shards")->required();
  info->add_flag("--json", *json, "Print the result as JSON");
  info->callback([&action, paths, json] { action = [paths, json] { return run_info(*paths, *json); }; });

  auto* glue = command->add_subcommand("glue", "Write small synthetic tasks in the layout of GLUE's files");
  auto glue_args = std::make_shared<GlueArgs>();
  glue->add_option("--out", glue_args->out, "Output directory; each task gets a subdirectory")->required();
  glue->add_option("--task", glue_args->task, "all, or cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli");
  glue->add_option("--seed", glue_args->options.seed, "Random seed")
      ->check(kDecimal)
      ->check(CLI::NonNegativeNumber);
  for (const auto& [flag, count, what] :
       {std::tuple("--train", &glue_args->options.train, "Training examples per task"),
        std::tuple("--dev", &glue_args->options.dev, "Development examples per task"),
        std::tuple("--test", &glue_args->options.test, "Test examples per task")})
    glue->add_option(flag, *count, what)->check(kDecimal)->check(CLI::Range(1, 10'000'000));
  glue->callback([&action, glue_args] {
    if (glue_args->task != "all") try {
        datasets::parse_glue_task(glue_args->task);
      } catch (const Error& error) {
        throw CLI::ValidationError("--task", error.what());
      }
    action = [glue_args] { return run_glue(*glue_args); };
  });
}

}  // namespace tessera::cli
