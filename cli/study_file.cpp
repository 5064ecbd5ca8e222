#include "cli/study_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <limits>
#include <set>

#include "cli/commands.h"
#include "cli/explain.h"
#include "cli/toml.h"
#include "datasets/glue.h"
#include "runtime/error.h"
#include "runtime/text.h"

namespace tessera::cli {
namespace {

const std::vector<std::string> kStudyKeys = {"title",    "command", "metric",        "better",
                                             "baseline", "seeds",   "learning_rates"};
const std::vector<std::string> kStudySections = {"flags", "arm", "task"};

/// The sections of the file; throws UsageError for one that a study does not have.
std::vector<TomlSection> read_sections(const std::string& path) {
  std::vector<TomlSection> sections = read_toml(path);
  for (size_t i = 1; i < sections.size(); ++i)
    if (const std::string& name = sections[i].name;
        std::ranges::find(kStudySections, name) == kStudySections.end())
      throw UsageError(place_in(path, sections[i].line) + "section [" + name +
                       "]: expected [flags], [[arm]] or [[task]]" + did_you_mean(name, kStudySections));
  return sections;
}

std::string one_value(const std::string& path, const TomlEntry& entry) {
  if (entry.values.size() != 1 || entry.values.front().empty())
    throw UsageError(place_in(path, entry.line) + "\"" + entry.name + "\": expected one value");
  return entry.values.front();
}

/// The flags of `tessera train <command>`, as the parser has them.
class TrainFlags {
 public:
  explicit TrainFlags(const std::string& path) : path_(path), app_("tessera", "tessera") {
    add_train(app_, unused_);
    be_strict(app_);
  }

  void choose(const std::string& command) {
    std::vector<std::string> names;
    for (const CLI::App* sub : app_.get_subcommand("train")->get_subcommands([](CLI::App*) { return true; }))
      names.push_back(sub->get_name());
    if (command.empty())
      throw UsageError(path_ +
                       ": command is missing; expected the subcommand of `tessera train` to run, one of " +
                       joined(names));
    if (std::ranges::find(names, command) == names.end())
      throw UsageError(path_ + ": command is \"" + command + "\"; expected one of " + joined(names) +
                       did_you_mean(command, names));
    command_ = app_.get_subcommand("train")->get_subcommand(command);
  }

  bool has(const std::string& flag) const { return command_->get_option_no_throw(flag) != nullptr; }

  /// Adds the flag of an entry; `where` is "arm "dense"".
  void take(const TomlEntry& entry, const std::string& where, study::Flags& flags) const {
    const std::string at = place_in(path_, entry.line) + where + ": ";
    const CLI::Option* const option =
        entry.name == "help" ? nullptr : command_->get_option_no_throw("--" + entry.name);
    if (!option) {
      const bool of_study = std::ranges::find(kStudyKeys, entry.name) != kStudyKeys.end();
      std::vector<std::string> names;
      for (const CLI::Option* known : command_->get_options())
        for (const std::string& name : known->get_lnames()) names.push_back(name);
      throw UsageError(
          at + "\"" + entry.name + "\" is not a flag of tessera train " + command_->get_name() +
          (of_study ? "; it belongs before the first section" : did_you_mean(entry.name, names)));
    }
    const std::string name = option->get_name();
    if (flags.contains(name)) throw UsageError(at + "\"" + entry.name + "\" is given twice");
    if (option->get_expected_max() == 0) {
      const std::string value = one_value(path_, entry);
      if (value != "true" && value != "false")
        throw UsageError(at + "\"" + entry.name + "\" is \"" + value + "\"; expected true or false");
      if (value == "true") flags[name] = {};
      return;
    }
    if (entry.values.empty() || (entry.values.size() > 1 && option->get_expected_max() <= 1))
      throw UsageError(at + "\"" + entry.name + "\": expected one value");
    flags[name] = entry.values;
  }

  /// Throws unless the command's parser takes the cell's command line.
  void check_line(const study::Plan& plan, const study::Cell& cell) const {
    const std::vector<std::string> words = study::arguments_of(plan, cell, "runs", false);
    CLI::App app("tessera", "tessera");
    Action unused;
    add_train(app, unused);
    be_strict(app);
    try {
      app.parse(std::vector<std::string>(words.rbegin(), words.rend()));
    } catch (const CLI::ParseError& error) {
      throw UsageError(fmt::format("{}: arm \"{}\"{}: {}", path_, cell.arm,
                                   cell.task.empty() ? "" : " on task \"" + cell.task + "\"",
                                   explain(app, error, words)));
    }
  }

