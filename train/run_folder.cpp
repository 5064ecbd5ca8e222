#include "train/run_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <system_error>

#include "io/checkpoint_folder.h"
#include "io/file.h"
#include "io/utf8.h"
#include "report/run_table.h"
#include "runtime/error.h"
#include "train/setting.h"

namespace tessera::train {

namespace fs = std::filesystem;
using nlohmann::json;

FolderLock::FolderLock(const fs::path& folder)
    : file_(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
  if (file_ < 0 || ::flock(file_, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return;
  ::close(file_);
  fail_at(Site::here(), "folder ", folder.string(),
          ": another process is writing in it; let it end, or stop it with Ctrl-C");
}

FolderLock::~FolderLock() {
  if (file_ >= 0) ::close(file_);
}

bool RunFolder::has_checkpoints() const {
  return !io::CheckpointFolder(checkpoints().string()).steps().empty();
}

FolderLock RunFolder::lock() const {
  FolderLock lock(path_);
  io::remove_stale_temporaries(path_.string());
  return lock;
}

RunFolder RunFolder::create(const fs::path& root, const std::string& name) {
  std::error_code code;
  check(!name.empty() && name != "." && name != ".." && name.find('/') == std::string::npos, "run folder \"",
        name, "\" in ", root.string(), ": expected a plain name without \"/\"");
  io::make_folder(root.string());
  for (int attempt = 1;; ++attempt) {
    const fs::path path = root / (attempt == 1 ? name : name + "-" + std::to_string(attempt));
    if (fs::create_directory(path, code)) {
      fs::create_directory(path / "checkpoints", code);
      check(!code, "run folder ", path.string(), ": ", code.message());
      return RunFolder(path);
    }
    check(!code, "run folder ", path.string(), ": ", code.message());
  }
}

RunFolder RunFolder::open(const fs::path& path) {
  std::error_code code;
  const bool is_run = fs::is_regular_file(path / "run.json", code);
  check(is_run || code != std::errc::permission_denied, "run folder ", path.string(), ": ", code.message());
  check(is_run || !fs::is_regular_file(path, code), "run folder ", path.string(),
        ": it is a file; name the folder of a run (runs/...)");
  check(is_run, "run folder ", path.string(),
        ": it holds no run.json; name the folder of a run (runs/...), or start the run again if it was "
        "killed before it had written one");
  // Of "runs/r/" and "." the last part is not the folder's name, and what is before it not the folder above.
  const fs::path last = path.filename();
  return RunFolder(last.empty()                  ? path.parent_path()
                   : last == "." || last == ".." ? fs::canonical(path)
                                                 : path);
}

void RunFolder::write_settings(const json& settings) const {
  io::write_file((path_ / "run.json").string(), io::json_text(settings, 2) + "\n");
}

json RunFolder::settings() const {
  const std::string text = io::read_file((path_ / "run.json").string(), 16 << 20);
  json settings = json::parse(text, nullptr, false);
  check(!settings.is_discarded() && settings.is_object(), (path_ / "run.json").string(),
        ": it is not a JSON object; restore it, or remove the run's folder and start it again");
  // A run without "model" is of a job of a program's own, whose settings are not known here.
  if (settings.contains("model") && settings.value("job", json()).is_object())
    rename_settings(settings["job"]);
  return settings;
}

json RunFolder::settings_of(const std::string& model) const {
  json found = settings();
  const auto name = found.find("model");
  check(name == found.end() || !name->is_string() || *name == model, (path_ / "run.json").string(),
        ": a run of `train ", name != found.end() && name->is_string() ? name->get<std::string>() : "",
        "`, not of `train ", model, "`");
  return found;
}

namespace {

void append_line(const fs::path& path, const std::string& line) {
  errno = 0;  // the stream does not say why it failed, its system calls do
  std::ofstream out(path, std::ios::app);
  out << line << '\n' << std::flush;
  const int error = errno;
  check(bool(out), path.string(), ": cannot append ", line.size() + 1,
        " bytes: ", std::generic_category().message(error));
}

std::string line_of(const StepRecord& record) {
  json line = {{"step", record.step}};
  for (const auto& [name, value] : record.values) {
    if (std::isfinite(value)) {
      line[name] = value;
    } else {
      line[name] = nullptr;
    }
  }
  return line.dump();
}

/// Calls f(line, entry) for the lines that are objects with a step; a torn one is none.
template <class F>
void for_each_line(const fs::path& path, F&& f) {
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);) {
    const json entry = json::parse(line, nullptr, false);
    if (entry.is_object() && entry.contains("step") && entry["step"].is_number_integer()) f(line, entry);
  }
}

}  // namespace

void RunFolder::append(const StepRecord& record) const {
  append_line(path_ / "metrics.jsonl", line_of(record));
}

void RunFolder::replace_last(const StepRecord& record) const {
  const fs::path path = path_ / "metrics.jsonl";
  std::string kept;
  for_each_line(path, [&](const std::string& line, const json& entry) {
    if (entry["step"].get<int64_t>() < record.step) kept += line + "\n";
  });
  io::write_file(path.string(), kept + line_of(record) + "\n");
}

std::vector<StepRecord> RunFolder::metrics() const {
  std::vector<StepRecord> records;
  for_each_line(path_ / "metrics.jsonl", [&](const std::string&, const json& entry) {
    StepRecord record{entry["step"].get<int64_t>(), {}};
    for (const auto& [name, value] : entry.items()) {
      if (name == "step") continue;
      if (value.is_number()) record.values[name] = value.get<double>();
      if (value.is_null()) record.values[name] = std::numeric_limits<double>::quiet_NaN();
    }
    records.push_back(std::move(record));
  });
  return records;
}

void RunFolder::append(const Sample& sample) const {
  append_line(path_ / "samples.jsonl", io::json_text({{"step", sample.step}, {"text", sample.text}}));
}

std::vector<Sample> RunFolder::samples() const {
  std::vector<Sample> samples;
  for_each_line(path_ / "samples.jsonl", [&](const std::string&, const json& entry) {
    if (entry.contains("text") && entry["text"].is_string())
      samples.push_back({entry["step"].get<int64_t>(), entry["text"].get<std::string>()});
  });
  return samples;
}

void RunFolder::truncate_metrics(int64_t step) const {
  for (const char* name : {"metrics.jsonl", "samples.jsonl"}) {
    const fs::path path = path_ / name;
    if (std::string_view(name) == "samples.jsonl" && !fs::exists(path)) continue;
    std::string kept;
    for_each_line(path, [&](const std::string& line, const json& entry) {
      if (entry["step"].get<int64_t>() <= step && !entry.contains("interrupted")) kept += line + "\n";
    });
    io::write_file(path.string(), kept);
  }
}

namespace {

std::optional<double> last_value(const std::vector<StepRecord>& records, const char* name) {
  for (auto record = records.rbegin(); record != records.rend(); ++record)
    if (const auto found = record->values.find(name);
        found != record->values.end() && std::isfinite(found->second))
      return found->second;
  return std::nullopt;
}

/// A setting that is a word; "" if it is something else in a run.json that was edited.
std::string word_of(const json& settings, const char* name) {
  const auto found = settings.find(name);
  return found != settings.end() && found->is_string() ? found->get<std::string>() : "";
}

/// The least value, or with `sign` -1 the greatest.
std::optional<double> best_value(const std::vector<StepRecord>& records, const char* name, double sign) {
  std::optional<double> best;
  for (const StepRecord& record : records)
    if (const auto found = record.values.find(name);
        found != record.values.end() && std::isfinite(found->second))
      if (!best || sign * found->second < sign * *best) best = found->second;
  return best;
}

}  // namespace

void record_run(const fs::path& database, const RunFolder& run, const std::string& status,
                const RunFigures& figures) {
  if (!report::has_database()) return;
  const json settings = run.settings();
  const std::vector<StepRecord> records = run.metrics();
  std::optional<double> best = figures.best_evaluation;
  if (!best) best = best_value(records, "eval_nll", 1);
  if (!best) best = best_value(records, "eval_score", -1);
  report::write_row(database, {.path = io::utf8_text(fs::absolute(run.path()).lexically_normal().string()),
                               .model = word_of(settings, "model"),
                               .status = status,
                               .started = word_of(settings, "started"),
                               .steps = figures.steps.value_or(records.empty() ? 0 : records.back().step),
                               .loss = figures.loss ? figures.loss : last_value(records, "loss"),
                               .best_evaluation = best,
                               .tokens_per_s = last_value(records, "tokens_per_s"),
                               .device = word_of(settings, "device"),
                               .settings = io::json_text(settings)});
}

}  // namespace tessera::train
