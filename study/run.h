#pragma once

#include <functional>
#include <string>
#include <vector>

#include "study/folder.h"

/// Runs the cells of a study, each as a separate process.

namespace tessera::study {

struct Request {
  std::string program;  // that has the subcommand `train`
  double minutes = 0;   // after these running cells are stopped and saved; 0: no limit
  int64_t jobs = 1;     // cells at the same time
  /// Values of CUDA_VISIBLE_DEVICES: a cell sees the GPU with the fewest running cells. Empty: as this
  /// process.
  std::vector<std::string> gpus = {};
  int64_t timing_steps = 30;  // of a run for step times, where no cell of an arm ran alone
  /// Called with messages about the progress, whole lines.
  std::function<void(const std::string& text)> say = [](const std::string&) {};
};

struct End {
  int signal = 0;            // that interrupted it; 0: none
  bool out_of_time = false;  // stopped by `minutes`
  int64_t cells = 0, finished = 0, failed = 0;
  std::string failure;  // the first one: "cell: reason"
  /// The error in the plan that a cell showed: `tessera train` refused its command line, as it would
  /// that of each cell of the arm, or it did not log the metric. The study ends with it. "": nothing.
  std::string refused;
};

/// Runs the cells that are not finished, in the order of cells_of, and what step times are still missing once
/// all cells are done. A cell that was stopped, interrupted or killed goes on from its newest checkpoint; one
/// that failed is tried again. A cell that fails or crashes is recorded, and the others run on. SIGINT,
/// SIGTERM and the time limit are passed on to the running cells, which end after their current step. With
/// `jobs` above 1, the processors are divided among them unless TESSERA_THREADS is set; no result depends on
/// that.
End run_cells(Folder& folder, const Request& request);

/// Whether the step time of an arm on a task has to be measured by a separate run: no finished cell of them
/// ran alone.
bool lacks_step_time(const Folder& folder, const std::string& arm, const std::string& task);

}  // namespace tessera::study