 private:
  const std::string& path_;
  Action unused_;
  CLI::App app_;
  const CLI::App* command_ = nullptr;
};

/// `at`: "FILE:LINE: ".
uint64_t seed_of(const std::string& at, const std::string& text) {
  uint64_t seed = 0;
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), seed);
  if (code != std::errc{} || end != text.data() + text.size())
    throw UsageError(at + "seeds: \"" + text + "\" is not a whole number of 0 or more");
  if (seed > uint64_t(std::numeric_limits<int64_t>::max() - 1000))
    throw UsageError(at + "seeds: " + text + " is too large");
  return seed;
}

void take_study_key(const std::string& path, const TomlEntry& entry, study::Plan& plan) {
  if (entry.name == "seeds") {
    for (const std::string& text : entry.values)
      if (!text.empty()) plan.seeds.push_back(seed_of(place_in(path, entry.line), text));
  } else if (entry.name == "learning_rates") {
    for (const std::string& text : entry.values)
      if (!text.empty()) plan.rates.push_back(text);
  } else if (entry.name == "better") {
    const std::string better = one_value(path, entry);
    if (better != "higher" && better != "lower")
      throw UsageError(place_in(path, entry.line) + "better is \"" + better + "\"; expected higher or lower");
    plan.higher = better == "higher";
  } else {
    const std::string value = one_value(path, entry);
    (entry.name == "title"     ? plan.title
     : entry.name == "command" ? plan.command
     : entry.name == "metric"  ? plan.metric
                               : plan.baseline) = value;
  }
}

/// Whether a lower value of a metric of this name is the better one: a loss, an error or a cost.
bool is_lower_better(const std::string& metric) {
  return std::ranges::any_of(
      std::vector<const char*>{"loss", "nll", "perplexity", "gap", "bits", "error", "ms_per_step", "_ms",
                               "_gib", "_wait", "skipped", "dropped"},
      [&](const char* part) { return metric.find(part) != std::string::npos; });
}

/// What the runs of `train bert` do, by --task wherever the file has it.
struct BertRuns {
  bool pretrains = false, tunes = false;

  explicit BertRuns(const study::Plan& plan) {
    look(plan.flags);
    for (const study::Part& part : plan.arms) look(part.flags);
    for (const study::Part& part : plan.tasks) look(part.flags);
  }

 private:
  void look(const study::Flags& flags) {
    const auto task = flags.find("--task");
    if (task != flags.end()) (task->second == std::vector<std::string>{"mlm"} ? pretrains : tunes) = true;
  }
};

/// The values of the command's evaluations in metrics.jsonl, as tnp_job.cpp, language_evaluation.cpp,
/// mlm_job.cpp and eval/glue.cpp name them.
std::vector<std::string> evaluated_by(const study::Plan& plan) {
  if (plan.command == "tnp") return {"eval_nll", "eval_optimal_nll", "eval_gap", "eval_gap_error"};
  if (plan.command != "bert") return {"eval_nll", "eval_perplexity", "eval_bits_per_byte", "eval_gap"};
  const auto [pretrains, tunes] = BertRuns(plan);
  std::vector<std::string> names;
  if (pretrains) names = {"eval_nll", "eval_accuracy"};
  if (pretrains && !tunes) return names;
  names.insert(names.end(), {"eval_score", "eval_loss"});
  for (const datasets::GlueInfo& info : datasets::glue_tasks())
    for (const char* const metric : info.metrics)
      if (std::ranges::find(names, std::string("eval_") + metric) == names.end())
        names.push_back(std::string("eval_") + metric);
  return names;
}

