#include "cli/split_flags.h"

#include <fmt/format.h>

#include "cli/commands.h"
#include "report/progress.h"
#include "sparsity/split_pruning.h"

namespace tessera::cli {

void SplitFlags::add_to(CLI::App& command) {
  command.add_option("MODEL,--model", model, "Hugging Face model directory, or run folder of a finished run");
  command.add_option("--method", method, "Pruning score; the weights with the lowest scores are dropped")
      ->check(CLI::IsMember({"magnitude", "wanda", "ria", "sparsegpt"}));
  command.add_option("--gate-aware", gate_aware,
                     "Gate-aware pruning, as prune --gates: off, on, or off,on to measure both kinds; needs "
                     "--method sparsegpt");
  texts.samples.count = 16;
  texts.add_to(command);
  command
      .add_option(
          "--stride", stride,
          "Tokens between the starts of perplexity windows; each predicts that many tokens, its last ones. "
          "0: disjoint windows. Default: a fifth of the length, as TEAL's 512 of 2560")
      ->check(whole(0, 1 << 24));
  gates.add_to(command);
  command.add_option("--prompt-tokens", prompt, "Prompt length in tokens for timing")
      ->check(whole(1, 1 << 24));
  command.add_option("--new-tokens", timing.new_tokens, "Tokens to generate per repeat")
      ->check(whole(2, 1 << 20));
  command.add_option("--repeats", timing.repeats, "Number of timed texts")->check(whole(1, 10000));
  command.add_option("--warmups", timing.warmups, "Number of untimed texts before the timed ones")
      ->check(whole(0, 1000));
  command.add_option("--dtype", dtype, "Dtype of the weights; default: the file's, on the CPU f32")
      ->check(CLI::IsMember({"f32", "bf16", "f16"}));
  add_device(command, device);
}

std::unique_ptr<SplitFlags::Prepared> SplitFlags::prepare(const char* command) {
  auto prepared = std::make_unique<Prepared>();
  sparsity::SweepOptions& options = prepared->options;
  options.gates = gates.get();
  options.prune.score = sparsity::parse_score(method);
  if (options.prune.score == sparsity::Score::sparsegpt) options.prune.update = sparsity::Update::obs;
  options.gate_aware = parse_switches(gate_aware, "--gate-aware");
  try {
    sparsity::check_gate_aware(command, options);
  } catch (const Error& error) {
    throw UsageError(error.message());
  }
  if (!texts.has_text())
    throw UsageError(
        fmt::format("{}: give the text: --text FILE..., or --data DIR with shards of tokens", command));
  if (!texts.has_evaluation())
    throw UsageError(fmt::format("{}: no text is held out to measure on; leave out --validation 0", command));
  options.device = device.empty() ? Device::best() : Device::parse(device);
  {
    // The texts are read with the model's tokenizer, and cut as the model takes them.
    const pretrained::LoadedLanguageModel language = load_language(model, options.device, dtype);
    check(options.device.is_cpu() || language.model.dtype() != DType::f32, command,
          ": on a GPU compressed weights run in bf16 and f16, and the model is f32; add --dtype bf16 or f16");
    texts.choose_length(command, language);
    prepared->texts = texts.read(command, language);
    prepared->folder = language.folder;
    const int64_t longest = language.model.longest();
    check(prompt + timing.new_tokens - 1 <= longest, command, ": a prompt of ", prompt, " tokens and ",
          timing.new_tokens, " new ones; the model has ", longest, " ", limit_of(language.model),
          ": give a smaller --prompt-tokens or --new-tokens");
  }
  prepared->tokenizer = std::make_unique<io::Tokenizer>(io::Tokenizer::load(prepared->folder));
  options.model = prepared->folder;
  options.samples = texts.samples;
  options.calibration = prepared->texts.calibration;
  options.evaluation = prepared->texts.evaluation;
  options.window = texts.samples.length;
  options.stride = stride.value_or(std::max<int64_t>(1, options.window / 5));
  options.most_windows = texts.eval_windows;
  options.prompt = prompt;
  options.timing = timing;
  if (!dtype.empty())
    options.dtype = parse_dtype(dtype);
  else if (options.device.is_cpu())
    options.dtype = DType::f32;
  options.tell = [](const std::string& line) { report::tell("tessera: " + line + "\n"); };
  return prepared;
}

}  // namespace tessera::cli
