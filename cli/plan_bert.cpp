#include <algorithm>

#include "cli/bert_flags.h"
#include "cli/language_folder.h"
#include "cli/plan.h"
#include "io/file.h"
#include "pretrained/config.h"
#include "runtime/error.h"
#include "train/bert_model.h"
#include "train/mlm_run.h"

namespace tessera::cli {
namespace {

struct BertPlanArgs : PlaceFlags {
  train::GlueStart start;
  train::MlmStart mlm;
  PrecisionFlag precision;

  void add_to(CLI::App& command) {
    start.settings.task = "sst2";
    start.vocab_size = models::BertConfig().vocabulary;
    start.size = "base";
    // Of the flags of `train bert` those that a step's memory and FLOPs depend on.
    train::SettingList list;
    for (const char* const flag :
         {"--task", "--max-length", "--batch-size", "--model", "--size", "--layers", "--d-model", "--n-head",
          "--d-ff", "--vocab-size", "--dropout", "--slice", "--rows", "--slice-threshold", "--weight-grad",
          "--slice-layers", "--dropbp", "--train"})
      take(list, start.list(), flag);
    take(list, mlm.list(), "--mask");
    start.settings.factors.add_to(list);
    add_flags(command, list);
    precision.add_to(command);
    PlaceFlags::add_to(command, start.settings);
  }

