#include "cli/bench.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <set>
#include <utility>

#include "bench/default_sizes.h"
#include "bench/host_bench.h"
#include "bench/op_bench.h"
#include "bench/step_bench.h"
#include "cli/language_flags.h"
#include "cli/setting_flags.h"
#include "cli/tnp_flags.h"
#include "cli/train_run.h"
#include "cli/variant_flag.h"
#include "report/progress.h"
#include "runtime/error.h"
#include "runtime/text.h"

namespace tessera::cli {

void show_status(const std::string& text) {
  static const bool terminal = isatty(STDERR_FILENO);
  constexpr size_t kWidth = 79;  // a line that wraps could not be replaced
  if (terminal) report::tell("\r" + text.substr(0, kWidth) + "\033[K\r");
}

bench::Listener publisher(const std::string& json, const std::vector<bench::Record>& expected) {
  auto table = std::make_shared<bench::RecordTable>(expected);
  return {.on_begin = show_status, .on_record = [json, table](const bench::Record& record) {
            std::vector<bench::Record> stamped{record};
            bench::stamp(stamped);
            if (!json.empty()) bench::append_records(json, stamped);
            show_status("");
            fmt::print("{}", table->row(record));
            std::fflush(stdout);
          }};
}

void add_json(CLI::App& command, std::string& json) {
  command.add_option("--json", json, "Append the records to this file, one JSON object per line");
}

void add_seconds(CLI::App& command, double& seconds) {
  command.add_option("--seconds", seconds, "Seconds to measure each case")
      ->check(kFinite)
      ->check(between(0.001, 600.0));
}

void add_bench_of_device(CLI::App& command, Action& action,
                         const std::function<void(Device, const bench::Listener&)>& measure) {
  struct Args {
    std::string device, json;
  };
  auto args = std::make_shared<Args>();
  add_device(command, args->device);
  add_json(command, args->json);
  command.callback([&action, args, measure] {
    action = [args, measure] {
      if (!args->json.empty()) check_writable(args->json);
      measure(device_of(args->device), publisher(args->json));
      return 0;
    };
  });
}

void check_graph(const CLI::App& command, const std::vector<bool>& graph, Device device) {
  if (device.is_cpu() && std::ranges::count(graph, true) > 0)
    refuse_given(command, {"--graph"}, "on: only a GPU has CUDA graphs; leave it out, or give off");
}

void StepFlags::add_to(CLI::App& command) {
  parsed = &command;
  command.add_option("--precision", precision, kPrecisionsHelp);
  command.add_option("--graph", graph, "Run the step as one captured CUDA graph (GPU): on,off");
  command
      .add_option("--bucket-mb", bucket_mb,
                  "MiB of gradients per all-reduce in the backward pass; 0: after it; default: as train")
      ->check(kFinite)
      ->check(between(0, 65536))
      ->default_str("");
  command
      .add_option("--rank-exchange", exchange,
                  "Gradient sums of GPUs: NCCL (communicator), copies (peer); auto: peer if it can")
      ->check(CLI::IsMember({"auto", "communicator", "peer"}));
  command
      .add_option("--zero", zero,
                  "ZeRO stage; 1: shard moments and master weights over the ranks; 2: gradients, too")
      ->check(whole(0, 2));
  command
      .add_option("--optimizer-states", states,
                  "AdamW's moments; bf16: also no f32 masters, as PyTorch's bf16 models have none")
      ->check(CLI::IsMember({"f32", "bf16"}));
  add_device(command, device);
  add_seconds(command, seconds);
  add_json(command, json);
}

Device device_of(const std::string& name) {
  return name.empty() ? Device::best() : Device::parse(name);
}

namespace {

// ---- bench op ----

struct OpBenchArgs {
  std::string name, dtype, mode = "fwd,bwd", variant, device, json;
  std::vector<std::string> shapes, set;
  double seconds = 0.5;
  bool hot = false, explain = false;
};

/// Every size of a shape must be one that the operator's own cases name: a misspelt one would do nothing.
void check_dim_names(const ops::OpSpec& op, const ops::Dims& dims) {
  std::set<std::string> known;
  for (const auto* cases : {&op.cases, &op.benches})
    for (const ops::Case& c : *cases)
      for (const auto& [name, size] : c.dims) known.insert(name);
  for (const auto& [name, size] : dims) {
    if (known.contains(name)) continue;
    throw UsageError(fmt::format("--shape: {} has no size \"{}\"; it has {}", op.name, name, joined(known)));
  }
}

int bench_op(const OpBenchArgs& args) {
  bench::OpBenchOptions options;
  options.device = device_of(args.device);
  const ops::OpSpec* op = nullptr;
  std::vector<ops::Case> defaults;
  const std::string* shape = nullptr;
  try {
    op = &ops::find_op(args.name);
    defaults = bench::default_cases(*op, options.device);
    const ops::Attrs attrs = parse_attrs(*op, args.set);
    for (const std::string& text : args.shapes) {
      shape = &text;
      ops::Case given{.dims = parse_dims(text), .attrs = attrs};
      check_dim_names(*op, given.dims);
      ops::check_used(*op, attrs);
      // Sizes that are not given are those of the first default problem, if all given names are its own.
      if (!defaults.empty()) {
        ops::Dims all = defaults[0].dims;
        const bool own =
            std::ranges::all_of(given.dims, [&](const auto& size) { return all.contains(size.first); });
        if (own) {
          for (const auto& [name, size] : given.dims) all[name] = size;
          given.dims = all;
        }
      }
      op->problem(given.dims, ops::complete(*op, given.attrs));  // complains of a missing size
      options.cases.push_back(given);
    }
    if (options.cases.empty()) {
      options.cases = defaults;
      for (ops::Case& c : options.cases)
        for (const auto& [name, value] : attrs.values()) c.attrs.set(name, value);
    }
  } catch (const Error& error) {
    throw UsageError(error.what());
  } catch (const std::out_of_range&) {
    std::string names;
    for (const auto& [name, size] : (op->benches.empty() ? op->cases : op->benches).at(0).dims)
      names += fmt::format("{}{}={}", names.empty() ? "" : ",", name, size);
    throw UsageError(
        fmt::format("bench op {}: --shape {} lacks a size; for example {}", args.name, *shape, names));
  }
  options.modes = split_list(args.mode, "--mode");
  for (const std::string& mode : options.modes)
    if (mode != "fwd" && mode != "bwd" && mode != "fwd+bwd")
      throw UsageError("--mode: \"" + mode + "\": expected fwd or bwd, or fwd+bwd for both in one");
  if (!args.dtype.empty()) options.precisions = parse_precisions(args.dtype, "--dtype");
  options.all_variants = args.variant == "all";
  if (!options.all_variants) options.variant = args.variant;
  check_variant(*op, options.variant, false);
  options.timer.seconds = args.seconds;
  options.timer.cold = !args.hot;
  if (args.hot && options.device.is_cpu())
    throw UsageError("--hot: only on a GPU is the L2 cache flushed before each repeat; leave it out");
  if (!args.variant.empty() && options.device.is_cpu())
    throw UsageError("--variant: the CPU has no kernel variants; add --device cuda");
  if (!args.json.empty()) check_writable(args.json);
  check(!options.cases.empty(), op->name, ": it has no default benchmark shapes; give --shape");
  options.listener = publisher(args.json, bench::planned_records(*op, options));
  const std::vector<bench::Record> records = bench::bench_op(*op, options);
  check(!records.empty(), "bench op ", op->name, ": nothing to time in mode ", args.mode,
        "; the operator has no gradient, or returns its input");
  if (args.explain) {
    const ops::ChoiceLog log;  // it costs the host time: not while it is timed
    options.timer.seconds = 0;
    options.listener = {};
    bench::bench_op(*op, options);
    fmt::print("{}", choice_lines({log.lines().begin(), log.lines().end()}));
  }
  return 0;
}

void add_bench_op(CLI::App& bench, Action& action) {
  auto* command = bench.add_subcommand("op", "Time an operator");
  auto args = std::make_shared<OpBenchArgs>();
  command->add_option("name", args->name, "Operator")->required();
  command
      ->add_option("--shape", args->shapes,
                   "Sizes, NAME=SIZE,...; may be repeated; default: the operator's benchmark shapes, "
                   "smaller on a CPU")
      ->allow_extra_args(false);
  command->add_option("--set", args->set, "Attribute, key=value; may be repeated")->allow_extra_args(false);
  command->add_option("--dtype", args->dtype, kOperatorPrecisionsHelp);
  command->add_option("--mode", args->mode, "Passes to time: fwd,bwd; fwd+bwd times both together");
  add_variant(*command, args->variant);
  command->get_option("--variant")
      ->description("Kernel variant to time (CUDA), or all; default: the one that would be chosen");
  command->add_flag("--explain", args->explain, kExplainHelp);
  add_device(*command, args->device);
  add_seconds(*command, args->seconds);
  command->add_flag("--hot", args->hot, "Keep L2 warm (GPU); default: flush L2 before each repeat");
  add_json(*command, args->json);
  command->callback([&action, args] { action = [args] { return bench_op(*args); }; });
}

// ---- bench step ----

struct StepArgs {
  TnpFlags tnp;
  StepFlags step;
  ContextFlags context;
  std::string checkpoint;  // "": whether there are groups to checkpoint
};

int bench_step(const StepArgs& args) {
  bench::StepBenchOptions options;
  options.settings = args.tnp.job();
  options.settings.optimizer_states = args.step.states;
  args.context.set(options.settings);
  const bool groups = options.settings.model.checkpoint_every > 0;
  options.checkpoint = parse_switches(!args.checkpoint.empty() ? args.checkpoint
                                      : groups                 ? "on"
                                                               : "off",
                                      "--checkpoint");
  if (groups && std::ranges::find(options.checkpoint, true) == options.checkpoint.end())
    throw UsageError(
        "--checkpoint-interval: groups of blocks to checkpoint, and --checkpoint is off; leave one of the "
        "two out");
  const int64_t each = options.settings.split.ranks;
  if (each > 1 && (args.step.bucket_mb > 0 || args.step.zero > 1))
    throw UsageError(
        "--bucket-mb, --zero 2: gradients cannot travel next to a backward pass that makes calls of its own, "
        "as "
        "with --context-parallel; leave them out");
  return args.step.run(options, [each](bench::StepBenchOptions& of_ranks) {
    bench::StepRanks& ranks = of_ranks.ranks;
    check(ranks.size() % each == 0, "bench step tnp: --context-parallel ", each, " on ", ranks.size(),
          ranks.size() == 1 ? " rank" : " ranks",
          ": it must divide the ranks; start a multiple of them: tessera launch -n ", each,
          " -- bench step tnp ...");
    ranks.each = int(each);
    if (each > 1) ranks.bucket_mb = 0;
    return bench::bench_tnp_step(of_ranks);
  });
}

struct LanguageStepArgs {
  explicit LanguageStepArgs(bool llama) : flags(llama) {}
  LanguageFlags flags;
  StepFlags step;
};

int bench_language(const LanguageStepArgs& args, const train::Given& given) {
  bench::LanguageStepOptions options;
  options.settings = args.flags.job(given);
  options.settings.optimizer_states = args.step.states;
  return args.step.run(options, [&given](bench::LanguageStepOptions& of_device) {
    const bench::BatchSize usual = bench::default_language_batch(of_device.device);
    if (!given.contains("--batch-size")) of_device.settings.batch = usual.texts;
    if (!given.contains("--length")) bench::set_length(of_device.settings, usual.tokens);
    return bench::bench_language_step(of_device);
  });
}

/// GPT-2 124M and LLaMA 130M unless told otherwise.
void add_bench_language(CLI::App& step, Action& action, bool llama) {
  auto* command = llama ? step.add_subcommand("llama", "LLaMA on random tokens")
                        : step.add_subcommand("gpt", "GPT-2 on random tokens");
  auto args = std::make_shared<LanguageStepArgs>(llama);
  args->flags.add_sizes(*command, llama ? "130m" : "small", false);
  args->flags.add_vocabulary(*command);
  args->step.add_to(*command);
  for (const char* const size : {"--batch-size", "--length"}) command->get_option(size)->default_str("");
  command->footer("A step has 16 sequences of 1024 tokens by default, on a CPU one of 128.");
  command->callback([&action, args, command] {
    action = [args, command] { return bench_language(*args, given_flags(*command)); };
  });
}

void add_bench_step(CLI::App& bench, Action& action) {
  auto* command = bench.add_subcommand("step", "Time whole training steps: forward, backward, update");
  command->require_subcommand(1);
  auto* tnp = command->add_subcommand("tnp", "Transformer Neural Process");
  auto args = std::make_shared<StepArgs>();
  args->tnp.add_to(*tnp);
  tnp->remove_option(tnp->get_option("--precision"));
  args->step.add_to(*tnp);
  tnp->add_option("--checkpoint", args->checkpoint,
                  "Activation checkpointing: on,off; default: on with --checkpoint-interval, else off")
      ->default_str("");
  args->context.add_to(*tnp);
  tnp->footer(
      "Under a launcher the ranks make the steps together, each --context-parallel of them on one "
      "batch.\nExample: tessera launch -n 2 -- bench step tnp --m 10000 --n 1000 --batch-size 1 "
      "--context-parallel 2");
  tnp->callback([&action, args] { action = [args] { return bench_step(*args); }; });
  add_bench_language(*command, action, false);
  add_bench_language(*command, action, true);
  add_bench_step_bert(*command, action);
}

// ---- bench host ----

void add_bench_host(CLI::App& bench, Action& action) {
  add_bench_of_device(*bench.add_subcommand(
                          "host", "Time the host overhead per operator, in a chain of 10,000 tiny operators"),
                      action,
                      [](Device device, const bench::Listener& to) { bench::bench_host(device, to); });
}

}  // namespace

void add_bench(CLI::App& app, Action& action) {
  auto* command =
      app.add_subcommand("bench", "Time operators, training steps and generation; compare records");
  command->require_subcommand(1);
  add_bench_op(*command, action);
  add_bench_step(*command, action);
  add_bench_layers(*command, action);
  add_bench_decode(*command, action);
  add_bench_ffn(*command, action);
  add_bench_collective(*command, action);
  add_bench_host(*command, action);
  add_bench_sweep(*command, action);
  add_bench_optim(*command, action);
  add_bench_copy(*command, action);
  add_bench_compare(*command, action);
}

}  // namespace tessera::cli
