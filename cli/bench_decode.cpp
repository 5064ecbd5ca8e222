#include <fmt/format.h>

#include "bench/decode_bench.h"
#include "bench/default_sizes.h"
#include "cli/bench.h"
#include "cli/language_folder.h"
#include "cli/sparse_flags.h"
#include "cli/tensor_parallel_flags.h"
#include "cli/train_run.h"
#include "pretrained/load.h"
#include "runtime/error.h"

namespace tessera::cli {
namespace {

struct DecodeArgs {
  std::string shape, model, prompts, dtype, device, graph = "on", json, format, rows;
  SparseFlags sparse;
  ShareFlag weight_sparsity;
  TensorParallelFlags parallel;
  std::optional<int64_t> new_tokens;
  int64_t batch = 1;
  ops::Sampling sampling{.temperature = 0};
  std::optional<int> repeats, warmups;
};

/// Random weights.
void set_random(bench::DecodeBenchOptions& options, const DecodeArgs& args) {
  const SparseFlags& flags = args.sparse;
  if (!flags.mode.empty() || flags.threshold || !flags.gates.empty() || flags.total || flags.prefill ||
      !flags.allocation.empty())
    throw UsageError(
        "--sparse, --gate-threshold, --gates, --total, --allocation, --gate-prefill: these need a --model "
        "directory; random weights (--shape) take --format, --weight-sparsity and --activation-sparsity");
  const double weights = args.weight_sparsity.get().value_or(0);
  if (weights > 0 && args.format.empty())
    throw UsageError(
        "--weight-sparsity: give the --format of the pruned weights, one that is not dense-columns");
  if (!args.format.empty()) options.sparse.format = ops::parse_sparse_format(args.format);
  options.sparse.weight_sparsity = weights;
  options.sparse.activation_sparsity = flags.activation.get().value_or(0);
  if (args.rows.empty()) return;
  if (options.sparse.is_sparse())
    throw UsageError("--rows: each row has its own format and shares; leave out --format and the shares");
  try {
    for (const std::string& row : split_list(args.rows, "--rows"))
      options.rows.push_back(bench::parse_decode_row(row));
  } catch (const Error& error) {
    throw UsageError("--rows: " + error.message());
  }
}

int bench_decode(const CLI::App& command, const DecodeArgs& args) {
  bench::DecodeBenchOptions options{.name = args.model,
                                    .batch = args.batch,
                                    .sampling = args.sampling,
                                    .graph = parse_switches(args.graph, "--graph")};
  if (!args.rows.empty() && !args.model.empty())
    throw UsageError("--rows: of random weights (--shape); a model directory is one row");
  if (args.model.empty())
    set_random(options, args);
  else if (const std::optional<double> weights = args.weight_sparsity.get(); weights || !args.format.empty())
    throw UsageError(
        "--format, --weight-sparsity: these are for random weights (--shape); a model directory has its own");
  if (!args.model.empty()) {
    options.model = language_folder(args.model);
    options.model_sparse = args.sparse.options(options.model, args.batch);
  }
  for (const std::string& part :
       args.prompts.empty() ? std::vector<std::string>() : split_list(args.prompts, "--prompt-tokens")) {
    const bool digits = part.find_first_not_of("0123456789") == std::string::npos && part.size() <= 9;
    options.prompts.push_back(digits ? std::stoll(part) : 0);
    if (options.prompts.back() < 1)
      throw UsageError("--prompt-tokens: \"" + part + "\": expected numbers of 1 or more, a,b,c");
  }
  if (!args.dtype.empty()) {
    const std::vector<DType> dtypes = parse_dtypes(args.dtype);
    if (dtypes.size() != 1) throw UsageError("--dtype: \"" + args.dtype + "\": expected one");
    options.dtype = dtypes[0];
  }
  if (!args.json.empty()) check_writable(args.json);
  check_not_input(args.json, {args.model});
  if (args.parallel.ranks > 1 &&
      (options.sparse.is_sparse() || options.model_sparse || !options.rows.empty()))
    throw UsageError("--tensor-parallel: of one dense model; leave out --rows, compressed weights and gates");
  options.world = args.parallel.join("bench decode", args.device);
  return options.world.told([&] {
    options.device = device_of(args.device, options.world.place());
    check_graph(command, options.graph, options.device);
    const bench::DecodeSizes usual = bench::default_decode_sizes(options.device);
    options.shape = args.shape.empty() ? usual.shape : args.shape;
    options.new_tokens = args.new_tokens.value_or(usual.new_tokens);
    options.repeats = args.repeats.value_or(usual.repeats);
    options.warmups = args.warmups.value_or(usual.warmups);
    if (args.dtype.empty() && options.device.is_cpu())
      options.dtype = DType::f32;
    else if (args.dtype.empty() && !args.model.empty())
      options.dtype = pretrained::stored_dtype(options.model);
    options.ranks = args.parallel.share(options.world, options.device);
    tell_shared(options.world, options.device);
    if (options.world.leads()) options.listener = publisher(args.json);
    std::vector<bench::Record> records;
    end_at_failure(options.world, options.device, [&] { records = bench::bench_decode(options); });
    if (options.world.leads() && !options.rows.empty()) fmt::print("\n{}", bench::decode_rows_text(records));
    options.world.host().barrier();
    return 0;
  });
}

}  // namespace

void add_bench_decode(CLI::App& bench, Action& action) {
  auto* command =
      bench.add_subcommand("decode", "Time generation: time to first token, time per output token");
  auto args = std::make_shared<DecodeArgs>();
  auto* const shape =
      command
          ->add_option("--shape", args->shape,
                       "Model size, with random weights; default: llama-2-7b, on a CPU llama-130m")
          ->check(CLI::IsMember(bench::decode_shapes()));
  command
      ->add_option("--model", args->model,
                   "Hugging Face model directory, or run folder of a finished run; instead of --shape")
      ->excludes(shape);
  args->sparse.add_to(*command);
  command->add_option("--format", args->format, "Format in which to compress the random weights of --shape")
      ->check(CLI::IsMember(sparse_format_names()));
  add_weight_sparsity(*command, args->weight_sparsity,
                      "Share of the random weights that is set to 0, smallest first; --activation-sparsity: "
                      "share of the inputs of each layer, by a threshold from random tokens");
  command->add_option("--rows", args->rows,
                      "Models of a --shape to time one after the other, a,b,c: dense, composed, FORMAT:W or "
                      "FORMAT:W:X (shares of zero weights and of inputs left out), or composed: before "
                      "these; the table adds the time per layer");
  command->add_option(
      "--prompt-tokens", args->prompts,
      "Prompt lengths in tokens, a,b,c; default: 32,2048, or 32 if the model has no room for 2048");
  command
      ->add_option("--new-tokens", args->new_tokens, "Tokens to generate per text; default: 128, on a CPU 32")
      ->check(kDecimal)
      ->check(CLI::Range(2, 1 << 20));
  command->add_option("--batch-size", args->batch, "Texts per batch")
      ->check(kDecimal)
      ->check(CLI::Range(1, 1 << 12));
  add_sampling(*command, args->sampling);
  command->add_option("--dtype", args->dtype,
                      "f32, bf16 or f16; default: of --model the weights', else f16, on the CPU f32");
  command->add_option("--graph", args->graph, "Run the step as one captured CUDA graph (GPU): on,off");
  command->add_option("--repeats", args->repeats, "Number of timed texts; default: 10, on a CPU 3")
      ->check(kDecimal)
      ->check(CLI::Range(1, 10000));
  command
      ->add_option("--warmups", args->warmups,
                   "Number of untimed texts before the timed ones; default: 2, on a CPU 1")
      ->check(kDecimal)
      ->check(CLI::Range(0, 1000));
  args->parallel.add_to(*command);
  add_device(*command, args->device);
  add_json(*command, args->json);
  command->callback([&action, args, command] {
    action = [args, command] {
      check_sampling(*command, args->sampling);
      return bench_decode(*command, *args);
    };
  });
}

}  // namespace tessera::cli