 private:
  static void take(train::SettingList& list, const train::SettingList& from, const std::string& flag) {
    for (train::Setting setting : from.all()) {
      if (setting.flag != flag) continue;
      for (const std::string& where : {std::string(", with --scratch"), std::string(" with --scratch")})
        if (const size_t at = setting.help.find(where); at != std::string::npos)
          setting.help.erase(at, where.size());
      list.all().push_back(setting);
    }
  }
};

/// The settings of a fine-tuning run with these flags, of as many steps as a run can have.
train::GlueSettings glue_settings(const train::GlueStart& start, const train::Given& given, Device device) {
  const datasets::GlueInfo& info = datasets::parse_glue_task(start.settings.task);
  train::GlueSettings settings = start.settings;
  settings.task = info.name;
  std::string path = "config.json", text;
  if (settings.model.empty()) {
    models::BertConfig config = start.scratch_config(given);
    config.vocabulary = start.vocab_size, config.head = models::BertHead::classify;
    text = pretrained::config_text(config);
  } else {
    settings.model = language_folder(settings.model);
    path = settings.model + "/config.json", text = io::read_file(path, uint64_t{256} << 20);
  }
  settings.bert = train::bert_config(path, text, info.task);
  if (given.contains("--dropout"))
    settings.bert.hidden_dropout = settings.bert.attention_dropout = settings.bert.classifier_dropout =
        start.dropout;
  settings.set_precision(start.precision.value_or(default_precision(device)));
  if (!given.contains("--max-length")) settings.max_length = train::default_max_length(settings.bert);
  settings.steps = train::GlueSettings::kLargest;
  settings.validate();
  return settings;
}

train::MlmSettings pretraining_settings(const BertPlanArgs& args, const train::Given& given, Device device) {
  train::GlueStart start = args.start;
  if (!start.settings.model.empty()) start.settings.model = language_folder(start.settings.model);
  train::MlmSettings settings = train::mlm_settings(start, args.mlm, given, device);
  if (settings.model.empty()) settings.bert.vocabulary = start.vocab_size;
  return settings;
}

template <class Settings>
void print_plan(const BertPlanArgs& args, const Settings& job, const train::Given& given) {
  const Device device = Device::best();
  const double memory = memory_of(args.memory);
  const plan::BertStep step = job.planned_step(device);
  const plan::RankOptions options = args.options(plan::measured_rate(job.bert));
  check_ranks(job, args, given);
  const plan::ArenaSizes sizes = plan::arena_sizes(job.bert, step);
  const double flops = plan::step_flops(job.bert, step);
  const auto ranked = [&](int64_t batch) {
    Settings own = job;
    own.batch = batch;
    return plan::plan_ranks(own.planned(device), flops, sizes, options);
  };
  const plan::RankPlan ranks = ranked(job.batch);
  const auto passes = double(options.micro_batches);  // of a step, on each rank
  const int64_t parameters = plan::count_parameters(job.bert, step.forms),
                trained = plan::count_trained(job.bert, step);
  const int64_t most = largest_batch(memory, [&](int64_t batch) { return ranked(batch).memory.total(); });
  const double sliced = plan::sliced_bytes(job.bert, step);
  // Of the same layers without a slice.
  plan::BertStep whole = step;
  whole.slice.reset();
  const double unsliced = sliced + plan::count_memory(job.bert, whole).saved - ranks.memory.saved;
  if (args.json) {
    nlohmann::json out = step_json(ranks.memory, passes * flops, most);
    out["model"] = "bert", out["task"] = job.task;
    out["memory_bytes"] = memory;
    out.update(rank_json(ranks));
    out["precision"] = name_of(job.precision());
    out["parameter_count"] = parameters, out["trained_count"] = trained;
    if (job.factors.factorizes()) out["form"] = job.factors.description();
    if (step.slice) out["saved_sliced"] = sliced, out["saved_unsliced"] = unsliced;
    fmt::print("{}\n", out.dump(2));
    return;
  }
  fmt::print("bert, {}: {} parameters{}, {}, B={} T={}, {} tokens per step\n", job.task, parameters,
             trained < parameters ? fmt::format(" ({} trained)", trained) : "", name_of(job.precision()),
             job.batch, job.max_length, job.batch * job.max_length * options.micro_batches);
  if (job.factors.factorizes()) fmt::print("  weights: {}\n", job.factors.description());
  if constexpr (requires { job.slice; }) {
    if (job.slice.slices()) fmt::print("  slice: {}\n", job.slice.description());
    if (job.drop.drops()) fmt::print("  dropbp: {}; means over many draws\n", job.drop.description());
  }
  fmt::print("{}", memory_lines(ranks.memory, "optimizer (moments, masters)"));
  if (step.slice)
    fmt::print("  {:<34} {:>12} of {} unsliced\n", "kept by sliced layers", format_bytes(size_t(sliced)),
               format_bytes(size_t(unsliced)));
  if (args.ranks > 1)
    for (const auto& [name, value] : rank_lines(ranks)) fmt::print("  {:<34} {:>12}\n", name, value);
  const plan::Flops forward = plan::count_flops(job.bert, step);
  fmt::print("  {:<34} {:>12.4g}\n", "FLOP of a step", passes * flops);
  fmt::print("    forward: GEMMs {:.4g}, attention {:.4g}, head {:.4g}\n", passes * forward.gemms,
             passes * forward.attention, passes * forward.heads);
  fmt::print("  {:<34} {:>12}\n", fmt::format("largest batch in {}", format_bytes(size_t(memory))), most);
}

int run_bert_plan(BertPlanArgs args, const train::Given& given) {
  args.start.precision = args.precision.given();
  const Device device = Device::best();
  if (args.start.settings.task == "mlm") {
    check_pretraining("plan bert", args.start, given);
    print_plan(args, pretraining_settings(args, given, device), given);
    return 0;
  }
  if (given.contains("--mask")) throw UsageError("plan bert: --mask is only for --task mlm");
  check_fine_tuning("plan bert", args.start, given);
  print_plan(args, glue_settings(args.start, given, device), given);
  return 0;
}

}  // namespace

void add_bert_plan(CLI::App& plan, Action& action) {
  auto* command = plan.add_subcommand("bert", "BERT or RoBERTa: fine-tuning, or pretraining with --task mlm");
  auto args = std::make_shared<BertPlanArgs>();
  args->add_to(*command);
  command->callback([&action, args, command] {
    action = [args, command] { return run_bert_plan(*args, given_flags(*command)); };
  });
}

}  // namespace tessera::cli
