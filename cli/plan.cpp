#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/language_flags.h"
#include "cli/setting_flags.h"
#include "cli/tnp_flags.h"
#include "plan/plan.h"
#include "plan/ranks.h"
#include "runtime/allocator.h"
#include "runtime/text.h"

namespace tessera::cli {
namespace {

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
std::vector<std::pair<std::string, std::string>> rank_lines(const plan::RankPlan& plan) {
  const auto ms = [](double seconds) { return fmt::format("{:.4g} ms", seconds * 1e3); };
  return {{"sent by each rank over its link", format_bytes(size_t(plan.sent))},
          {"communication in a step", ms(plan.communicate)},
          {"of it exposed", ms(plan.exposed)},
          {"predicted step", ms(plan.step())},
          {"of one rank's throughput", fmt::format("{:.1f} %", plan.efficiency * 100)}};
}

nlohmann::json rank_json(const plan::RankPlan& plan) {
  return {{"sent", plan.sent},
          {"compute_ms", plan.compute * 1e3},
          {"communication_ms", plan.communicate * 1e3},
          {"exposed_communication_ms", plan.exposed * 1e3},
          {"step_ms", plan.step() * 1e3},
          {"efficiency", plan.efficiency}};
}

struct PlanArgs : PlaceFlags {
  TnpFlags tnp;
  ContextFlags context;
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
          {"optimizer", memory.optimizer + memory.averages},
          {"saved", memory.saved},
          {"transient", memory.transient},
          {"total", memory.total()},
          {"flops", flops},
          {"largest_batch", largest_batch}};
}

/// A step of the TNP on the ranks that the flags give, without and with checkpoints.
class TnpPlan {
 public:
  TnpPlan(const PlanArgs& args, const train::TnpSettings& job)
      : args_(args), job_(job), plain_(job.model), checkpointed_(job.model), memory_(memory_of(args.memory)) {
    plain_.checkpoint_every = 0;
    checkpointed_.checkpoint_every = std::max<int64_t>(1, job.model.checkpoint_every);
    flops_ = plan::count_flops(plain_, job.batch, job.context, job.targets);
    passes_ = rank_options().micro_batches;
    a_ = planned(plain_, job.batch, false), b_ = planned(checkpointed_, job.batch, true);
    most_a_ = largest(plain_), most_b_ = largest(checkpointed_);
  }

  std::string text() const {
    std::string text =
        fmt::format("tnp: {} parameters, {}, B={} M={} N={}, {} tokens per step\n",
                    plan::count_parameters(plain_), name_of(job_.precision()), job_.batch, job_.context,
                    job_.targets, job_.batch * (job_.context + job_.targets) * passes_);
    const auto line = [&](const std::string& name, const auto& plain, const auto& checkpointed) {
      text += fmt::format("  {:<34} {:>12} {:>18}\n", name, plain, checkpointed);
    };
    const auto bytes = [&](const char* name, double plain, double checkpointed) {
      line(name, format_bytes(size_t(plain)), format_bytes(size_t(checkpointed)));
    };
    line("bytes of a training step", "plain", fmt::format("checkpoint {}", checkpointed_.checkpoint_every));
    const plan::Memory &a = a_.memory, &b = b_.memory;
    bytes("parameters", a.parameters, b.parameters);
    bytes("gradients", a.gradients, b.gradients);
    bytes("optimizer (moments, masters)", a.optimizer, b.optimizer);
    bytes("activations kept for backward", a.saved, b.saved);
    bytes("largest temporaries", a.transient, b.transient);
    bytes("total", a.total(), b.total());
    const auto lines_a = rank_lines(a_), lines_b = rank_lines(b_);
    for (size_t i = 0; args_.ranks > 1 && i < lines_a.size(); ++i)
      line(lines_a[i].first, lines_a[i].second, lines_b[i].second);
    if (job_.split.ranks > 1)
      bytes("sent for attention, of all sent", attention(plain_, job_.batch),
            attention(checkpointed_, job_.batch));
    text += fmt::format("  {:<34} {:>12.4g} {:>18.4g}\n",
                        job_.split.ranks > 1 ? fmt::format("FLOP of a step, on {} ranks", job_.split.ranks)
                                             : "FLOP of a step",
                        double(passes_) * flops_.step(false), double(passes_) * flops_.step(true));
    text += fmt::format("    forward: GEMMs {:.4g}, attention {:.4g}, heads {:.4g}\n",
                        double(passes_) * flops_.gemms, double(passes_) * flops_.attention,
                        double(passes_) * flops_.heads);
    line(fmt::format("largest batch in {}", format_bytes(size_t(memory_))), most_a_, most_b_);
    return text;
  }

