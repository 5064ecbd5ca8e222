#pragma once

#include <chrono>
#include <optional>
#include <string>

namespace tessera::report {

/// Writes to the standard error, at once. Text that cannot be written there, on a full disk, is lost: that is
/// no reason to end a run.
void tell(const std::string& text);

/// The values of the line; those below 0 are not shown.
struct ProgressState {
  int64_t step = 0, steps = 0;
  double loss = 0, lr = -1, grad_norm = -1;
  double loss_scale = -1;
  int64_t skipped = -1;  // steps, of the whole run
  double tokens_per_s = -1, ms_per_step = -1;
  double memory_gib = -1, peak_gib = -1;
  double data_wait = -1;   // share of the time in which the device waited for data, 0 ... 1
  double exposed_ms = -1;  // of the step's communication between ranks, while nothing else ran
};

/// Progress on standard error: one rewritten line on a terminal, plain lines at most every `seconds`
/// otherwise, nothing when quiet. Fits the terminal's width; colour only on a terminal without NO_COLOR.
class Progress {
 public:
  enum class Mode { automatic, quiet };
  explicit Progress(Mode mode = Mode::automatic, double seconds = 5);
  void show(const ProgressState& state);
  /// Ends the rewritten line, so that the next output starts on a new line.
  void finish();
  /// A separate line between progress lines.
  void say(const std::string& text);

 private:
  bool terminal_, quiet_, colour_;
  double seconds_;
  bool line_open_ = false;
  std::chrono::steady_clock::time_point begun_ = std::chrono::steady_clock::now();
  std::optional<std::chrono::steady_clock::time_point> shown_;  // none before the first line
  int64_t first_step_ = -1;
};

std::string format_duration(double seconds);  // "1:02:03", "0:07"
std::string format_count(double value);       // "1.23M", "456k", "12"

}  // namespace tessera::report
