#include "optim/schedule.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <string>

#include "runtime/error.h"

namespace tessera::optim {
namespace {

constexpr std::array<const char*, 4> kNames{"constant", "linear", "cosine", "wsd"};

}  // namespace

const char* name_of(ScheduleKind kind) {
  return kNames[size_t(kind)];
}

ScheduleKind parse_schedule(std::string_view name) {
  for (size_t i = 0; i < kNames.size(); ++i)
    if (name == kNames[i]) return ScheduleKind(i);
  const std::string near = nearest(std::string(name), NameList(kNames));
  fail_at(Site::here(), "schedule: there is no \"", name, "\"; expected constant, linear, cosine or wsd",
          near.empty() ? "" : "; did you mean " + near + "?");
}

Schedule::Schedule(const ScheduleOptions& options) : options_(options) {
  check(std::isfinite(options.lr) && options.lr >= 0, "schedule: learning rate ", options.lr,
        " must be finite and not negative");
  check(std::isfinite(options.final_factor) && options.final_factor >= 0, "schedule: final factor ",
        options.final_factor, " must be finite and not negative");
  check(options.steps >= 0 && options.warmup >= 0 && options.decay_steps >= 0, "schedule: steps ",
        options.steps, ", warm-up ", options.warmup, " and decay ", options.decay_steps,
        " must not be negative");
  if (options_.kind == ScheduleKind::wsd && options_.decay_steps == 0)
    options_.decay_steps = options.steps / 10;
  const int64_t decay = options_.kind == ScheduleKind::wsd ? options_.decay_steps : 0;
  check(options.kind == ScheduleKind::constant || options.warmup <= options.steps - decay,
        "schedule: warm-up of ", options.warmup, " and decay of ", decay, " steps do not fit into a run of ",
        options.steps);
}

double Schedule::at(int64_t step) const {
  const auto& [kind, lr, steps, warmup, final_factor, decay_steps] = options_;
  if (step < warmup) return lr * double(step + 1) / double(warmup);
  const auto progress = [&](int64_t begin) {  // 0 at `begin`, 1 at the end of the run and beyond
    if (step < begin) return 0.0;
    if (steps <= begin) return 1.0;
    return std::clamp(double(step - begin) / double(steps - begin), 0.0, 1.0);
  };
  double shape = 1;
  if (kind == ScheduleKind::linear) shape = 1 - progress(warmup);
  if (kind == ScheduleKind::cosine) shape = (1 + std::cos(std::numbers::pi * progress(warmup))) / 2;
  if (kind == ScheduleKind::wsd) shape = 1 - progress(steps - decay_steps);
  return lr * (final_factor + (1 - final_factor) * shape);
}

}  // namespace tessera::optim
