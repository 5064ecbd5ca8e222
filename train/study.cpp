#include "train/study.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "io/checkpoint_folder.h"
#include "io/file.h"
#include "io/utf8.h"
#include "runtime/error.h"
#include "train/best_evaluation.h"

namespace tessera::train {

namespace fs = std::filesystem;
using nlohmann::json;

namespace {

constexpr int64_t kFormat = 1;  // of study.json
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

void check_parts(const char* what, const std::vector<StudyPart>& parts, const StudyPlan& plan) {
  std::set<std::string> names;
  for (const StudyPart& part : parts) {
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

void override_flags(StudyFlags& flags, const StudyFlags& with) {
  for (const auto& [name, values] : with) flags[name] = values;
}

StudyCell cell_of(const StudyPlan& plan, const StudyPart& arm, const StudyPart& task, const std::string& rate,
                  uint64_t seed) {
  StudyCell cell{.name = cell_name(
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

std::vector<StudyPart> tasks_of(const StudyPlan& plan) {
  return plan.tasks.empty() ? std::vector<StudyPart>(1) : plan.tasks;
}
std::vector<std::string> rates_of(const StudyPlan& plan) {
  return plan.rates.empty() ? std::vector<std::string>(1) : plan.rates;
}

/// What one has and the other lacks or has otherwise: "--rows 10%", and "no --rows".
std::string differing_flags(const StudyFlags& ran, const StudyFlags& planned) {
  const auto shown = [](const StudyFlags& flags, const std::string& name) {
    const auto found = flags.find(name);
    if (found == flags.end()) return "without " + name;
    std::string text = "with " + name;
    for (const std::string& value : found->second) text += " " + value;
    return text;
  };
  StudyFlags all = ran;
  override_flags(all, planned);
  for (const auto& [name, values] : all) {
    const auto a = ran.find(name), b = planned.find(name);
    if (a == ran.end() || b == planned.end() || a->second != b->second)
      return shown(ran, name) + ", the study has it " + shown(planned, name);
  }
  return {};
}

json parts_json(const std::vector<StudyPart>& parts) {
  json out = json::array();
  for (const StudyPart& part : parts) out.push_back({{"name", part.name}, {"flags", part.flags}});
  return out;
}

std::vector<StudyPart> parts_from(const json& in) {
  std::vector<StudyPart> parts;
  for (const json& part : in) parts.push_back({part.at("name"), part.at("flags").get<StudyFlags>()});
  return parts;
}

constexpr CellStatus kStatuses[] = {CellStatus::pending, CellStatus::begun, CellStatus::interrupted,
                                    CellStatus::finished, CellStatus::failed};

CellRecord record_from(const json& in) {
  CellRecord record{.reason = in.at("reason"),
                    .attempts = in.at("attempts"),
                    .alone = in.at("alone"),
                    .flags = in.at("flags").get<StudyFlags>()};
  for (const CellStatus status : kStatuses)
    if (in.at("status") == name_of(status)) record.status = status;
  return record;
}

json json_of(const CellRecord& record) {
  return {{"status", name_of(record.status)},
          {"reason", record.reason},
          {"attempts", record.attempts},
          {"alone", record.alone},
          {"flags", record.flags}};
}

}  // namespace

// ---- the plan ----

void StudyPlan::validate() const {
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
  const auto is_baseline = [&](const StudyPart& arm) { return arm.name == baseline; };
  std::string names;
  for (const StudyPart& arm : arms) names += (names.empty() ? "" : ", ") + arm.name;
  check(std::ranges::any_of(arms, is_baseline), "baseline is \"", baseline,
        "\", which is not an arm; expected one of ", names);
  check(!metric.empty(), "metric is empty; name one that the runs evaluate, such as eval_nll");
  const size_t count = arms.size() * tasks_of(*this).size() * rates_of(*this).size() * seeds.size();
  check(count <= kMostCells, "the study has ", count, " cells; at most ", kMostCells, " are possible");
}

json to_json(const StudyPlan& plan) {
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

StudyPlan study_plan_from_json(const json& in, const std::string& file) {
  try {
    StudyPlan plan{.title = in.at("title"),
                   .command = in.at("command"),
                   .metric = in.at("metric"),
                   .higher = in.at("better") == "higher",
                   .baseline = in.at("baseline"),
                   .flags = in.at("flags").get<StudyFlags>(),
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

std::vector<StudyCell> cells_of(const StudyPlan& plan) {
  std::vector<StudyCell> cells;
  for (const uint64_t seed : plan.seeds)
    for (const StudyPart& task : tasks_of(plan))
      for (const std::string& rate : rates_of(plan))
        for (const StudyPart& arm : plan.arms) cells.push_back(cell_of(plan, arm, task, rate, seed));
  return cells;
}

StudyCell timing_cell(const StudyPlan& plan, const std::string& arm, const std::string& task, int64_t steps) {
  for (const StudyCell& cell : cells_of(plan)) {
    if (cell.arm != arm || cell.task != task) continue;
    StudyCell timed = cell;
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

std::vector<std::string> arguments_of(const StudyPlan& plan, const StudyCell& cell, const fs::path& runs,
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

// ---- the folder ----

const char* name_of(CellStatus status) {
  switch (status) {
    case CellStatus::pending:
      return "pending";
    case CellStatus::begun:
      return "begun";
    case CellStatus::interrupted:
      return "interrupted";
    case CellStatus::finished:
      return "finished";
    case CellStatus::failed:
      return "failed";
  }
  return "";
}

StudyFolder StudyFolder::begin(const fs::path& path, const StudyPlan& plan) {
  plan.validate();
  StudyFolder folder(path, plan);
  io::make_folder(path.string());
  folder.lock_.emplace(path);
  std::error_code code;
  const bool begun = fs::exists(path / "study.json", code);
  check(begun || fs::is_empty(path, code), "study: ", path.string(),
        " is there and holds no study.json: it is no study's folder; give --out another one");
  if (begun) {
    folder.read();
    folder.plan_ = plan;
    folder.check_cells();
    folder.check_ended();
  }
  folder.write();  // first of all: without it a folder that is not empty is no study's
  io::make_folder(folder.cells().string()), io::make_folder((path / "logs").string());
  return folder;
}

StudyFolder StudyFolder::open(const fs::path& path) {
  std::error_code code;
  check(fs::is_regular_file(path / "study.json", code), "study: ", path.string(),
        " holds no study.json; name the folder of a study, which `tessera study run` makes");
  StudyFolder folder(path, {});
  folder.read();
  return folder;
}

void StudyFolder::read() {
  const std::string file = (path_ / "study.json").string();
  const json in = json::parse(io::read_file(file, uint64_t{1} << 30), nullptr, false);
  check(in.is_object() && in.value("format", json()) == kFormat && in.contains("plan"), file,
        ": it is not what `tessera study run` writes; name the folder of a study");
  plan_ = study_plan_from_json(in["plan"], file);
  try {
    for (const auto& [name, record] : in.at("cells").items()) records_[name] = record_from(record);
  } catch (const json::exception& error) {
    fail_at(Site::here(), file, ": it is not what `tessera study run` writes (", error.what(), ")");
  }
}

void StudyFolder::check_cells() const {
  std::map<std::string, StudyFlags> planned;
  for (const StudyCell& cell : cells_of(plan_)) planned[cell.name] = cell.flags;
  std::error_code ignored;
  for (const auto& [name, record] : records_) {
    if (!fs::exists(cells() / name / "run.json", ignored)) continue;
    const auto found = planned.find(name);
    check(found != planned.end(), "study: ", path_.string(), " has the run ", name,
          ", which is not in this study: another study's folder, or an arm, task, rate or seed was removed; "
          "give --out another folder");
    const std::string difference = differing_flags(record.flags, found->second);
    check(difference.empty(), "study: ", (cells() / name).string(), " ran ", difference,
          "; give --out another folder, or the arm another name");
  }
}

/// That no cell of a killed call still runs: until it has saved, it holds the folder that it is continued in.
void StudyFolder::check_ended() const {
  std::error_code ignored;
  for (const auto& [name, record] : records_)
    for (const fs::path& run : {cells() / name, timing() / name}) {
      if (record.status != CellStatus::begun || !fs::is_directory(run, ignored)) continue;
      try {
        const FolderLock free(run);
      } catch (const Error&) {
        fail_at(Site::here(), "study: ", run.string(),
                " is still written to by a run that an earlier call of the study began; give the command "
                "again once it has ended");
      }
    }
}

void StudyFolder::write() const {
  json cells = json::object();
  for (const auto& [name, record] : records_) cells[name] = json_of(record);
  const json out = {{"format", kFormat}, {"plan", to_json(plan_)}, {"cells", cells}};
  io::write_file((path_ / "study.json").string(), io::json_text(out, 1) + "\n");
}

CellRecord StudyFolder::record_of(const StudyCell& cell) const {
  const auto found = records_.find(cell.name);
  return found == records_.end() ? CellRecord{} : found->second;
}

void StudyFolder::set(const StudyCell& cell, const CellRecord& record) {
  records_[cell.name] = record;
  write();
}

std::optional<RunFolder> StudyFolder::run_of(const fs::path& runs, const StudyCell& cell) {
  const fs::path own = runs / cell.name, seed = own / ("seed-" + std::to_string(cell.seed));
  std::error_code ignored;
  for (const fs::path& path : {seed, own})
    if (fs::is_regular_file(path / "run.json", ignored)) return RunFolder::open(path);
  return {};
}

bool is_complete(const fs::path& run) {
  std::error_code ignored;
  for (const char* const needed : {"run.json", "report.html", "checkpoints"})
    if (!fs::exists(run / needed, ignored)) return false;
  const RunFolder folder = RunFolder::open(run);
  const json settings = folder.settings(), options = settings.value("options", json());
  if (const json patience = options.is_object() ? options.value("patience", json()) : json();
      patience.is_number_integer() && patience > 0 && best_evaluation(folder).since >= patience)
    return true;  // it ended early
  const json job = settings.value("job", json::object());
  const auto newest = io::CheckpointFolder((run / "checkpoints").string()).latest();
  return newest.step && job.is_object() && job.value("steps", json()) == *newest.step;
}

}  // namespace tessera::train
