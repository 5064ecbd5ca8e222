#include "report/progress.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>

namespace tessera::report {

void tell(const std::string& text) {
  std::fputs(text.c_str(), stderr);
}

std::string format_duration(double seconds) {
  if (!(seconds >= 0) || seconds > 1e8) return "?";
  const auto total = int64_t(seconds + 0.5);
  if (total >= 3600) return fmt::format("{}:{:02}:{:02}", total / 3600, total / 60 % 60, total % 60);
  return fmt::format("{}:{:02}", total / 60, total % 60);
}

std::string format_count(double value) {
  if (value >= 1e9) return fmt::format("{:.2f}G", value / 1e9);
  if (value >= 1e6) return fmt::format("{:.2f}M", value / 1e6);
  if (value >= 1e4) return fmt::format("{:.0f}k", value / 1e3);
  return fmt::format("{:.0f}", value);
}

Progress::Progress(Mode mode, double seconds)
    : terminal_(isatty(STDERR_FILENO)), quiet_(mode == Mode::quiet), seconds_(seconds) {
  colour_ = terminal_ && !std::getenv("NO_COLOR");
}

void Progress::show(const ProgressState& state) {
  if (quiet_) return;
  const auto now = std::chrono::steady_clock::now();
  if (first_step_ < 0) first_step_ = state.step;
  const double wait = terminal_ ? 0.1 : seconds_;
  const bool last = state.step >= state.steps;
  if (!last && shown_ && std::chrono::duration<double>(now - *shown_).count() < wait) return;
  shown_ = now;

  const double elapsed = std::chrono::duration<double>(now - begun_).count();
  const int64_t done = state.step - first_step_;
  std::string line = fmt::format("step {}/{}  loss {:.4f}", state.step, state.steps, state.loss);
  if (state.lr >= 0) line += fmt::format("  lr {:.2e}", state.lr);
  if (state.grad_norm >= 0 || std::isnan(state.grad_norm))
    line += fmt::format("  |g| {:.3f}", state.grad_norm);
  if (state.loss_scale >= 0) line += fmt::format("  scale {}", state.loss_scale);
  if (state.skipped >= 0) line += fmt::format("  skipped {}", state.skipped);
  if (state.tokens_per_s >= 0) line += fmt::format("  {} tok/s", format_count(state.tokens_per_s));
  if (state.ms_per_step >= 0) line += fmt::format("  {:.1f} ms/step", state.ms_per_step);
  if (done > 0) line += "  ETA " + format_duration(elapsed / double(done) * double(state.steps - state.step));
  if (state.memory_gib >= 0) line += fmt::format("  {:.2f}/{:.2f} GiB", state.memory_gib, state.peak_gib);
  if (state.data_wait >= 0) line += fmt::format("  data {:.0f}%", state.data_wait * 100);
  if (state.exposed_ms >= 0) line += fmt::format("  comm {:.2f} ms", state.exposed_ms);

  if (!terminal_) {
    tell(line + "\n");
    return;
  }
  winsize size{};
  const size_t width =
      ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 8 ? size.ws_col - 1u : 79u;
  if (line.size() > width) line.resize(width);
  tell(fmt::format("\r\033[K{}{}{}", colour_ ? "\033[36m" : "", line, colour_ ? "\033[0m" : ""));
  line_open_ = true;
}

void Progress::finish() {
  if (line_open_) tell("\n");
  line_open_ = false;
}

void Progress::say(const std::string& text) {
  if (quiet_) return;
  finish();
  tell(text + "\n");
}

}  // namespace tessera::report
