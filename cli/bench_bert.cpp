#include <charconv>

#include "bench/bert_bench.h"
#include "cli/bench.h"
#include "cli/setting_flags.h"

namespace tessera::cli {
namespace {

struct BertArgs {
  models::BertConfig model;
  train::SliceSettings slice;
  double drop_share = 0;
  StepFlags step;
  std::string shape, dropout = "0.1";
};

std::vector<bench::BatchSize> parse_shapes(const std::string& text, const models::BertConfig& model) {
  std::vector<bench::BatchSize> shapes;
  for (const std::string& part : split_list(text, "--shape")) {
    int64_t count = 0, length = 0;
    const char* const end = part.data() + part.size();
    const auto [cross, bad] = std::from_chars(part.data(), end, count);
    const bool good = bad == std::errc{} && cross != end && *cross == 'x' && count >= 1 && count <= 1 << 20;
    const auto [stop, worse] =
        good ? std::from_chars(cross + 1, end, length) : std::from_chars_result{end, bad};
    if (!good || worse != std::errc{} || stop != end || length < 1 || length > model.longest())
      throw UsageError("--shape: \"" + part + "\": expected TEXTSxTOKENS, such as 32x128, of at most " +
                       std::to_string(model.longest()) + " tokens");
    shapes.push_back({count, length});
  }
  return shapes;
}

std::vector<double> parse_dropout(const std::string& text) {
  std::vector<double> values;
  for (const std::string& part : split_list(text, "--dropout")) {
    double value = -1;
    const auto [stop, bad] = std::from_chars(part.data(), part.data() + part.size(), value);
    if (bad != std::errc{} || stop != part.data() + part.size() || !(value >= 0 && value < 1))
      throw UsageError("--dropout: \"" + part + "\": expected a number from 0 to below 1");
    values.push_back(value);
  }
  return values;
}

int bench_bert(const BertArgs& args, const train::Given& given) {
  bench::BertBenchOptions options;
  options.model = args.model;
  options.optimizer_states = args.step.states;
  options.slice = args.slice;
  options.drop.share = args.drop_share;
  try {
    options.model.validate();
    options.slice.check_given(given);
    options.slice.refuse_auto();
    options.slice.validate();
    options.drop.validate();
  } catch (const Error& error) {
    throw UsageError(error.what());
  }
  if (given.contains("--probe-gradient"))
    throw UsageError("--probe-gradient: benchmarks do not compare gradients; `tessera train bert` does");
  // A replay would drop the same branches in every step.
  if (options.drop.drops() && given.contains("--graph") && args.step.graph != "off")
    throw UsageError(
        "--graph: a step with --dropbp drops different branches each time and cannot be captured; give "
        "--graph off");
  if (!args.shape.empty()) options.shapes = parse_shapes(args.shape, options.model);
  options.dropout = parse_dropout(args.dropout);
  return args.step.run(options, bench::bench_bert_step);
}

}  // namespace

void add_bench_step_bert(CLI::App& step, Action& action) {
  auto* command = step.add_subcommand("bert", "Fine-tuning step of BERT-base with a classifier");
  auto args = std::make_shared<BertArgs>();
  const CLI::Validator size = whole(1, int64_t(1) << 18);
  command->add_option("--shape", args->shape,
                      "Batch size x sequence length, a,b; default: 32x128,16x512, on a CPU 2x128");
  command->add_option("--layers", args->model.layers, "Number of layers")->check(size);
  command->add_option("--d-model", args->model.d_model, "Hidden size")->check(size);
  command->add_option("--d-ff", args->model.d_ff, "Hidden size of the feed-forward layers")->check(size);
  command->add_option("--n-head", args->model.heads, "Number of attention heads")->check(size);
  command->add_option("--vocab-size", args->model.vocabulary, "Vocabulary size")->check(size);
  command->add_option("--dropout", args->dropout, "Dropout rates of all layers, such as 0.1,0");
  args->step.add_to(*command);
  command->add_option(
      "--dropbp", args->drop_share,
      "DropBP: share of the residual branches' FLOPs that backward drops; steps then run eagerly");
  train::SettingList slice;
  args->slice.add_to(slice);
  add_flags(*command, slice);
  command->callback([&action, args, command] {
    action = [args, command] { return bench_bert(*args, given_flags(*command)); };
  });
}

}  // namespace tessera::cli