/// The other values that its runs may log in metrics.jsonl: those of steps, as step_log.cpp names them, and
/// of language models, as LanguageSettings::penalties, LanguageJob::state_values and its evaluations do.
std::vector<std::string> logged_by(const study::Plan& plan) {
  std::vector<std::string> names = {"loss",
                                    "lr",
                                    "grad_norm",
                                    "ms_per_step",
                                    "tokens_per_s",
                                    "data_wait",
                                    "memory_gib",
                                    "peak_gib",
                                    "skipped_steps",
                                    "loss_scale",
                                    "exposed_communication_ms"};
  if (plan.command == "gpt" || plan.command == "llama")
    names.insert(names.end(), {"activation_l1", "masked_decay", "flip_rate", "ngram_nll",
                               "ngram_bits_per_byte", "activation_zeros", "dropped_energy", "zeros.",
                               "dropped."});  // the last two of each network
  return names;
}

/// Throws UsageError for a metric that no run of the command logs. What depends on the run's flags, as
/// loss_scale does, shows at the end of the first cell.
void check_metric(const study::Plan& plan, const std::string& path) {
  const std::vector<std::string> evaluated = evaluated_by(plan), logged = logged_by(plan);
  const auto is_evaluated = [&](const std::string& name) {  // "eval_accuracy_mismatched": of one of two sets
    return plan.metric == name || (plan.command == "bert" && plan.metric.starts_with(name + "_"));
  };
  const auto is_logged = [&](const std::string& name) {
    return plan.metric == name || (name.ends_with('.') && plan.metric.starts_with(name));
  };
  if (std::ranges::any_of(evaluated, is_evaluated) || std::ranges::any_of(logged, is_logged)) return;
  std::vector<std::string> all = evaluated;
  all.insert(all.end(), logged.begin(), logged.end());
  throw UsageError(path + ": metric is \"" + plan.metric + "\", which tessera train " + plan.command +
                   " does not log; expected one of " + joined(evaluated) +
                   " or a value of the steps, such as loss" + did_you_mean(plan.metric, all));
}

/// Fills in what the file does not say.
void complete(study::Plan& plan, const std::string& path, bool has_direction) {
  if (plan.title.empty()) plan.title = std::filesystem::path(path).stem().string();
  const BertRuns bert(plan);
  const bool scored = plan.command == "bert" && (bert.tunes || !bert.pretrains);
  if (plan.metric.empty()) plan.metric = scored ? "eval_score" : "eval_nll";
  if (!has_direction) plan.higher = !is_lower_better(plan.metric);
  if (plan.baseline.empty() && !plan.arms.empty()) plan.baseline = plan.arms.front().name;
}

}  // namespace

study::Plan read_study(const std::string& path) {
  const std::vector<TomlSection> tables = read_sections(path);
  study::Plan plan;
  bool has_direction = false;
  for (const TomlEntry& entry : tables.front().entries) {
    if (std::ranges::find(kStudyKeys, entry.name) == kStudyKeys.end())
      throw UsageError(place_in(path, entry.line) + "\"" + entry.name + "\": expected one of " +
                       joined(kStudyKeys) + "; flags belong under [flags], [[arm]] or [[task]]");
    has_direction = has_direction || entry.name == "better";
    take_study_key(path, entry, plan);
  }
  TrainFlags flags(path);
  flags.choose(plan.command);
  for (size_t i = 1; i < tables.size(); ++i) {
    const TomlSection& table = tables[i];
    if (table.name == "flags") {
      for (const TomlEntry& entry : table.entries) flags.take(entry, "[flags]", plan.flags);
      continue;
    }
    study::Part part;
    for (const TomlEntry& entry : table.entries)
      if (entry.name == "name") part.name = one_value(path, entry);
    if (part.name.empty())
      throw UsageError(place_in(path, table.line) + "an [[" + table.name + "]] has no name; give it one");
    for (const TomlEntry& entry : table.entries)
      if (entry.name != "name") flags.take(entry, table.name + " \"" + part.name + "\"", part.flags);
    (table.name == "arm" ? plan.arms : plan.tasks).push_back(std::move(part));
  }
  plan.one_seed_per_run = flags.has("--seeds");
  complete(plan, path, has_direction);
  check_metric(plan, path);
  try {
    plan.validate();
  } catch (const Error& error) {
    throw UsageError(path + ": " + error.message());
  }
  std::set<std::pair<std::string, std::string>> checked;
  for (const study::Cell& cell : study::cells_of(plan))
    if (cell.seed == plan.seeds.front() && checked.insert({cell.arm, cell.task}).second)
      flags.check_line(plan, cell);
  return plan;
}

}  // namespace tessera::cli
