#include <fmt/format.h>

#include <charconv>

#include "bench/ffn_bench.h"
#include "cli/bench.h"
#include "runtime/error.h"

namespace tessera::cli {
namespace {

struct FfnArgs {
  std::vector<std::string> shapes, variants;
  std::string sparsity = "0.9", precision, device, json, y, dx, dup, ddown;
  double seconds = 0.5, dense_share = 0.05, most_dropped = 0;
  bool no_gemms = false, require = false;
};

bench::FfnShape shape_of(const std::string& text) {
  const auto dims = parse_dims(text);
  for (const auto& [name, size] : dims) {
    if (name != "T" && name != "D" && name != "F")
      throw UsageError(fmt::format("--shape: a network has no size \"{}\"; it has T, D and F", name));
    if (size < 1) throw UsageError(fmt::format("--shape: {} is {}; expected 1 or more", name, size));
  }
  if (dims.size() < 3)
    throw UsageError("--shape " + text + ": it lacks a size; for example T=16384,D=4096,F=16384");
  return {dims.at("T"), dims.at("D"), dims.at("F")};
}

std::vector<double> shares_of(const std::string& text) {
  std::vector<double> shares;
  for (const std::string& part : split_list(text, "--sparsity")) {
    double share = 0;
    const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), share);
    if (error != std::errc() || end != part.data() + part.size() || !(share > 0 && share < 1))
      throw UsageError("--sparsity: \"" + part +
                       "\": expected shares of zeros above 0 and below 1, as 0.5,0.9");
    shares.push_back(share);
  }
  return shares;
}

int run_ffn(const CLI::App& command, const FfnArgs& args) {
  bench::FfnBenchOptions options;
  for (const std::string& text : args.shapes) options.shapes.push_back(shape_of(text));
  options.sparsities = shares_of(args.sparsity);
  if (!args.precision.empty()) options.precisions = parse_precisions(args.precision, "--precision");
  const auto form = [&](const std::string& text) {
    return !text.empty()          ? ops::parse_gemm24(text)
           : args.dense_share > 0 ? ops::Gemm24::split
                                  : ops::Gemm24::sparse;
  };
  options.how.y = form(args.y), options.how.dx = form(args.dx);
  options.how.dup = form(args.dup), options.how.ddown = form(args.ddown);
  options.how.dense_share = args.dense_share;
  options.how.required = args.require;
  try {
    options.how.validate("bench ffn");
  } catch (const Error& error) {
    throw UsageError(error.message());
  }
  if (!options.how.splits())
    refuse_given(command, {"--most-dropped"},
                 "is for GEMMs of the form split, of which there are none; leave it out");
  options.most_dropped = args.most_dropped;
  options.gemms = !args.no_gemms;
  options.timer.seconds = args.seconds;
  options.device = device_of(args.device);
  options.variants = args.variants;
  if (!args.variants.empty() && options.device.is_cpu())
    throw UsageError("--variant: the CPU has no variants of mlp_sparse24; leave it out, or take a GPU");
  if (!args.json.empty()) check_writable(args.json);
  options.listener = publisher(args.json);
  bench::bench_ffn(options);
  return 0;
}

}  // namespace

void add_bench_ffn(CLI::App& bench, Action& action) {
  auto* command = bench.add_subcommand(
      "ffn", "Time FFNs with 2:4 sparse activations, compression included, next to dense ones");
  auto args = std::make_shared<FfnArgs>();
  command
      ->add_option("--shape", args->shapes,
                   "Tokens, width and hidden width, T=...,D=...,F=...; may be repeated; default: two large "
                   "networks, on a CPU T=256,D=512,F=2048")
      ->allow_extra_args(false);
  command->add_option("--sparsity", args->sparsity,
                      "Shares of zeros in the activations, such as 0.5,0.9,0.99");
  command->add_option("--dense-share", args->dense_share, "Share of the columns to keep dense, densest first")
      ->check(between(0.0, 1.0));
  command
      ->add_option("--most-dropped", args->most_dropped,
                   "Choose the smallest --dense-share that drops at most this share of the energy; 0: off")
      ->check(between(0.0, 1.0));
  for (const auto& [flag, value] :
       {std::pair("--sparse24-y", &args->y), std::pair("--sparse24-dx", &args->dx),
        std::pair("--sparse24-dup", &args->dup), std::pair("--sparse24-ddown", &args->ddown)})
    command
        ->add_option(flag, *value, "dense, sparse or split; default: split, or sparse with --dense-share 0")
        ->check(CLI::IsMember({"dense", "sparse", "split"}));
  command->add_flag("--sparse24-require", args->require,
                    "Fail if a sparse GEMM cannot use sparse tensor cores");
  command
      ->add_option("--variant", args->variants,
                   "Also time this variant of mlp_sparse24: fused or composed; may be repeated; GPU only")
      ->allow_extra_args(false)
      ->check(CLI::IsMember({"fused", "composed"}));
  command->add_flag("--no-gemms", args->no_gemms, "Time only the networks, not their GEMMs and compressions");
  command->add_option("--precision", args->precision, kPrecisionsHelp);
  add_device(*command, args->device);
  add_seconds(*command, args->seconds);
  add_json(*command, args->json);
  command->footer("Example: tessera bench ffn --shape T=16384,D=4096,F=16384 --sparsity 0.5,0.8,0.9,0.95");
  command->callback(
      [&action, args, command] { action = [args, command] { return run_ffn(*command, *args); }; });
}

}  // namespace tessera::cli
