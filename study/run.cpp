#include "study/run.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <set>

#include "dist/child_process.h"
#include "io/utf8.h"
#include "runtime/interrupt.h"
#include "runtime/parallel.h"

namespace tessera::study {

namespace fs = std::filesystem;

namespace {

using Clock = std::chrono::steady_clock;

/// How `tessera` says that a command line is wrong.
constexpr int kRefused = 2;

/// Why a process failed, by the last error in its log; one line.
std::string reason_of(const dist::ChildEnd& end, const fs::path& log) {
  if (end.signal == SIGKILL) return "killed by signal 9, possibly out of memory";
  if (end.signal != 0) return fmt::format("crashed: signal {} ({})", end.signal, ::strsignal(end.signal));
  const std::string mark = "tessera: ", warning = "tessera: warning: ";
  std::string reason;
  std::ifstream in(log);
  for (std::string line; std::getline(in, line);)
    if (line.starts_with(mark) && !line.starts_with(warning)) reason = line.substr(mark.size());
  return reason.empty() ? fmt::format("ended with status {}", end.code) : io::utf8_text(reason);
}

/// One call of run_cells.
class Run {
 public:
  Run(Folder& folder, const Request& request) : folder_(folder), request_(request) {
    if (request.minutes > 0)
      deadline_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                     std::chrono::duration<double>(request.minutes * 60));
  }

  End run() {
    const InterruptGuard interrupts;
    const std::vector<Cell> cells = cells_of(folder_.plan());
    end_.cells = int64_t(cells.size());
    std::vector<Cell> left;
    for (const Cell& cell : cells)
      if (is_finished(folder_.cells(), cell)) {
        if (end_.finished++ == 0)
          check_metric(cell, folder_.cells());  // before another cell is run for nothing
      } else
        left.push_back(cell);
    run_all(left, folder_.cells(), request_.jobs);
    if (!stops()) run_all(missing_timings(), folder_.timing(), 1);
    return end_;
  }

 private:
  struct Running {
    Cell cell;
    std::string gpu;
    Clock::time_point since;
  };

  bool stops() const { return end_.signal != 0 || end_.out_of_time || !end_.refused.empty(); }

  /// Also notes that of a cell whose end the process that started it did not live to see, or that a signal
  /// met after its last step: to continue it is an error.
  bool is_finished(const fs::path& runs, const Cell& cell) {
    CellRecord record = folder_.record_of(cell);
    if (record.status != CellStatus::pending && record.status != CellStatus::finished &&
        is_complete(runs / cell.name)) {
      record.status = CellStatus::finished, record.reason.clear();
      folder_.set(cell, record);
    }
    return record.status == CellStatus::finished && Folder::run_of(runs, cell).has_value();
  }

  /// Of arms that have results.
  std::vector<Cell> missing_timings() {
    std::vector<Cell> missing;
    std::set<std::pair<std::string, std::string>> known;
    for (const Cell& cell : cells_of(folder_.plan())) {
      if (folder_.record_of(cell).status != CellStatus::finished) continue;
      // What follows goes through all cells: once per arm and task, not for each of them.
      if (!known.insert({cell.arm, cell.task}).second || !lacks_step_time(folder_, cell.arm, cell.task))
        continue;
      const Cell timed = timing_cell(folder_.plan(), cell.arm, cell.task, request_.timing_steps);
      if (!is_finished(folder_.timing(), timed)) missing.push_back(timed);
    }
    return missing;
  }

  void run_all(const std::vector<Cell>& cells, const fs::path& runs, int64_t jobs) {
    size_t next = 0;
    while (true) {
      look_for_stop();
      while (!stops() && next < cells.size() && int64_t(processes_.size()) < jobs) {
        start(cells[next++], runs, jobs);
        look_for_stop();
      }
      if (processes_.empty()) return;
      // Once they are asked to end, only their ends matter.
      const bool asked = stops();
      if (asked)
        for (dist::ChildProcess& process : processes_)
          process.ask_to_end(end_.signal != 0 ? end_.signal : SIGTERM);
      const auto ended = asked ? std::optional<size_t>(0) : dist::wait_any(processes_, deadline_);
      if (ended) finish(*ended, runs);
    }
  }

  void look_for_stop() {
    if (stops()) return;
    end_.signal = InterruptGuard::signal_received();
    end_.out_of_time = end_.signal == 0 && deadline_ && Clock::now() >= *deadline_;
  }

  void start(const Cell& cell, const fs::path& runs, int64_t jobs) {
    std::error_code ignored;
    const bool resumed = fs::exists(runs / cell.name / "run.json", ignored);
    if (!resumed) fs::remove_all(runs / cell.name, ignored);  // killed before it said what it is
    CellRecord record = folder_.record_of(cell);
    record.alone = jobs == 1 && (record.alone || !resumed);
    record.status = CellStatus::begun;
    record.reason.clear();
    record.attempts += 1;
    record.flags = cell.flags;
    folder_.set(cell, record);
    std::vector<std::pair<std::string, std::string>> environment;
    if (jobs > 1 && !std::getenv("TESSERA_THREADS"))
      environment.emplace_back("TESSERA_THREADS", std::to_string(std::max<int64_t>(1, cpu_threads() / jobs)));
    const std::string gpu = free_gpu();
    if (!gpu.empty()) environment.emplace_back("CUDA_VISIBLE_DEVICES", gpu);
    // A log tells of one attempt: the reason of a failure is looked for in it.
    fs::remove(folder_.log_of(cell), ignored);
    processes_.emplace_back(request_.program, arguments_of(folder_.plan(), cell, runs, resumed),
                            folder_.log_of(cell), environment);
    running_.push_back({cell, gpu, Clock::now()});
  }

