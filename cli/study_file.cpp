#include "cli/study_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <limits>
#include <set>

#include "cli/commands.h"
#include "cli/explain.h"
#include "runtime/error.h"

namespace tessera::cli {
namespace {

/// The entries of a section: [flags] or one of several [[arm]].
struct TomlTable {
  std::string section;  // "": those before the first section
  std::vector<CLI::ConfigItem> items;
};

const std::vector<std::string> kStudyKeys = {"title",    "command", "metric",        "better",
                                             "baseline", "seeds",   "learning_rates"};
const std::vector<std::string> kStudySections = {"flags", "arm", "task"};

std::string joined_names(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

std::string suggestion(const std::string& word, const std::vector<std::string>& names) {
  const std::string near = nearest(word, names);
  return near.empty() ? "" : "; did you mean " + near + "?";
}

/// The file by sections. The reader of CLI11 cuts texts at a # and takes what it does not understand for a
/// switch: both are refused here.
std::vector<TomlTable> read_tables(const std::string& path) {
  std::vector<TomlTable> tables = {{"", {}}};
  bool open = false;  // the last one may get more entries
  for (const CLI::ConfigItem& item : read_toml(path)) {
    const std::string section = item.parents.empty() ? "" : item.parents.front();
    if (item.parents.size() > 1)
      throw UsageError(fmt::format("{}: section [{}.{}]: expected [flags], [[arm]] or [[task]]", path,
                                   section, item.parents[1]));
    if (!section.empty() && std::ranges::find(kStudySections, section) == kStudySections.end())
      throw UsageError(path + ": section [" + section + "]: expected [flags], [[arm]] or [[task]]" +
                       suggestion(section, kStudySections));
    if (!section.empty() && !open && item.name != "--") tables.push_back({section, {}}), open = true;
    if (item.name == "--") open = false;
    if (item.name == "--" || item.name == "++") continue;
    if (item.name.starts_with('['))
      throw UsageError(path + ": " + item.name + ": a section must be alone on its line, without a comment");
    for (const std::string& value : item.inputs)
      if (value.find_first_of("\"#") != std::string::npos || value.starts_with('\''))
        throw UsageError(
            path + ": \"" + item.name + "\": the value " + value +
            " cannot be read; quotes must be closed, and # is not allowed in a text or an array");
    for (const CLI::ConfigItem& other : tables.back().items)
      if (other.name == item.name) throw UsageError(path + ": \"" + item.name + "\" is given twice");
    tables.back().items.push_back(item);
  }
  return tables;
}

std::string one_value(const std::string& path, const CLI::ConfigItem& item) {
  if (item.inputs.size() != 1 || item.inputs.front().empty())
    throw UsageError(path + ": \"" + item.name + "\": expected one value" +
                     (item.inputs.size() > 1 ? "; put a text with blanks or commas into quotes" : ""));
  return item.inputs.front();
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
                       joined_names(names));
    if (std::ranges::find(names, command) == names.end())
      throw UsageError(path_ + ": command is \"" + command + "\"; expected one of " + joined_names(names) +
                       suggestion(command, names));
    command_ = app_.get_subcommand("train")->get_subcommand(command);
  }

  bool has(const std::string& flag) const { return command_->get_option_no_throw(flag) != nullptr; }

  /// Adds the flag of an entry; `where` is "arm "dense"".
  void take(const CLI::ConfigItem& item, const std::string& where, train::StudyFlags& flags) const {
    const std::string at = path_ + ": " + where + ": ";
    const CLI::Option* const option =
        item.name == "help" ? nullptr : command_->get_option_no_throw("--" + item.name);
    if (!option) {
      const bool of_study = std::ranges::find(kStudyKeys, item.name) != kStudyKeys.end();
      std::vector<std::string> names;
      for (const CLI::Option* known : command_->get_options())
        for (const std::string& name : known->get_lnames()) names.push_back(name);
      throw UsageError(at + "\"" + item.name + "\" is not a flag of tessera train " + command_->get_name() +
                       (of_study ? "; it belongs before the first section" : suggestion(item.name, names)));
    }
    const std::string name = option->get_name();
    if (flags.contains(name)) throw UsageError(at + "\"" + item.name + "\" is given twice");
    if (option->get_expected_max() == 0) {
      const std::string value = one_value(path_, item);
      if (value != "true" && value != "false")
        throw UsageError(at + "\"" + item.name + "\" is \"" + value + "\"; expected true or false");
      if (value == "true") flags[name] = {};
      return;
    }
    if (item.inputs.empty() || (item.inputs.size() > 1 && option->get_expected_max() <= 1))
      throw UsageError(at + "\"" + item.name +
                       "\": expected one value; put a text with blanks or commas into quotes");
    flags[name] = item.inputs;
  }

