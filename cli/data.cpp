#include <fmt/format.h>

#include <atomic>
#include <filesystem>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>

#include "cli/commands.h"
#include "datasets/glue_synthetic.h"
#include "datasets/tokens.h"
#include "io/file.h"
#include "io/tokenizer/tokenizer.h"
#include "runtime/error.h"

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kLargestText = uint64_t{1} << 32;

struct TokenizeArgs {
  std::vector<std::string> text;
  std::string tokenizer, out;
  double validation = 0.1;
  int64_t shard_tokens = int64_t{1} << 27;
  int workers = 1;
};

/// Shards of one part as they fill.
class Part {
 public:
  Part(const TokenizeArgs& args, const char* name, const io::Tokenizer& tokenizer, int64_t end_token)
      : args_(args), name_(name), writer_(tokenizer.vocab_size(), tokenizer.fingerprint(), end_token) {}
  void add(const std::vector<int32_t>& document) {
    if (document.empty()) return;
    writer_.add(document);
    tokens_ += document.size();
    documents_ += 1;
    if (int64_t(writer_.tokens()) >= args_.shard_tokens) write();
  }
  void finish() {
    if (writer_.tokens() > 0) write();
    fmt::print("{}: {} tokens of {} documents in {} shards\n", name_, tokens_, documents_, shards_);
  }

 private:
  void write() { writer_.write((fs::path(args_.out) / datasets::shard_name(name_, shards_++)).string()); }
  const TokenizeArgs& args_;
  std::string name_;
  datasets::TokenShardWriter writer_;
  uint64_t tokens_ = 0, documents_ = 0;
  int64_t shards_ = 0;
};

int run_tokenize(const TokenizeArgs& args) {
  const io::Tokenizer tokenizer = io::Tokenizer::load(args.tokenizer);
  const std::optional<int32_t> end = tokenizer.special().eos;
  io::make_folder(args.out);
  for (const char* part : {"train", "validation"})
    check(!fs::exists(fs::path(args.out) / datasets::shard_name(part, 0)), "data: ", args.out,
          " has shards of the part ", part, " already; name another folder or remove them");
  // The tokenizer stays with its tokens: whoever trains on them decodes with it.
  if (const fs::path file = tokenizer.path(); file.extension() == ".json" && file.filename() != "vocab.json")
    io::write_file((fs::path(args.out) / "tokenizer.json").string(),
                   io::read_file(file.string(), kLargestText));
  Part train(args, "train", tokenizer, end ? *end : -1),
      validation(args, "validation", tokenizer, end ? *end : -1);

  // Texts are encoded by several threads, a group at a time, and written in their order.
  const size_t group = size_t(args.workers) * 4;
  uint64_t bytes = 0;
  struct Encoded {
    std::vector<int32_t> train, validation;
    uint64_t bytes = 0;
    std::exception_ptr error;
  };
  for (size_t first = 0; first < args.text.size(); first += group) {
    const size_t count = std::min(group, args.text.size() - first);
    std::vector<Encoded> encoded(count);
    std::atomic<size_t> next{0};
    const auto work = [&] {
      const io::Tokenizer own = tokenizer;
      for (size_t i; (i = next++) < count;) try {
          const std::string text = io::read_file(args.text[first + i], kLargestText);
          const datasets::TextSplit split = datasets::split_text(text, args.validation);
          encoded[i].bytes = text.size();
          for (auto [part, to] : {std::pair(split.train, &encoded[i].train),
                                  std::pair(split.validation, &encoded[i].validation)}) {
            if (part.empty()) continue;
            *to = own.encode(part, {.special = false}).ids;
            if (end) to->push_back(*end);
          }
        } catch (...) {
          encoded[i].error = std::current_exception();
        }
    };
    std::vector<std::thread> threads;
    for (int t = 1; t < args.workers; ++t) threads.emplace_back(work);
    work();
    for (std::thread& thread : threads) thread.join();
    for (const Encoded& one : encoded) {
      if (one.error) std::rethrow_exception(one.error);
      train.add(one.train);
      validation.add(one.validation);
      bytes += one.bytes;
    }
  }
  train.finish();
  validation.finish();
  fmt::print("{} bytes of {} files; documents end with {}; tokenizer {}\n", bytes, args.text.size(),
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
                   {"vocab_size", info.vocab_size},
                   {"end_token", info.end_token},
                   {"fingerprint", info.fingerprint}});
    if (!json)
      fmt::print("{}: {} tokens, {} documents, vocabulary {}, tokenizer {}, checksum good\n", path,
                 info.tokens, info.documents, info.vocab_size, info.fingerprint);
  }
  if (json) fmt::print("{}\n", all.dump(2));
  return 0;
}

