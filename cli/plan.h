#pragma once

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "cli/commands.h"
#include "cli/setting_flags.h"
#include "plan/plan.h"
#include "plan/ranks.h"
#include "runtime/allocator.h"
#include "runtime/text.h"

/// What the subcommands of `tessera plan` share.

namespace tessera::cli {

/// What the plans of all models are asked: for how much memory, and on how many ranks.
struct PlaceFlags {
  std::string memory, order;
  bool json = false;
  int64_t ranks = 1, zero = 0, accumulate = 0;
  double bucket_mb = 32, link_gbs = 327, step_ms = 0;
  const CLI::App* command = nullptr;  // that add_to() was called with

  /// `job`: gets the flags of the optimizer.
  template <class Job>
  void add_to(CLI::App& command, Job& job) {
    this->command = &command;
    train::SettingList states;
    job.add_states(states);
    if constexpr (requires { job.add_averages(states); }) job.add_averages(states);
    add_flags(command, states);
    command
        .add_option("--memory", memory, "Memory to plan for, in GiB; default: what is free on the device now")
        ->check(kFinite)
        ->check(between(1e-6, 1e6));
    command
        .add_option("--ranks,--gpus", ranks,
                    "Number of ranks that train together, one per GPU; figures are per rank")
        ->check(whole(1, int64_t{1} << 20));
    command
        .add_option("--zero", zero,
                    "ZeRO stage; 1: shard moments and master weights over the ranks; 2: gradients, too")
        ->check(whole(0, 2));
    command
        .add_option("--accumulate", accumulate,
                    "Micro-batches per step, on all ranks together; default: one per rank")
        ->check(whole(1, int64_t{1} << 30));
    command.add_option("--order", order, "Order of their sums: global (default on several ranks) or world")
        ->check(CLI::IsMember({"world", "global"}));
    command
        .add_option("--bucket-mb", bucket_mb,
                    "MiB of gradients that are summed at once next to the backward pass")
        ->check(kFinite)
        ->check(between(0, 65536));
    command
        .add_option("--link-gbs", link_gbs,
                    "Bus GB/s of the slowest link (tessera bench collective); default: of two H200")
        ->check(kFinite)
        ->check(between(1e-3, 1e6));
    command
        .add_option("--step-ms", step_ms,
                    "Step time of one rank (tessera bench step); default: its FLOPs at an H200's rate")
        ->check(kFinite)
        ->check(between(1e-6, 1e9));
    command.add_flag("--json", json, "Print the result as JSON");
  }
  /// `rate`: of plan::measured_rate. `each`: consecutive ranks that share a micro-batch.
  plan::RankOptions options(double rate, int64_t each = 1) const {
    if (ranks == 1)
      refuse_given(*command, {"--zero", "--bucket-mb", "--link-gbs", "--step-ms"},
                   "says nothing of one rank; add --ranks N, or leave it out");
    const int64_t groups = ranks / each;
    if (accumulate % groups != 0)
      throw UsageError(
          each == 1 ? fmt::format("--accumulate {}: expected a multiple of --ranks {}", accumulate, ranks)
                    : fmt::format("--accumulate {}: expected a multiple of {}, the groups of --ranks {} that "
                                  "share tasks",
                                  accumulate, groups, ranks));
    return {.ranks = ranks,
            .zero = zero,
            .micro_batches = std::max<int64_t>(1, accumulate / groups),
            .bucket_mb = each == 1 ? bucket_mb : 0,  // the passes make calls of their own (train/step.h)
            .global_order = each == 1 && (order.empty() ? ranks > 1 : order == "global"),
            .bus = link_gbs * 1e9,
            .compute = step_ms * 1e-3,
            .rate = rate};
  }
};

/// Throws UsageError for what `tessera train` refuses on these ranks. `each`: consecutive ranks that share a
/// micro-batch.
template <class Job>
void check_ranks(Job job, const PlaceFlags& place, train::Given given, int64_t each = 1) {
  if (place.accumulate > 0) job.accumulate = place.accumulate;
  if (!place.order.empty()) job.order = place.order;
  if (each > 1) given.insert("--order");  // that of the world
  const int groups = int(place.ranks / each);
  try {
    job.check_optimizer_flags(given);
    if constexpr (requires { job.ema; }) job.check_averages(place.zero);
    check(
        each == 1 || job.order == "world",
        "--context-parallel with --order global, which promises the bits of any number of ranks: those of a "
        "task depend on how many share it; leave --order out");
    job.set_ranks(groups, given, false);
    job.check_zero(place.zero, groups);
    if constexpr (requires { job.sparse24; }) {
      job.check_on_ranks(groups);
      job.validate();
    }
  } catch (const Error& error) {
    throw UsageError(error.message());
  }
}

/// Lines about ranks: name and value.
inline std::vector<std::pair<std::string, std::string>> rank_lines(const plan::RankPlan& plan) {
  const auto ms = [](double seconds) { return fmt::format("{:.4g} ms", seconds * 1e3); };
  return {{"sent by each rank over its link", format_bytes(size_t(plan.sent))},
          {"communication in a step", ms(plan.communicate)},
          {"of it exposed", ms(plan.exposed)},
          {"predicted step", ms(plan.step())},
          {"of one rank's throughput", fmt::format("{:.1f} %", plan.efficiency * 100)}};
}

inline nlohmann::json rank_json(const plan::RankPlan& plan) {
  return {{"sent", plan.sent},
          {"compute_ms", plan.compute * 1e3},
          {"communication_ms", plan.communicate * 1e3},
          {"exposed_communication_ms", plan.exposed * 1e3},
          {"step_ms", plan.step() * 1e3},
          {"efficiency", plan.efficiency}};
}

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
inline double memory_of(const std::string& given) {
  return given.empty() ? double(Device::best().allocator().usage().first)
                       : std::stod(given) * double(1 << 30);
}

inline nlohmann::json step_json(const plan::Memory& memory, double flops, int64_t largest_batch) {
  return {{"parameters", memory.parameters},
          {"gradients", memory.gradients},
          {"optimizer", memory.optimizer + memory.averages},
          {"saved", memory.saved},
          {"transient", memory.transient},
          {"total", memory.total()},
          {"flops", flops},
          {"largest_batch", largest_batch}};
}

/// The bytes of a step; `optimizer` names what the optimizer keeps.
inline std::string memory_lines(const plan::Memory& plan, const char* optimizer) {
  std::string text = fmt::format("  {:<34} {:>12}\n", "bytes of a training step", "");
  for (const auto& [name, bytes] :
       {std::pair("parameters", plan.parameters), std::pair("gradients", plan.gradients),
        std::pair(optimizer, plan.optimizer + plan.averages),
        std::pair("activations kept for backward", plan.saved),
        std::pair("largest temporaries", plan.transient), std::pair("total", plan.total())})
    text += fmt::format("  {:<34} {:>12}\n", name, format_bytes(size_t(bytes)));
  return text;
}

void add_bert_plan(CLI::App& plan, Action& action);

}  // namespace tessera::cli
