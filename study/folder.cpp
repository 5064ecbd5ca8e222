#include "study/folder.h"

#include <nlohmann/json.hpp>

#include "io/checkpoint_folder.h"
#include "io/file.h"
#include "io/utf8.h"
#include "runtime/error.h"
#include "train/best_evaluation.h"

namespace tessera::study {

namespace fs = std::filesystem;
using nlohmann::json;

namespace {

constexpr int64_t kFormat = 1;  // of study.json

/// What one has and the other lacks or has otherwise: "--rows 10%", and "no --rows".
std::string differing_flags(const Flags& ran, const Flags& planned) {
  const auto shown = [](const Flags& flags, const std::string& name) {
    const auto found = flags.find(name);
    if (found == flags.end()) return "without " + name;
    std::string text = "with " + name;
    for (const std::string& value : found->second) text += " " + value;
    return text;
  };
  Flags all = ran;
  all.insert(planned.begin(), planned.end());
  for (const auto& [name, values] : all) {
    const auto a = ran.find(name), b = planned.find(name);
    if (a == ran.end() || b == planned.end() || a->second != b->second)
      return shown(ran, name) + ", the study has it " + shown(planned, name);
  }
  return {};
}

constexpr CellStatus kStatuses[] = {CellStatus::pending, CellStatus::begun, CellStatus::interrupted,
                                    CellStatus::finished, CellStatus::failed};

CellRecord record_from(const json& in) {
  CellRecord record{.reason = in.at("reason"),
                    .attempts = in.at("attempts"),
                    .alone = in.at("alone"),
                    .flags = in.at("flags").get<Flags>()};
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

Folder Folder::begin(const fs::path& path, const Plan& plan) {
  plan.validate();
  Folder folder(path, plan);
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

Folder Folder::open(const fs::path& path) {
  std::error_code code;
  check(fs::is_regular_file(path / "study.json", code), "study: ", path.string(),
        " holds no study.json; name the folder of a study, which `tessera study run` makes");
  Folder folder(path, {});
  folder.read();
  return folder;
}

void Folder::read() {
  const std::string file = (path_ / "study.json").string();
  const json in = json::parse(io::read_file(file, uint64_t{1} << 30), nullptr, false);
  check(in.is_object() && in.value("format", json()) == kFormat && in.contains("plan"), file,
        ": it is not what `tessera study run` writes; name the folder of a study");
  plan_ = plan_from_json(in["plan"], file);
  try {
    for (const auto& [name, record] : in.at("cells").items()) records_[name] = record_from(record);
  } catch (const json::exception& error) {
    fail_at(Site::here(), file, ": it is not what `tessera study run` writes (", error.what(), ")");
  }
}

void Folder::check_cells() const {
  std::map<std::string, Flags> planned;
  for (const Cell& cell : cells_of(plan_)) planned[cell.name] = cell.flags;
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
void Folder::check_ended() const {
  std::error_code ignored;
  for (const auto& [name, record] : records_)
    for (const fs::path& run : {cells() / name, timing() / name}) {
      if (record.status != CellStatus::begun || !fs::is_directory(run, ignored)) continue;
      try {
        const train::FolderLock free(run);
      } catch (const Error&) {
        fail_at(Site::here(), "study: ", run.string(),
                " is still written to by a run that an earlier call of the study began; give the command "
                "again once it has ended");
      }
    }
}

void Folder::write() const {
  json cells = json::object();
  for (const auto& [name, record] : records_) cells[name] = json_of(record);
  const json out = {{"format", kFormat}, {"plan", to_json(plan_)}, {"cells", cells}};
  io::write_file((path_ / "study.json").string(), io::json_text(out, 1) + "\n");
}

CellRecord Folder::record_of(const Cell& cell) const {
  const auto found = records_.find(cell.name);
  return found == records_.end() ? CellRecord{} : found->second;
}

void Folder::set(const Cell& cell, const CellRecord& record) {
  records_[cell.name] = record;
  write();
}

std::optional<train::RunFolder> Folder::run_of(const fs::path& runs, const Cell& cell) {
  const fs::path own = runs / cell.name, seed = own / ("seed-" + std::to_string(cell.seed));
  std::error_code ignored;
  for (const fs::path& path : {seed, own})
    if (fs::is_regular_file(path / "run.json", ignored)) return train::RunFolder::open(path);
  return {};
}

bool is_complete(const fs::path& run) {
  std::error_code ignored;
  for (const char* const needed : {"run.json", "report.html", "checkpoints"})
    if (!fs::exists(run / needed, ignored)) return false;
  const train::RunFolder folder = train::RunFolder::open(run);
  const json settings = folder.settings(), options = settings.value("options", json());
  if (const json patience = options.is_object() ? options.value("patience", json()) : json();
      patience.is_number_integer() && patience > 0 && train::best_evaluation(folder).since >= patience)
    return true;  // it ended early
  const json job = settings.value("job", json::object());
  const auto newest = io::CheckpointFolder((run / "checkpoints").string()).latest();
  return newest.step && job.is_object() && job.value("steps", json()) == *newest.step;
}

}  // namespace tessera::study