  /// Of the GPUs that were named the first with the fewest running cells; "": none was named.
  std::string free_gpu() const {
    const auto cells_on = [&](const std::string& gpu) {
      return std::ranges::count(running_, gpu, &Running::gpu);
    };
    return request_.gpus.empty() ? "" : *std::ranges::min_element(request_.gpus, {}, cells_on);
  }

  void finish(size_t index, const fs::path& runs) {
    const dist::ChildEnd end = dist::collect(processes_[index]);
    const int asked = processes_[index].asked();
    const Running done = running_[index];
    processes_.erase(processes_.begin() + ptrdiff_t(index));
    running_.erase(running_.begin() + ptrdiff_t(index));
    CellRecord record = folder_.record_of(done.cell);
    const bool stopped = end.code == 128 + SIGINT || end.code == 128 + SIGTERM || end.code == 128 + SIGHUP;
    record.status = end.code == 0 || (stopped && is_complete(runs / done.cell.name)) ? CellStatus::finished
                    : stopped                                                        ? CellStatus::interrupted
                                                                                     : CellStatus::failed;
    if (record.status == CellStatus::failed) record.reason = reason_of(end, folder_.log_of(done.cell));
    folder_.set(done.cell, record);
    const bool timing = runs == folder_.timing();
    if (record.status == CellStatus::finished && !timing) {
      ++end_.finished;
      check_metric(done.cell, runs);
    }
    if (record.status == CellStatus::failed) {
      if (end_.failed++ == 0) end_.failure = done.cell.name + ": " + record.reason;
      if (end.code == kRefused) end_.refused = "arm \"" + done.cell.arm + "\": " + record.reason;
    }
    // A cell that another process stopped ends the study as the signal would: it is not to be begun again.
    if (stopped && asked == 0 && end_.signal == 0) end_.signal = end.code - 128;
    say(done, record, timing);
  }

  void say(const Running& done, const CellRecord& record, bool timing) {
    const double seconds = std::chrono::duration<double>(Clock::now() - done.since).count();
    std::string text = timing ? fmt::format("step time  {}", done.cell.name)
                              : fmt::format("[{:>{}}/{}] {}", end_.finished,
                                            std::to_string(end_.cells).size(), end_.cells, done.cell.name);
    if (record.status == CellStatus::finished && !timing) text += value_of(done.cell);
    if (record.status == CellStatus::failed) text += "  failed: " + record.reason;
    if (record.status == CellStatus::interrupted) text += "  stopped and saved";
    request_.say(fmt::format("{}  ({:.1f} s)\n", text, seconds));
  }

  /// Ends the study if no evaluation has its metric: no cell would have a score.
  void check_metric(const Cell& cell, const fs::path& runs) {
    const auto run = Folder::run_of(runs, cell);
    std::set<std::string> names;
    if (run)
      for (const train::StepRecord& record : run->metrics())
        for (const auto& [name, value] : record.values) names.insert(name);
    if (names.contains(folder_.plan().metric) || !end_.refused.empty()) return;
    std::string evaluated;
    for (const std::string& name : names)
      if (name.starts_with("eval_")) evaluated += (evaluated.empty() ? "" : ", ") + name;
    end_.refused = fmt::format("metric is \"{}\", which {} did not log; expected one of {}",
                               folder_.plan().metric, cell.name, evaluated.empty() ? "loss" : evaluated);
  }

  /// "  eval_score 0.8312", of the last evaluation.
  std::string value_of(const Cell& cell) const {
    const auto run = Folder::run_of(folder_.cells(), cell);
    std::string text;
    if (run)
      for (const train::StepRecord& record : run->metrics())
        if (const auto found = record.values.find(folder_.plan().metric); found != record.values.end())
          text = fmt::format("  {} {:.4f}", folder_.plan().metric, found->second);
    return text;
  }

  Folder& folder_;
  const Request& request_;
  std::optional<Clock::time_point> deadline_;
  End end_;
  std::vector<dist::ChildProcess> processes_;
  std::vector<Running> running_;  // the cells of processes_
};

}  // namespace

End run_cells(Folder& folder, const Request& request) {
  return Run(folder, request).run();
}

bool lacks_step_time(const Folder& folder, const std::string& arm, const std::string& task) {
  for (const Cell& cell : cells_of(folder.plan())) {
    if (cell.arm != arm || cell.task != task) continue;
    const CellRecord record = folder.record_of(cell);
    if (record.status == CellStatus::finished && record.alone) return false;
  }
  return true;
}

}  // namespace tessera::study