struct GlueArgs {
  std::string out, task = "all";
  datasets::SyntheticGlueOptions options;
};

int run_glue(const GlueArgs& args) {
  for (const datasets::GlueInfo& info : datasets::glue_tasks()) {
    if (args.task != "all" && datasets::parse_glue_task(args.task).task != info.task) continue;
    datasets::write_synthetic_glue(info.task, args.out, args.options);
    fmt::print("{}: {} to train, {} to develop, {} to test\n", (fs::path(args.out) / info.folder).string(),
               args.options.train, args.options.dev, args.options.test);
  }
  return 0;
}

}  // namespace

void add_data(CLI::App& app, Action& action) {
  auto* command =
      app.add_subcommand("data", "Prepare data: tokens of text, small tasks in the shape of GLUE's");
  command->require_subcommand(1);

  auto* tokenize =
      command->add_subcommand("tokenize", "Text files to shards of tokens; each file is a document");
  auto args = std::make_shared<TokenizeArgs>();
  tokenize->add_option("--text", args->text, "Text files")->required();
  tokenize
      ->add_option("--tokenizer", args->tokenizer, "tokenizer.json, vocab file, .model, or a folder with one")
      ->required();
  tokenize->add_option("--out", args->out, "Folder for the shards; made if it is not there")->required();
  tokenize
      ->add_option("--validation", args->validation,
                   "Share at the end of each file that is kept for validation")
      ->check(kFinite)
      ->check(CLI::Range(0.0, 0.99));
  tokenize->add_option("--shard-tokens", args->shard_tokens, "A shard is closed when it has so many")
      ->check(kDecimal)
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40));
  tokenize->add_option("--workers", args->workers, "Threads; the files are the same")
      ->check(kDecimal)
      ->check(CLI::Range(1, 256));
  tokenize->callback([&action, args] { action = [args] { return run_tokenize(*args); }; });

  auto* info =
      command->add_subcommand("info", "What is in shards of tokens; reads them whole and checks them");
  auto paths = std::make_shared<std::vector<std::string>>();
  auto json = std::make_shared<bool>(false);
  info->add_option("shards", *paths, "Shards")->required();
  info->add_flag("--json", *json, "Machine-readable");
  info->callback([&action, paths, json] { action = [paths, json] { return run_info(*paths, *json); }; });

  auto* glue = command->add_subcommand("glue", "Write small synthetic tasks in the layout of GLUE's files");
  auto glue_args = std::make_shared<GlueArgs>();
  glue->add_option("--out", glue_args->out, "Folder; each task gets one in it")->required();
  glue->add_option("--task", glue_args->task, "all, or cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli");
  glue->add_option("--seed", glue_args->options.seed, "Decides everything")
      ->check(kDecimal)
      ->check(CLI::NonNegativeNumber);
  for (const auto& [flag, count, what] :
       {std::tuple("--train", &glue_args->options.train, "Examples to train"),
        std::tuple("--dev", &glue_args->options.dev, "Examples to develop"),
        std::tuple("--test", &glue_args->options.test, "Examples to test")})
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