  nlohmann::json json() const {
    const auto record = [&](const models::TnpConfig& config, const plan::RankPlan& plan, int64_t most,
                            bool recompute) {
      nlohmann::json out = step_json(plan.memory, double(passes_) * flops_.step(recompute), most);
      out["checkpoint_every"] = config.checkpoint_every;
      out.update(rank_json(plan));
      if (job_.split.ranks > 1) out["sent_for_attention"] = attention(config, job_.batch);
      return out;
    };
    return {{"memory_bytes", memory_},
            {"model", "tnp"},
            {"precision", name_of(job_.precision())},
            {"parameter_count", plan::count_parameters(plain_)},
            {"plain", record(plain_, a_, most_a_, false)},
            {"checkpointed", record(checkpointed_, b_, most_b_, true)}};
  }

 private:
  plan::RankOptions rank_options() const {
    return args_.options(plan::measured_rate(plain_), job_.split.ranks);
  }
  double attention(const models::TnpConfig& config, int64_t batch) const {
    return plan::count_attention_bytes(config, batch, job_.context, job_.targets, job_.split);
  }
  plan::RankPlan planned(const models::TnpConfig& config, int64_t batch, bool recompute) const {
    plan::RankOptions options = rank_options();
    options.within = attention(config, batch);
    train::TnpSettings own = job_;
    own.model = config, own.batch = batch;
    return plan::plan_ranks(own.planned(Device::best()), flops_.step(recompute) / double(job_.split.ranks),
                            plan::arena_sizes(config), options);
  }
  int64_t largest(const models::TnpConfig& config) const {
    return largest_batch(memory_,
                         [&](int64_t batch) { return planned(config, batch, false).memory.total(); });
  }

