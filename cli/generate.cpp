#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/griffin_flag.h"
#include "cli/language_folder.h"
#include "cli/stop_texts.h"
#include "cli/tensor_parallel_flags.h"
#include "cli/train_run.h"
#include "io/file.h"
#include "io/utf8.h"
#include "models/generate.h"
#include "report/progress.h"
#include "runtime/interrupt.h"
#include "sparsity/griffin.h"

namespace tessera::cli {
namespace {

constexpr uint64_t kLargestPrompt = uint64_t{1} << 26;
using Clock = std::chrono::steady_clock;

struct GenerateArgs {
  std::string model, file, dtype, device, json, graph = "on";
  std::vector<std::string> prompts, stops;
  SparseFlags sparse;
  TensorParallelFlags parallel;
  std::optional<double> griffin;
  int64_t most_tokens = 256, samples = 1;
  models::Sampling sampling;
  bool greedy = false, ignore_end = false, any_bytes = false;
  uint64_t seed = 0;
};

/// One text as it grows: tokens become characters, characters are held back while a stop text may begin.
struct Text {
  Text(const io::Tokenizer& tokenizer, const std::vector<std::string>& stops)
      : stream(tokenizer), stops(stops) {}
  io::TokenStream stream;
  StopTexts stops;
  std::vector<int64_t> tokens;
  std::string text;
  std::string end = "length";
};

/// Rank 0 writes; the others come to the same texts.
class Writer {
 public:
  Writer(const GenerateArgs& args, const pretrained::LoadedLanguageModel& language,
         const io::Tokenizer& tokenizer, const dist::World& world, const std::vector<int64_t>& rooms)
      : args_(args), language_(language), tokenizer_(tokenizer), world_(world), rooms_(rooms) {
    for (size_t i = 0; i < rooms.size(); ++i) texts.emplace_back(tokenizer, args.stops);
  }

  bool take(size_t number, int64_t token) {
    if (number == 0) times.push_back(Clock::now());
    // A signal may have come to one rank: all end after the same token.
    if (number <= last_) interrupted_ = world_.host().largest(InterruptGuard::signal_received()) != 0;
    last_ = number;
    Text& text = texts[number];
    text.tokens.push_back(token);
    const auto& ends = language_.config.end_tokens;
    if (!args_.ignore_end && std::find(ends.begin(), ends.end(), token) != ends.end()) {
      text.end = "end token";
      return false;
    }
    // A model may have more rows than the tokenizer has tokens.
    if (tokenizer_.has(int32_t(token))) give(text, text.stops.next(text.stream.next(int32_t(token))));
    if (text.stops.found()) text.end = "stop text";
    if (interrupted_) text.end = "interrupted";
    const int64_t room = rooms_[number];
    if (text.end == "length" && room < args_.most_tokens && int64_t(text.tokens.size()) == room)
      text.end = "last position";
    return text.end == "length";
  }
  void finish() {
    for (Text& text : texts) {
      if (text.stops.found()) continue;
      give(text, text.stops.next(text.stream.finish()));
      if (!text.stops.found()) give(text, text.stops.finish());
    }
    if (!world_.leads()) return;
    if (texts.size() == 1) {
      fmt::print("\n");
    } else {
      for (size_t i = 0; i < texts.size(); ++i) fmt::print("--- {} ---\n{}\n", i + 1, texts[i].text);
    }
    std::fflush(stdout);
  }

  bool leads() const { return world_.leads(); }

  std::vector<Text> texts;
  std::vector<Clock::time_point> times;  // of the first text's tokens

