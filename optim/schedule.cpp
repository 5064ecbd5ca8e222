#include "optim/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>

#include "runtime/error.h"
#include "runtime/text.h"

namespace tessera::optim {
namespace {

constexpr const char* kNames[] = {"constant", "linear", "cosine", "wsd", "cosine_restarts", "cosine_warmups"};

double cosine(double progress) {
  return (1 + std::cos(std::numbers::pi * progress)) / 2;
}

}  // namespace

const char* name_of(ScheduleKind kind) {
  return kNames[size_t(kind)];
}

ScheduleKind parse_schedule(std::string_view name) {
  return parse_name<ScheduleKind>("schedule: there is no", kNames, name);
}

Schedule::Schedule(const ScheduleOptions& options) : options_(options) {
  check(std::isfinite(options.lr) && options.lr >= 0, "schedule: learning rate ", options.lr,
        " must be finite and not negative");
  check(options.min_lr_ratio >= 0 && options.min_lr_ratio <= 1, "schedule: min_lr_ratio ",
        options.min_lr_ratio, " must be from 0 to 1");
  check(options.steps >= 0 && options.warmup >= 0 && options.decay_steps >= 0, "schedule: steps ",
        options.steps, ", warm-up ", options.warmup, " and decay ", options.decay_steps,
        " must not be negative");
  check(options.kind == ScheduleKind::constant || options.steps > 0, "schedule: \"", name_of(options.kind),
        "\" over a run of 0 steps, which has ended before its first step; say how many steps the run has");
  if (options_.kind == ScheduleKind::wsd && options_.decay_steps == 0)
    options_.decay_steps = options.steps / 10;
  const int64_t decay = options_.kind == ScheduleKind::wsd ? options_.decay_steps : 0;
  check(options.kind == ScheduleKind::constant || options.warmup <= options.steps - decay,
        "schedule: warm-up of ", options.warmup, " and decay of ", decay, " steps do not fit into a run of ",
        options.steps);
  check_restarts();
}

void Schedule::check_restarts() const {
  const char* const name = name_of(options_.kind);
  const int64_t restarts = options_.restarts, warmup = options_.restart_warmup;
  check(restarts >= 0 && warmup >= 0, "schedule: ", restarts, " restarts with a warm-up of ", warmup,
        " steps; they must not be negative");
  if (!has_restarts()) {
    check(restarts == 0 && warmup == 0, "schedule: ", restarts, " restarts with a warm-up of ", warmup,
          " steps, and \"", name, "\" has none; choose cosine_restarts or cosine_warmups (--schedule)");
    return;
  }
  check(restarts > 0, "schedule: \"", name, "\" without restarts; say how many (--restarts)");
  check(options_.kind != ScheduleKind::cosine_warmups || warmup > 0,
        "schedule: \"cosine_warmups\" without a warm-up after restarts; say how many steps it has "
        "(--restart-warmup)");
  // The shortest cycle is L / (R + 1), rounded down.
  const int64_t shortest = (options_.steps - options_.warmup) / (restarts + 1);
  check(shortest > warmup, "schedule: ", restarts, " restarts divide ", options_.steps - options_.warmup,
        " steps after the warm-up into cycles of ", shortest, ", which a warm-up of ", warmup,
        " after each restart leaves none of; choose fewer or shorter ones (--restarts, --restart-warmup)");
}

int64_t Schedule::begin_of(int64_t cycle) const {
  return options_.warmup + cycle * (options_.steps - options_.warmup) / (options_.restarts + 1);
}

/// The rate of `step`, after the first warm-up.
double Schedule::restarting(int64_t step) const {
  const auto& o = options_;
  const auto rate = [&](double shape) { return o.lr * (o.min_lr_ratio + (1 - o.min_lr_ratio) * shape); };
  const int64_t length = o.steps - o.warmup, from = std::min(step, o.steps) - o.warmup;
  int64_t cycle = std::min(from * (o.restarts + 1) / length, o.restarts);
  if (cycle < o.restarts && step >= begin_of(cycle + 1)) cycle += 1;  // its beginning was rounded down
  const int64_t since = o.warmup + from - begin_of(cycle);
  const bool climbs = cycle > 0 && since < o.restart_warmup;
  const double climb = climbs ? double(since + 1) / double(o.restart_warmup) : 1;
  if (o.kind == ScheduleKind::cosine_warmups) return climb * rate(cosine(double(from) / double(length)));
  if (climbs) return rate(climb);
  const int64_t own = cycle > 0 ? o.restart_warmup : 0;
  const int64_t end = cycle < o.restarts ? begin_of(cycle + 1) : o.steps;
  return rate(cosine(double(since - own) / double(end - begin_of(cycle) - own)));
}

double Schedule::at(int64_t step) const {
  check(step >= 0, "schedule: the rate of step ", step, "; steps count from 0");
  const auto& [kind, lr, steps, warmup, min_lr_ratio, decay_steps, restarts, restart_warmup] = options_;
  if (step < warmup) return lr * double(step + 1) / double(warmup);
  if (has_restarts()) return restarting(step);
  const auto progress = [&](int64_t begin) {  // 0 at `begin`, 1 at the end of the run and beyond
    if (step < begin) return 0.0;
    if (steps <= begin) return 1.0;
    return std::clamp(double(step - begin) / double(steps - begin), 0.0, 1.0);
  };
  double shape = 1;
  if (kind == ScheduleKind::linear) shape = 1 - progress(warmup);
  if (kind == ScheduleKind::cosine) shape = cosine(progress(warmup));
  if (kind == ScheduleKind::wsd) shape = 1 - progress(steps - decay_steps);
  return lr * (min_lr_ratio + (1 - min_lr_ratio) * shape);
}

}  // namespace tessera::optim