  const PlanArgs& args_;
  const train::TnpSettings& job_;
  models::TnpConfig plain_, checkpointed_;
  double memory_;
  plan::Flops flops_;
  int64_t passes_;           // of a step
  plan::RankPlan a_, b_;     // plain, checkpointed
  int64_t most_a_, most_b_;  // the largest batches
};

int run_plan(PlanArgs args, const train::Given& given) {
  train::TnpSettings job = args.tnp.job(Device::best());
  args.context.set(job);
  const models::TaskSplit& split = job.split;
  args.ranks = std::max(args.ranks, split.ranks);
  if (args.ranks % split.ranks != 0)
    throw UsageError(
        fmt::format("--context-parallel {} does not divide --ranks {}", split.ranks, args.ranks));
  if (split.ranks > 1 && args.zero > 1)
    throw UsageError(
        "--zero 2 with --context-parallel: gradients cannot be spread next to a backward pass that makes "
        "calls of its own; expected --zero 0 or 1");
  args.options(0, split.ranks);  // or throws
  check_ranks(job, args, given, split.ranks);
  const TnpPlan step(args, job);
  fmt::print("{}", args.json ? step.json().dump(2) + "\n" : step.text());
  return 0;
}

struct LanguagePlanArgs : PlaceFlags {
  explicit LanguagePlanArgs(bool llama) : flags(llama) {}
  LanguageFlags flags;
};

int run_language_plan(const LanguagePlanArgs& args, const train::Given& given) {
  const train::LanguageSettings job = args.flags.job(given, Device::best());
  const double memory = memory_of(args.memory);
  const plan::Forms forms = job.forms();
  const plan::Flops flops = plan::count_flops(job.model, job.batch, job.length, forms);
  const plan::RankOptions options = args.options(plan::measured_rate(job.model));
  check_ranks(job, args, given);
  const plan::ArenaSizes sizes = plan::arena_sizes(job.model, forms);
  const auto ranked = [&](int64_t batch) {
    train::LanguageSettings own = job;
    own.batch = batch;
    return plan::plan_ranks(own.planned(Device::best()), flops.step(), sizes, options);
  };
  const plan::RankPlan ranks = ranked(job.batch);
  const plan::Memory& plan = ranks.memory;
  const auto passes = double(options.micro_batches);  // of a step, on each rank
  const int64_t parameters = plan::count_parameters(job.model, forms);
  const int64_t most = largest_batch(memory, [&](int64_t batch) { return ranked(batch).memory.total(); });
  if (args.json) {
    nlohmann::json out = step_json(plan, passes * flops.step(), most);
    out["model"] = job.family();
    if (job.factors.factorizes()) out["form"] = job.factors.description();
    if (job.weights24.on()) out["weights24"] = job.weights24.description();
    out["memory_bytes"] = memory;
    out.update(rank_json(ranks));
    out["precision"] = name_of(job.precision());
    out["parameter_count"] = parameters;
    fmt::print("{}\n", out.dump(2));
    return 0;
  }
  fmt::print("{}: {} parameters, {}, B={} T={}, {} tokens per step\n", job.family(), parameters,
             name_of(job.precision()), job.batch, job.length, job.batch * job.length * options.micro_batches);
  if (job.factors.factorizes()) fmt::print("  weights: {}\n", job.factors.description());
  if (job.weights24.on()) fmt::print("  weights: {}\n", job.weights24.description());
  fmt::print("  {:<34} {:>12}\n", "bytes of a training step", "");
  for (const auto& [name, bytes] :
       {std::pair("parameters", plan.parameters), std::pair("gradients", plan.gradients),
        std::pair(job.ema > 0 ? "optimizer (moments, masters, ema)" : "optimizer (moments, masters)",
                  plan.optimizer + plan.averages),
        std::pair("activations kept for backward", plan.saved),
        std::pair("largest temporaries", plan.transient), std::pair("total", plan.total())})
    fmt::print("  {:<34} {:>12}\n", name, format_bytes(size_t(bytes)));
  if (args.ranks > 1)
    for (const auto& [name, value] : rank_lines(ranks)) fmt::print("  {:<34} {:>12}\n", name, value);
  fmt::print("  {:<34} {:>12.4g}\n", "FLOP of a step", passes * flops.step());
  fmt::print("    forward: GEMMs {:.4g}, attention {:.4g}, LM head {:.4g}\n", passes * flops.gemms,
             passes * flops.attention, passes * flops.heads);
  fmt::print("  {:<34} {:>12}\n", fmt::format("largest batch in {}", format_bytes(size_t(memory))), most);
  return 0;
}

void add_language_plan(CLI::App& plan, Action& action, bool llama) {
  auto* command = llama ? plan.add_subcommand("llama", "LLaMA") : plan.add_subcommand("gpt", "GPT-2");
  auto args = std::make_shared<LanguagePlanArgs>(llama);
  args->flags.settings().length = 1024;
  args->flags.add_sizes(*command, llama ? "130m" : "small");
  args->flags.add_vocabulary(*command);
  args->PlaceFlags::add_to(*command, args->flags.settings());
  command->callback([&action, args, command] {
    action = [args, command] { return run_language_plan(*args, given_flags(*command)); };
  });
}

}  // namespace

void add_plan(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand("plan", "Estimate memory and FLOPs of a training run before it starts");
  command->require_subcommand(1);
  auto* tnp = command->add_subcommand("tnp", "Transformer Neural Process");
  auto args = std::make_shared<PlanArgs>();
  args->tnp.add_to(*tnp);
  args->PlaceFlags::add_to(*tnp, args->tnp.settings());
  args->context.add_to(*tnp);
  tnp->callback(
      [&action, args, tnp] { action = [args, tnp] { return run_plan(*args, given_flags(*tnp)); }; });
  add_language_plan(*command, action, false);
  add_language_plan(*command, action, true);
}

}  // namespace tessera::cli
