#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/language_flags.h"
#include "cli/tnp_flags.h"
#include "plan/plan.h"
#include "runtime/allocator.h"

namespace tessera::cli {
namespace {

/// What the plans of all models are asked: for how much memory, and on how many ranks.
struct PlaceFlags {
  std::string memory;
  bool json = false;
  int64_t ranks = 1, zero = 0;

  void add_to(CLI::App& command) {
    command.add_option("--memory", memory, "Memory to plan for, in GiB; default: free on the device now")
        ->check(kFinite)
        ->check(between(1e-6, 1e6));
    command.add_option("--ranks", ranks, "Number of ranks that train together; figures are per rank")
        ->check(whole(1, int64_t{1} << 20));
    command.add_option("--zero", zero, "ZeRO stage; 1: shard moments and master weights over the ranks")
        ->check(whole(0, 1));
    command.add_flag("--json", json, "Machine-readable");
  }
  /// Of one rank, whose weights and gradients are whole.
  plan::Memory of(plan::Memory memory) const {
    if (zero > 0) memory.optimizer /= double(ranks);
    return memory;
  }
  /// That leave each rank per step: sums of gradients, or parts of them and the weights that it updates.
  double sent(const plan::Memory& memory) const {
    const double around = double(ranks - 1) / double(ranks);
    return zero > 0 ? around * (memory.gradients + memory.parameters) : 2 * around * memory.gradients;
  }
};

struct PlanArgs : PlaceFlags {
  TnpFlags tnp;
};

/// The largest batch of which `total` bytes fit into `bytes`; 0 if not even one does.
template <class Total>
int64_t largest_batch(double bytes, Total&& total) {
  int64_t fits = 0, over = 1;
  while (total(over) <= bytes && over < (int64_t(1) << 30)) fits = over, over *= 2;
  while (over - fits > 1) {
    const int64_t middle = fits + (over - fits) / 2;
    (total(middle) <= bytes ? fits : over) = middle;
  }
  return fits;
}

/// Of --memory, in GiB, or what is free now.
double memory_of(const std::string& given) {
  return given.empty() ? double(Device::best().allocator().usage().first)
                       : std::stod(given) * double(1 << 30);
}

nlohmann::json step_json(const plan::Memory& memory, double flops, int64_t largest_batch) {
  return {{"parameters", memory.parameters},
          {"gradients", memory.gradients},
          {"optimizer", memory.optimizer},
          {"saved", memory.saved},
          {"transient", memory.transient},
          {"total", memory.total()},
          {"flops", flops},
          {"largest_batch", largest_batch}};
}

int run_plan(const PlanArgs& args) {
  train::TnpSettings job = args.tnp.job();
  job.set_precision(args.tnp.precision.on(Device::best()));
  const double memory = memory_of(args.memory);
  nlohmann::json out = {{"memory_bytes", memory}};
  fmt::memory_buffer text;
  const auto line = [&](const char* name, double bytes, double other) {
    fmt::format_to(std::back_inserter(text), "  {:<34} {:>12} {:>18}\n", name, format_bytes(size_t(bytes)),
                   format_bytes(size_t(other)));
  };
  models::TnpConfig plain = job.model, checkpointed = job.model;
  plain.checkpoint_every = 0;
  checkpointed.checkpoint_every = std::max<int64_t>(1, job.model.checkpoint_every);
  const auto a = args.of(plan::count_memory(plain, job.batch, job.context, job.targets));
  const auto b = args.of(plan::count_memory(checkpointed, job.batch, job.context, job.targets));
  const auto flops = plan::count_flops(plain, job.batch, job.context, job.targets);
  fmt::format_to(std::back_inserter(text), "tnp: {} parameters, {}, B={} M={} N={}, {} tokens a step\n",
                 plan::count_parameters(plain), name_of(job.precision()), job.batch, job.context, job.targets,
                 job.batch * (job.context + job.targets));
  fmt::format_to(std::back_inserter(text), "  {:<34} {:>12} {:>18}\n", "bytes of a training step", "plain",
                 fmt::format("checkpoint {}", checkpointed.checkpoint_every));
  line("parameters", a.parameters, b.parameters);
  line("gradients", a.gradients, b.gradients);
  line("optimizer (moments, masters)", a.optimizer, b.optimizer);
  line("activations kept for backward", a.saved, b.saved);
  line("largest temporaries", a.transient, b.transient);
  line("total", a.total(), b.total());
  if (args.ranks > 1) line("sent per rank and step", args.sent(a), args.sent(b));
  fmt::format_to(std::back_inserter(text), "  {:<34} {:>12.4g} {:>18.4g}\n", "FLOP of a step",
                 flops.step(false), flops.step(true));
  fmt::format_to(std::back_inserter(text), "    forward: GEMMs {:.4g}, attention {:.4g}, heads {:.4g}\n",
                 flops.gemms, flops.attention, flops.heads);
  const auto total = [&](const models::TnpConfig& config) {
    return [&, config](int64_t batch) {
      return args.of(plan::count_memory(config, batch, job.context, job.targets)).total();
    };
  };
  const int64_t most_a = largest_batch(memory, total(plain)),
                most_b = largest_batch(memory, total(checkpointed));
  fmt::format_to(std::back_inserter(text), "  {:<34} {:>12} {:>18}\n",
                 fmt::format("largest batch in {}", format_bytes(size_t(memory))), most_a, most_b);
  if (!args.json) {
    fmt::print("{}", fmt::to_string(text));
    return 0;
  }
  const auto record = [&](const models::TnpConfig& config, const plan::Memory& plan, int64_t most,
                          bool recompute) {
    nlohmann::json out = step_json(plan, flops.step(recompute), most);
    out["checkpoint_every"] = config.checkpoint_every;
    out["sent"] = args.sent(plan);
    return out;
  };
  out["model"] = "tnp";
  out["precision"] = name_of(job.precision());
  out["parameter_count"] = plan::count_parameters(plain);
  out["plain"] = record(plain, a, most_a, false);
  out["checkpointed"] = record(checkpointed, b, most_b, true);
  fmt::print("{}\n", out.dump(2));
  return 0;
}

struct LanguagePlanArgs : PlaceFlags {
  explicit LanguagePlanArgs(bool llama) : flags(llama) {}
  LanguageFlags flags;
};

int run_language_plan(const LanguagePlanArgs& args) {
  train::LanguageSettings job = args.flags.job();
  job.set_precision(args.flags.precision.on(Device::best()));
  const double memory = memory_of(args.memory);
  const plan::Forms forms = job.forms();
  const plan::Memory plan = args.of(plan::count_memory(job.model, job.batch, job.length, forms));
  const plan::Flops flops = plan::count_flops(job.model, job.batch, job.length, forms);
  const int64_t parameters = plan::count_parameters(job.model, forms);
  const int64_t most = largest_batch(memory, [&](int64_t batch) {
    return args.of(plan::count_memory(job.model, batch, job.length, forms)).total();
  });
  if (args.json) {
    nlohmann::json out = step_json(plan, flops.step(), most);
    out["model"] = job.family();
    if (job.factors.factorizes()) out["form"] = job.factors.description();
    if (job.weights24.on()) out["weights24"] = job.weights24.description();
    out["memory_bytes"] = memory;
    out["sent"] = args.sent(plan);
    out["precision"] = name_of(job.precision());
    out["parameter_count"] = parameters;
    fmt::print("{}\n", out.dump(2));
    return 0;
  }
  fmt::print("{}: {} parameters, {}, B={} T={}, {} tokens a step\n", job.family(), parameters,
             name_of(job.precision()), job.batch, job.length, job.batch * job.length);
  if (job.factors.factorizes()) fmt::print("  weights: {}\n", job.factors.description());
  if (job.weights24.on()) fmt::print("  weights: {}\n", job.weights24.description());
  fmt::print("  {:<34} {:>12}\n", "bytes of a training step", "");
  for (const auto& [name, bytes] :
       {std::pair("parameters", plan.parameters), std::pair("gradients", plan.gradients),
        std::pair("optimizer (moments, masters)", plan.optimizer),
        std::pair("activations kept for backward", plan.saved),
        std::pair("largest temporaries", plan.transient), std::pair("total", plan.total())})
    fmt::print("  {:<34} {:>12}\n", name, format_bytes(size_t(bytes)));
  if (args.ranks > 1)
    fmt::print("  {:<34} {:>12}\n", "sent per rank and step", format_bytes(size_t(args.sent(plan))));
  fmt::print("  {:<34} {:>12.4g}\n", "FLOP of a step", flops.step());
  fmt::print("    forward: GEMMs {:.4g}, attention {:.4g}, LM head {:.4g}\n", flops.gemms, flops.attention,
             flops.heads);
  fmt::print("  {:<34} {:>12}\n", fmt::format("largest batch in {}", format_bytes(size_t(memory))), most);
  return 0;
}

void add_language_plan(CLI::App& plan, Action& action, bool llama) {
  auto* command = llama ? plan.add_subcommand("llama", "LLaMA") : plan.add_subcommand("gpt", "GPT-2");
  auto args = std::make_shared<LanguagePlanArgs>(llama);
  args->flags.settings().length = 1024;
  args->flags.add_sizes(*command, llama ? "130m" : "small");
  args->flags.add_vocabulary(*command);
  args->PlaceFlags::add_to(*command);
  command->callback([&action, args] { action = [args] { return run_language_plan(*args); }; });
}

}  // namespace

void add_plan(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand("plan", "Estimate memory and FLOPs of a training run before it starts");
  command->require_subcommand(1);
  auto* tnp = command->add_subcommand("tnp", "Transformer Neural Process");
  auto args = std::make_shared<PlanArgs>();
  args->tnp.add_to(*tnp);
  args->PlaceFlags::add_to(*tnp);
  tnp->callback([&action, args] { action = [args] { return run_plan(*args); }; });
  add_language_plan(*command, action, false);
  add_language_plan(*command, action, true);
}

}  // namespace tessera::cli