 private:
  /// One text is written as it comes; several, one after the other at the end.
  void give(Text& text, const std::string& piece) {
    text.text += piece;
    if (texts.size() > 1 || piece.empty() || !world_.leads()) return;
    std::fwrite(piece.data(), 1, piece.size(), stdout);
    std::fflush(stdout);
  }
  const GenerateArgs& args_;
  const pretrained::LoadedLanguageModel& language_;
  const io::Tokenizer& tokenizer_;
  const dist::World& world_;
  const std::vector<int64_t> rooms_;                  // new tokens that each text has positions for
  size_t last_ = std::numeric_limits<size_t>::max();  // text that got a token; a new step when it falls
  bool interrupted_ = false;
};

std::vector<std::string> read_prompts(const GenerateArgs& args) {
  if (!args.prompts.empty()) return args.prompts;
  return {read_given_text(args.file, kLargestPrompt, args.any_bytes)};
}

std::vector<int64_t> tokens_of(const std::string& prompt, const pretrained::LoadedLanguageModel& language,
                               const io::Tokenizer& tokenizer) {
  const std::vector<int32_t> ids = tokenizer.encode(prompt).ids;
  check_vocabulary(language, ids, tokenizer.path());
  std::vector<int64_t> tokens(ids.begin(), ids.end());
  if (const auto first = language.first_token(); tokens.empty() && first) tokens.push_back(*first);
  check(!tokens.empty(), "generate: the prompt is empty, and ", language.folder,
        "/config.json names no bos_token_id of the model's vocabulary to begin with; give a prompt");
  return tokens;
}

/// The linear layers, with what their gates did on the texts.
nlohmann::json sparse_layers(pretrained::LoadedLanguageModel& language, const models::Generator::Texts& given,
                             const Writer& writer) {
  std::map<std::string, pretrained::GateCounts> counts;
  const bool has_gates = std::ranges::any_of(language.sparse, [](const pretrained::SparseModule& module) {
    return module.gate.kind != ops::Gate::Kind::none;
  });
  if (has_gates) {
    models::Generator::Texts texts;
    for (size_t i = 0; i < writer.texts.size(); ++i) {
      texts.push_back(given[std::min(i, given.size() - 1)]);
      const std::vector<int64_t>& made = writer.texts[i].tokens;  // the last of them was never run
      if (!made.empty()) texts.back().insert(texts.back().end(), made.begin(), made.end() - 1);
    }
    counts = pretrained::count_gates(language.model, texts);
  }
  return sparse_json(language.sparse, counts);
}

/// Says which texts ended at the model's last position.
void tell_full(const GenerateArgs& args, const pretrained::LoadedLanguageModel& language,
               const Writer& writer, const models::Generator::Texts& given) {
  for (size_t i = 0; i < writer.texts.size(); ++i) {
    const Text& text = writer.texts[i];
    if (text.end != "last position" || !writer.leads()) continue;
    const std::string which = writer.texts.size() > 1 ? fmt::format("text {} ", i + 1) : "";
    report::tell(
        fmt::format("tessera: {}stopped after {} of {} new tokens: with the {} of the prompt they fill "
                    "all {} {} of the model\n",
                    which, text.tokens.size(), args.most_tokens, given[std::min(i, given.size() - 1)].size(),
                    language.model.longest(), limit_of(language.model)));
  }
}

void check_flags_of_ranks(const GenerateArgs& args) {
  if (args.parallel.ranks == 1) return;
  if (args.griffin) throw UsageError("--griffin: of a model on one rank; leave --tensor-parallel out");
  if (args.prompts.empty() && (args.file.empty() || args.file == "-"))
    throw UsageError("--tensor-parallel: ranks share no standard input; give --prompt or --prompt-file");
}

int generate_texts(const GenerateArgs& args, const models::GenerateOptions& options, const dist::World& world,
                   Device device, const std::vector<std::string>& prompts) {
  const std::string folder = language_folder(args.model);
  const io::Tokenizer tokenizer = io::Tokenizer::load(folder);
  const size_t count = std::max(prompts.size(), size_t(args.samples));
  const auto sparse = args.sparse.options(folder, int64_t(count));
  if (sparse && args.griffin)
    throw UsageError(
        "--griffin: only a dense model takes it; leave out gates, and give a model that is not compressed");
  if (sparse && world.size() > 1)
    throw UsageError(
        "--tensor-parallel: only a dense model takes it; leave out compressed weights and gates");
  pretrained::LoadedLanguageModel language =
      load_language(folder, device, args.dtype, sparse, args.parallel.share(world, device));
  tell_shared(world, device);
  models::Generator::Texts given;
  for (const std::string& prompt : prompts) given.push_back(tokens_of(prompt, language, tokenizer));
  size_t longest = 0;
  for (const auto& tokens : given) longest = std::max(longest, tokens.size());
  const int64_t positions = language.model.longest();
  check(int64_t(longest) <= positions, "generate: the prompt has ", longest, " tokens; the model of ",
        language.folder, " has ", positions, " ", limit_of(language.model));
  std::vector<int64_t> rooms;
  int64_t capacity = 0;  // of the longest text, without its last token, which is never run
  for (size_t i = 0; i < count; ++i) {
    const int64_t prompt = int64_t(given[std::min(i, given.size() - 1)].size());
    rooms.push_back(positions - prompt + 1);
    capacity = std::max(capacity, prompt + std::min(args.most_tokens, rooms.back()) - 1);
  }
  Writer writer(args, language, tokenizer, world, rooms);
  bool was_graph = false;
  const InterruptGuard guard;
  Clock::time_point begin;
  if (args.most_tokens > 0) {
    models::Generator generator =
        args.griffin
            ? models::Generator(sparsity::griffin(language.model, int64_t(count), capacity, *args.griffin))
            : models::Generator(language.model, int64_t(count), capacity);
    device.synchronize();
    begin = Clock::now();
    end_at_failure(world, device, [&] {
      generator(given, options,
                [&](int64_t text, int64_t token) { return writer.take(size_t(text), token); });
    });
    was_graph = generator.is_graph();
  }
  writer.finish();
  tell_full(args, language, writer, given);

  const auto milliseconds = [](auto duration) {
    return std::chrono::duration<double, std::milli>(duration).count();
  };
  const size_t steps = writer.times.size();
  const double first = steps ? milliseconds(writer.times[0] - begin) : 0;
  const double each = steps > 1 ? milliseconds(writer.times.back() - writer.times[0]) / double(steps - 1) : 0;
  if (::isatty(STDERR_FILENO) == 1 && steps > 0 && world.leads())
    report::tell(
        fmt::format("tessera: {} tokens, then {} new; the first after {:.1f} ms, the others {:.2f} ms each\n",
                    longest, steps, first, each));
  if (!args.json.empty() && world.leads()) {
    nlohmann::json texts = nlohmann::json::array();
    for (size_t i = 0; i < count; ++i) {
      const Text& text = writer.texts[i];
      texts.push_back({{"prompt", prompts[std::min(i, prompts.size() - 1)]},
                       {"prompt_tokens", given[std::min(i, given.size() - 1)]},
                       {"tokens", text.tokens},
                       {"text", text.text},
                       {"end", text.end}});
    }
    const auto replace = nlohmann::json::error_handler_t::replace;  // a prompt may be no UTF-8
    nlohmann::json report{{"sparse", sparse_layers(language, given, writer)},
                          {"model", io::utf8_text(language.folder)},
                          {"type", language.config.type},
                          {"dtype", name_of(language.model.dtype())},
                          {"device", device.name()},
                          {"graph", was_graph},
                          {"seed", args.seed},
                          {"temperature", options.sampling.temperature},
                          {"top_k", options.sampling.top_k},
                          {"top_p", options.sampling.top_p},
                          {"texts", texts},
                          {"ttft_ms", first},
                          {"tpot_ms", each}};
    if (args.griffin) report["griffin"] = *args.griffin;
    if (world.size() > 1) report["ranks"] = world.size();
    io::write_file(args.json, report.dump(2, ' ', false, replace) + "\n");
  }
  const int signal = int(world.host().largest(InterruptGuard::signal_received()));
  return signal ? 128 + signal : 0;
}

int run_generate(const CLI::App& command, const GenerateArgs& args) {
  models::GenerateOptions options{.most_tokens = args.most_tokens,
                                  .sampling = args.sampling,
                                  .seed = args.seed,
                                  .graph = parse_switches(args.graph, "--graph") == std::vector{true}};
  if (args.greedy) options.sampling.temperature = 0;
  check_sampling(command, options.sampling);
  if (options.sampling.temperature == 0)
    refuse_given(command, {"--seed"}, "is for sampling, and greedy decoding draws nothing; leave it out");
  if (args.samples > 1 && args.prompts.size() > 1)
    throw UsageError("--samples: expected one prompt; several --prompt give one text each");
  if (!args.json.empty()) {
    check_replaceable(args.json);
    check_not_input(args.json, {args.file, args.model, args.sparse.gates});
  }
  check_flags_of_ranks(args);
  const dist::World world = args.parallel.join("generate", args.device);
  return world.told([&] {
    return generate_texts(args, options, world, device_of(args.device, world.place()), read_prompts(args));
  });
}

}  // namespace

void add_generate(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand("generate", "Generate text with a language model");
  auto args = std::make_shared<GenerateArgs>();
  command->add_option("--model", args->model, "Hugging Face model directory, or run folder of a finished run")
      ->required();
  auto* const prompt =
      command
          ->add_option("--prompt", args->prompts,
                       "Prompt; may be repeated for several texts. Default: --prompt-file, else "
                       "standard input")
          ->check(kMayBeEmpty)
          ->allow_extra_args(false);
  command->add_option("--prompt-file", args->file, "Text file, or - for standard input")->excludes(prompt);
  add_any_bytes(*command, args->any_bytes)->excludes(prompt);
  command->add_option("--max-tokens", args->most_tokens, "Maximum number of new tokens per text")
      ->check(kDecimal)
      ->check(CLI::Range(0, 1 << 24));
  auto* const temperature = add_sampling(*command, args->sampling);
  command->add_flag("--greedy", args->greedy, "Greedy decoding, the same as --temperature 0")
      ->excludes(temperature);
  command->add_option("--seed", args->seed, "Random seed")
      ->check(kDecimal)
      ->check(CLI::Range(int64_t{0}, std::numeric_limits<int64_t>::max()));
  command->add_option("--stop", args->stops, "Stop before this string; may be repeated")
      ->allow_extra_args(false);
  command->add_flag("--ignore-end", args->ignore_end, "Continue after end-of-text tokens");
  command->add_option("--samples", args->samples, "Number of texts to generate from one prompt")
      ->check(kDecimal)
      ->check(CLI::Range(1, 1 << 12));
  command->add_option("--dtype", args->dtype, "Dtype of the weights; default: the file's, on the CPU f32")
      ->check(CLI::IsMember({"f32", "bf16", "f16"}));
  add_device(*command, args->device);
  args->sparse.add_to(*command);
  add_griffin(*command, args->griffin);
  args->parallel.add_to(*command);
  command->add_option("--graph", args->graph, "Replay one CUDA graph per token")
      ->check(CLI::IsMember({"on", "off"}));
  command->add_option("--json", args->json, "Write texts, tokens and times to this JSON file");
  command->callback(
      [&action, args, command] { action = [args, command] { return run_generate(*command, *args); }; });
}

}  // namespace tessera::cli
