#include "train/run_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <ctime>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "io/file.h"
#include "io/utf8.h"
#include "runtime/device.h"
#include "runtime/error.h"
#include "runtime/parallel.h"
#include "train/build_info.h"

#if defined(TESSERA_WITH_SQLITE)
#include <sqlite3.h>
#endif

namespace tessera::train {

namespace fs = std::filesystem;
using nlohmann::json;

FolderLock::FolderLock(const fs::path& folder)
    : file_(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
  if (file_ < 0 || ::flock(file_, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return;
  ::close(file_);
  fail_at(Site::here(), "run folder ", folder.string(),
          ": another process is training in it; let it end, or stop it with Ctrl-C");
}

FolderLock::~FolderLock() {
  if (file_ >= 0) ::close(file_);
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
  fs::create_directories(root, code);
  check(!code, "run folder ", root.string(), ": ", code.message());
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
  check(is_run, "run folder ", path.string(), ": it holds no run.json; name the folder of a run (runs/...)");
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
        ": it is not a JSON object");
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
  std::ofstream out(path, std::ios::app);
  out << line << '\n' << std::flush;
  check(bool(out), path.string(), ": cannot append ", line.size() + 1, " bytes; is the disk full?");
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

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

json build_facts() {
  utsname system{};
  uname(&system);
  json facts = {{"version", kVersion},
                {"revision", kRevision},
                {"compiler", kCompiler},
                {"cpu_flags", kCpuFlags},
                {"cuda", kCudaVersion},
                {"blas", kBlas},
                {"system", std::string(system.sysname) + " " + system.release + " " + system.machine},
                {"cpu_threads", cpu_threads()}};
  for (int i = 0; i < Device::cuda_count(); ++i) facts["gpus"].push_back(Device::card_of(i).name);
  return facts;
}

#if defined(TESSERA_WITH_SQLITE)

namespace {

class Database {
 public:
  explicit Database(const fs::path& path) : path_(path) {
    if (sqlite3_open(path.c_str(), &handle_) != SQLITE_OK) fail();
    sqlite3_busy_timeout(handle_, 10'000);  // another run may be writing its row
  }
  ~Database() { sqlite3_close(handle_); }
  Database(const Database&) = delete;

  void run(const char* sql, const std::vector<std::pair<const char*, json>>& values = {}) {
    sqlite3_stmt* statement = nullptr;
    if (sqlite3_prepare_v2(handle_, sql, -1, &statement, nullptr) != SQLITE_OK) fail();
    for (const auto& [name, value] : values) {
      const int index = sqlite3_bind_parameter_index(statement, name);
      if (value.is_string()) {
        const auto& text = value.get_ref<const std::string&>();
        sqlite3_bind_text(statement, index, text.data(), int(text.size()), SQLITE_TRANSIENT);
      } else if (value.is_number_integer()) {
        sqlite3_bind_int64(statement, index, value.get<int64_t>());
      } else if (value.is_number()) {
        sqlite3_bind_double(statement, index, value.get<double>());
      } else {
        sqlite3_bind_null(statement, index);
      }
    }
    const int code = sqlite3_step(statement);
    sqlite3_finalize(statement);
    if (code != SQLITE_DONE && code != SQLITE_ROW) fail();
  }

 private:
  [[noreturn]] void fail() {
    fail_at(Site::here(), "results database ", path_.string(), ": ", sqlite3_errmsg(handle_));
  }
  fs::path path_;
  sqlite3* handle_ = nullptr;
};

json last_value(const std::vector<StepRecord>& records, const char* name) {
  for (auto record = records.rbegin(); record != records.rend(); ++record)
    if (const auto found = record->values.find(name);
        found != record->values.end() && std::isfinite(found->second))
      return found->second;
  return nullptr;
}

/// A setting that is a word; "" if it is something else in a run.json that was edited.
std::string word_of(const json& settings, const char* name) {
  const auto found = settings.find(name);
  return found != settings.end() && found->is_string() ? found->get<std::string>() : "";
}

/// The least value, or with `sign` -1 the greatest.
json best_value(const std::vector<StepRecord>& records, const char* name, double sign) {
  json best;
  for (const StepRecord& record : records)
    if (const auto found = record.values.find(name);
        found != record.values.end() && std::isfinite(found->second))
      if (best.is_null() || sign * found->second < sign * best.get<double>()) best = found->second;
  return best;
}

/// By the figures, or else by the records.
template <class T>
json known(const std::optional<T>& figure, json otherwise) {
  return figure ? json(*figure) : otherwise;
}

}  // namespace

bool has_database() {
  return true;
}

void record_run(const fs::path& database, const RunFolder& run, const std::string& status,
                const RunFigures& figures) {
  Database db(database);
  db.run(
      "CREATE TABLE IF NOT EXISTS runs (path TEXT PRIMARY KEY, model TEXT, status TEXT, started TEXT, "
      "updated TEXT, "
      "steps INTEGER, loss REAL, best_eval REAL, tokens_per_s REAL, device TEXT, revision TEXT, settings "
      "TEXT)");
  const json settings = run.settings();
  const std::vector<StepRecord> records = run.metrics();
  json best = best_value(records, "eval_nll", 1);
  if (best.is_null()) best = best_value(records, "eval_score", -1);
  db.run(
      "INSERT INTO runs VALUES (:path, :model, :status, :started, :updated, :steps, :loss, :best, :rate, "
      ":device, "
      ":revision, :settings) ON CONFLICT(path) DO UPDATE SET status=excluded.status, "
      "updated=excluded.updated, "
      "steps=excluded.steps, loss=excluded.loss, best_eval=excluded.best_eval, "
      "tokens_per_s=excluded.tokens_per_s, "
      "settings=excluded.settings",
      {{":path", io::utf8_text(fs::absolute(run.path()).lexically_normal().string())},
       {":model", word_of(settings, "model")},
       {":status", status},
       {":started", word_of(settings, "started")},
       {":updated", utc_now()},
       {":steps", known(figures.steps, records.empty() ? int64_t{0} : records.back().step)},
       {":loss", known(figures.loss, last_value(records, "loss"))},
       {":best", known(figures.best_evaluation, best)},
       {":rate", last_value(records, "tokens_per_s")},
       {":device", word_of(settings, "device")},
       {":revision", kRevision},
       {":settings", io::json_text(settings)}});
}
#else
bool has_database() {
  return false;
}

void record_run(const fs::path&, const RunFolder&, const std::string&, const RunFigures&) {}
#endif

}  // namespace tessera::train
