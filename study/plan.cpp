#include "study/plan.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "runtime/error.h"
#include "runtime/text.h"

namespace tessera::study {

namespace fs = std::filesystem;
using nlohmann::json;

namespace {

constexpr size_t kMostCells = 100'000;

/// Flags that say where a cell goes, or that the study varies itself.
constexpr const char* kStudysOwn[] = {"--config", "--runs", "--name",  "--resume",         "--json",
                                      "--quiet",  "--seed", "--seeds", "--find-max-batch", "--demo"};

std::optional<double> number_of(const std::string& text) {
  double value = 0;
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (code != std::errc{} || end != text.data() + text.size()) return {};
  return value;
}

void check_part_name(const char* what, const std::string& name) {
  const bool plain =
      !name.empty() && name.size() <= 80 && name.front() != '.' && name.front() != '-' &&
      std::ranges::all_of(name, [](unsigned char c) {
        return std::isalnum(c) || std::string_view("-_.%+").find(char(c)) != std::string_view::npos;
      });
  check(plain, what, " \"", name,
        "\": its name becomes part of a folder's; expected letters, digits and -_.%+, at most 80 of them");
}

void check_parts(const char* what, const std::vector<Part>& parts, const Plan& plan) {
  std::set<std::string> names;
  for (const Part& part : parts) {
    check_part_name(what, part.name);
    check(names.insert(part.name).second, what, " \"", part.name,
          "\" is given twice; give each its own name");
    for (const char* const flag : kStudysOwn)
      check(!part.flags.contains(flag), what, " \"", part.name, "\": ", flag,
            " is set by the study; leave it out");
    check(plan.rates.empty() || !part.flags.contains("--lr"), what, " \"", part.name,
          "\" gives lr, and so does learning_rates; keep one of them");
  }
}

/// "dense,sst2,lr-3e-4,seed-1" without empty parts.
std::string cell_name(const std::vector<std::string>& parts) {
  std::string text;
  for (const std::string& part : parts)
    if (!part.empty()) text += (text.empty() ? "" : ",") + part;
  return text;
}

void override_flags(Flags& flags, const Flags& with) {
  for (const auto& [name, values] : with) flags[name] = values;
}

Cell cell_of(const Plan& plan, const Part& arm, const Part& task, const std::string& rate, uint64_t seed) {
  Cell cell{.name = cell_name(
                {arm.name, task.name, rate.empty() ? "" : "lr-" + rate, "seed-" + std::to_string(seed)}),
            .arm = arm.name,
            .task = task.name,
            .rate = rate,
            .seed = seed,
            .flags = plan.flags};
  override_flags(cell.flags, task.flags);
  override_flags(cell.flags, arm.flags);
  if (!rate.empty()) cell.flags["--lr"] = {rate};
  cell.flags["--seed"] = {std::to_string(seed)};
  if (plan.one_seed_per_run) cell.flags["--seeds"] = {"1"};
  return cell;
}

json parts_json(const std::vector<Part>& parts) {
  json out = json::array();
  for (const Part& part : parts) out.push_back({{"name", part.name}, {"flags", part.flags}});
  return out;
}

std::vector<Part> parts_from(const json& in) {
  std::vector<Part> parts;
  for (const json& part : in) parts.push_back({part.at("name"), part.at("flags").get<Flags>()});
  return parts;
}

}  // namespace

std::vector<Part> tasks_of(const Plan& plan) {
  return plan.tasks.empty() ? std::vector<Part>(1) : plan.tasks;
}
std::vector<std::string> rates_of(const Plan& plan) {
  return plan.rates.empty() ? std::vector<std::string>(1) : plan.rates;
}

void Plan::validate() const {
  check(!arms.empty(), "there are no arms; add an [[arm]] with a name for each thing to compare");
  check(!seeds.empty(), "there are no seeds; give seeds = [1, 2, 3], at least one");
  check_parts("arm", arms, *this);
  check_parts("task", tasks, *this);
  check_parts("section", {{"flags", flags}}, *this);
  std::set<uint64_t> known_seeds;
  for (const uint64_t seed : seeds)
    check(known_seeds.insert(seed).second, "seed ", seed, " is given twice; its runs would be the same");
  std::set<double> known_rates;
  for (const std::string& rate : rates) {
    const std::optional<double> value = number_of(rate);
    check(value && *value > 0 && std::isfinite(*value), "learning_rates: \"", rate,
          "\" is not a positive number; write for instance 3e-4");
    check(known_rates.insert(*value).second, "learning_rates: ", rate, " is given twice; leave one out");
  }
  std::vector<std::string> names;
  for (const Part& arm : arms) names.push_back(arm.name);
  check(std::ranges::find(names, baseline) != names.end(), "baseline is \"", baseline,
        "\", which is not an arm; expected one of ", joined(names));
  check(!metric.empty(), "metric is empty; name one that the runs evaluate, such as eval_nll");
  const size_t count = arms.size() * tasks_of(*this).size() * rates_of(*this).size() * seeds.size();
  check(count <= kMostCells, "the study has ", count, " cells; at most ", kMostCells, " are possible");
}

json to_json(const Plan& plan) {
  return {{"title", plan.title},
          {"command", plan.command},
          {"metric", plan.metric},
          {"better", plan.higher ? "higher" : "lower"},
          {"baseline", plan.baseline},
          {"flags", plan.flags},
          {"arms", parts_json(plan.arms)},
          {"tasks", parts_json(plan.tasks)},
          {"learning_rates", plan.rates},
          {"seeds", plan.seeds},
          {"one_seed_per_run", plan.one_seed_per_run}};
}

Plan plan_from_json(const json& in, const std::string& file) {
  try {
    Plan plan{.title = in.at("title"),
              .command = in.at("command"),
              .metric = in.at("metric"),
              .higher = in.at("better") == "higher",
              .baseline = in.at("baseline"),
              .flags = in.at("flags").get<Flags>(),
              .arms = parts_from(in.at("arms")),
              .tasks = parts_from(in.at("tasks")),
              .rates = in.at("learning_rates").get<std::vector<std::string>>(),
              .seeds = in.at("seeds").get<std::vector<uint64_t>>(),
              .one_seed_per_run = in.at("one_seed_per_run")};
    plan.validate();
    return plan;
  } catch (const json::exception& error) {
    fail_at(Site::here(), file, ": it is not what `tessera study run` writes (", error.what(),
            "); name the folder of a study");
  }
}

std::vector<Cell> cells_of(const Plan& plan) {
  std::vector<Cell> cells;
  for (const uint64_t seed : plan.seeds)
    for (const Part& task : tasks_of(plan))
      for (const std::string& rate : rates_of(plan))
        for (const Part& arm : plan.arms) cells.push_back(cell_of(plan, arm, task, rate, seed));
  return cells;
}

Cell timing_cell(const Plan& plan, const std::string& arm, const std::string& task, int64_t steps) {
  for (const Cell& cell : cells_of(plan)) {
    if (cell.arm != arm || cell.task != task) continue;
    Cell timed = cell;
    timed.name = cell_name({arm, task, "timing"});
    // Of the whole run: they may leave none of so few steps, or time others than most of the run's are.
    for (const char* const flag :
         {"--epochs", "--minutes", "--eval-every", "--save-every", "--log-every", "--patience", "--warmup",
          "--schedule", "--restarts", "--restart-warmup", "--dense-first", "--dense-last"})
      timed.flags.erase(flag);
    timed.flags["--steps"] = {std::to_string(steps)};
    return timed;
  }
  fail_at(Site::here(), "study: the plan has no arm \"", arm, "\" with a task \"", task, "\"");
}

std::vector<std::string> arguments_of(const Plan& plan, const Cell& cell, const fs::path& runs,
                                      bool resumed) {
  std::vector<std::string> words = {"train", plan.command};
  const auto add = [&](const std::string& name, const std::vector<std::string>& values) {
    words.push_back(name);
    words.insert(words.end(), values.begin(), values.end());
  };
  if (!resumed) {
    for (const auto& [name, values] : cell.flags) add(name, values);
    add("--runs", {runs.string()});
    add("--name", {cell.name});
  } else {
    add("--resume", {(runs / cell.name).string()});
    // The run's folder keeps everything else.
    if (const auto device = cell.flags.find("--device"); device != cell.flags.end())
      add("--device", device->second);
  }
  words.push_back("--quiet");
  return words;
}

}  // namespace tessera::study
