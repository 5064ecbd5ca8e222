#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/tnp_flags.h"
#include "runtime/allocator.h"

namespace tessera::cli {
namespace {

struct PlanArgs {
  TnpFlags tnp;
  std::string memory;
  bool json = false;
};

/// The largest batch whose plan fits into `bytes`; 0 if not even one does.
int64_t largest_batch(const models::TnpConfig& config, int64_t context, int64_t targets, double bytes) {
  int64_t fits = 0, over = 1;
  while (plan_memory(config, over, context, targets).total() <= bytes && over < (int64_t(1) << 30))
    fits = over, over *= 2;
  while (over - fits > 1) {
    const int64_t middle = fits + (over - fits) / 2;
    (plan_memory(config, middle, context, targets).total() <= bytes ? fits : over) = middle;
  }
  return fits;
}

int run_plan(const PlanArgs& args) {
  const train::TnpJob job = args.tnp.job();
  double memory = 0;
  if (!args.memory.empty()) {
    memory = std::stod(args.memory) * double(1 << 30);
  } else {
    memory = double(Device::best().allocator().usage().first);
  }
  nlohmann::json out = {{"memory_bytes", memory}};
  fmt::memory_buffer text;
  const auto line = [&](const char* name, double bytes, double other) {
    fmt::format_to(std::back_inserter(text), "  {:<34} {:>12} {:>18}\n", name, format_bytes(size_t(bytes)),
                   format_bytes(size_t(other)));
  };
  models::TnpConfig plain = job.model, checkpointed = job.model;
  plain.checkpoint_every = 0;
  checkpointed.checkpoint_every = std::max<int64_t>(1, job.model.checkpoint_every);
  const auto a = plan_memory(plain, job.batch, job.context, job.targets);
  const auto b = plan_memory(checkpointed, job.batch, job.context, job.targets);
  const auto flops = count_flops(plain, job.batch, job.context, job.targets);
  fmt::format_to(std::back_inserter(text), "tnp: {} parameters, {}, B={} M={} N={}, {} tokens a step\n",
                 count_parameters(plain), name_of(plain.dtype), job.batch, job.context, job.targets,
                 job.batch * (job.context + job.targets));
  fmt::format_to(std::back_inserter(text), "  {:<34} {:>12} {:>18}\n", "bytes of a training step", "plain",
                 fmt::format("checkpoint {}", checkpointed.checkpoint_every));
  line("parameters", a.parameters, b.parameters);
  line("gradients", a.gradients, b.gradients);
  line("optimizer (moments, masters)", a.optimizer, b.optimizer);
  line("activations kept for backward", a.saved, b.saved);
  line("largest temporaries", a.transient, b.transient);
  line("total", a.total(), b.total());
  fmt::format_to(std::back_inserter(text), "  {:<34} {:>12.4g} {:>18.4g}\n", "FLOP of a step",
                 flops.step(false), flops.step(true));
  fmt::format_to(std::back_inserter(text), "    forward: products {:.4g}, attention {:.4g}, heads {:.4g}\n",
                 flops.products, flops.attention, flops.heads);
  const int64_t most_a = largest_batch(plain, job.context, job.targets, memory);
  const int64_t most_b = largest_batch(checkpointed, job.context, job.targets, memory);
  fmt::format_to(std::back_inserter(text), "  {:<34} {:>12} {:>18}\n",
                 fmt::format("largest batch in {}", format_bytes(size_t(memory))), most_a, most_b);
  if (!args.json) {
    fmt::print("{}", fmt::to_string(text));
    return 0;
  }
  const auto record = [&](const models::TnpConfig& config, const models::TnpMemory& plan, int64_t most,
                          bool recompute) {
    return nlohmann::json{{"checkpoint_every", config.checkpoint_every},
                          {"parameters", plan.parameters},
                          {"gradients", plan.gradients},
                          {"optimizer", plan.optimizer},
                          {"saved", plan.saved},
                          {"transient", plan.transient},
                          {"total", plan.total()},
                          {"flops", flops.step(recompute)},
                          {"largest_batch", most}};
  };
  out["model"] = "tnp";
  out["parameter_count"] = count_parameters(plain);
  out["plain"] = record(plain, a, most_a, false);
  out["checkpointed"] = record(checkpointed, b, most_b, true);
  fmt::print("{}\n", out.dump(2));
  return 0;
}

}  // namespace

void add_plan(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand("plan", "Memory and FLOPs of a training run before it starts");
  command->require_subcommand(1);
  auto* tnp = command->add_subcommand("tnp", "Transformer Neural Process");
  auto args = std::make_shared<PlanArgs>();
  args->tnp.add_to(*tnp);
  tnp->add_option("--memory", args->memory, "GiB to plan for (default: free on the device now)")
      ->check(kFinite)
      ->check(CLI::Range(1e-6, 1e6));
  tnp->add_flag("--json", args->json, "Machine-readable");
  tnp->callback([&action, args] { action = [args] { return run_plan(*args); }; });
}

}  // namespace tessera::cli