  /// Throws unless the command's parser takes the cell's command line.
  void check_line(const train::StudyPlan& plan, const train::StudyCell& cell) const {
    const std::vector<std::string> words = train::arguments_of(plan, cell, "runs", false);
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

uint64_t seed_of(const std::string& path, const std::string& text) {
  uint64_t seed = 0;
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), seed);
  if (code != std::errc{} || end != text.data() + text.size())
    throw UsageError(path + ": seeds: \"" + text + "\" is not a whole number of 0 or more");
  if (seed > uint64_t(std::numeric_limits<int64_t>::max() - 1000))
    throw UsageError(path + ": seeds: " + text + " is too large");
  return seed;
}

void take_study_key(const std::string& path, const CLI::ConfigItem& item, train::StudyPlan& plan) {
  if (item.name == "seeds") {
    for (const std::string& text : item.inputs)
      if (!text.empty()) plan.seeds.push_back(seed_of(path, text));
  } else if (item.name == "learning_rates") {
    for (const std::string& text : item.inputs)
      if (!text.empty()) plan.rates.push_back(text);
  } else if (item.name == "better") {
    const std::string better = one_value(path, item);
    if (better != "higher" && better != "lower")
      throw UsageError(path + ": better is \"" + better + "\"; expected higher or lower");
    plan.higher = better == "higher";
  } else {
    const std::string value = one_value(path, item);
    (item.name == "title"     ? plan.title
     : item.name == "command" ? plan.command
     : item.name == "metric"  ? plan.metric
                              : plan.baseline) = value;
  }
}

/// Whether a lower value of a metric of this name is the better one.
bool is_a_loss(const std::string& metric) {
  return std::ranges::any_of(std::vector<const char*>{"loss", "nll", "perplexity", "gap", "bits", "error"},
                             [&](const char* part) { return metric.find(part) != std::string::npos; });
}

/// Fills in what the file does not say.
void complete(train::StudyPlan& plan, const std::string& path, bool has_direction) {
  if (plan.title.empty()) plan.title = std::filesystem::path(path).stem().string();
  const auto task = plan.flags.find("--task");
  const bool scored =
      plan.command == "bert" && (task == plan.flags.end() || task->second != std::vector<std::string>{"mlm"});
  if (plan.metric.empty()) plan.metric = scored ? "eval_score" : "eval_nll";
  if (!has_direction) plan.higher = !is_a_loss(plan.metric);
  if (plan.baseline.empty() && !plan.arms.empty()) plan.baseline = plan.arms.front().name;
}

}  // namespace

train::StudyPlan read_study(const std::string& path) {
  const std::vector<TomlTable> tables = read_tables(path);
  train::StudyPlan plan;
  bool has_direction = false;
  for (const CLI::ConfigItem& item : tables.front().items) {
    if (std::ranges::find(kStudyKeys, item.name) == kStudyKeys.end())
      throw UsageError(path + ": \"" + item.name + "\": expected one of " + joined_names(kStudyKeys) +
                       "; flags belong under [flags], [[arm]] or [[task]]");
    has_direction = has_direction || item.name == "better";
    take_study_key(path, item, plan);
  }
  TrainFlags flags(path);
  flags.choose(plan.command);
  for (size_t i = 1; i < tables.size(); ++i) {
    const TomlTable& table = tables[i];
    if (table.section == "flags") {
      for (const CLI::ConfigItem& item : table.items) flags.take(item, "[flags]", plan.flags);
      continue;
    }
    train::StudyPart part;
    for (const CLI::ConfigItem& item : table.items)
      if (item.name == "name") part.name = one_value(path, item);
    if (part.name.empty()) throw UsageError(path + ": an [[" + table.section + "]] has no name; give it one");
    for (const CLI::ConfigItem& item : table.items)
      if (item.name != "name") flags.take(item, table.section + " \"" + part.name + "\"", part.flags);
    (table.section == "arm" ? plan.arms : plan.tasks).push_back(std::move(part));
  }
  plan.one_seed_per_run = flags.has("--seeds");
  complete(plan, path, has_direction);
  try {
    plan.validate();
  } catch (const Error& error) {
    throw UsageError(path + ": " + error.message());
  }
  std::set<std::pair<std::string, std::string>> checked;
  for (const train::StudyCell& cell : train::cells_of(plan))
    if (cell.seed == plan.seeds.front() && checked.insert({cell.arm, cell.task}).second)
      flags.check_line(plan, cell);
  return plan;
}

}  // namespace tessera::cli
