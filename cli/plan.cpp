#include "cli/plan.h"

#include "cli/language_flags.h"
#include "cli/tnp_flags.h"

namespace tessera::cli {
namespace {

struct PlanArgs : PlaceFlags {
  TnpFlags tnp;
  ContextFlags context;
};

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
  fmt::print("{}", memory_lines(plan, job.ema > 0 ? "optimizer (moments, masters, ema)"
                                                  : "optimizer (moments, masters)"));
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
  add_bert_plan(*command, action);
}

}  // namespace tessera::cli
