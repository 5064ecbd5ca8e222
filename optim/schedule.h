#pragma once

#include <cstdint>
#include <string_view>

namespace tessera::optim {

/// The shape of a learning rate over a run.
enum class ScheduleKind : uint8_t {
  constant,
  linear,  // a straight line down to `final`
  cosine,  // half a cosine down to `final`            Loshchilov, Hutter, arXiv:1608.03983, equation 5
  wsd      // constant, then a straight line down to `final` over the last `decay_steps`: warm-up, stable,
           // decay                                    Hu et al., MiniCPM, arXiv:2404.06395, section 4
};

const char* name_of(ScheduleKind kind);  // "cosine"
/// Throws, naming the nearest.
ScheduleKind parse_schedule(std::string_view name);

struct ScheduleOptions {
  ScheduleKind kind = ScheduleKind::cosine;
  double lr = 1e-3;         // the peak
  int64_t steps = 0;        // of the whole run
  int64_t warmup = 0;       // steps of a straight line up to the peak
  double final_factor = 0;  // the last rate is this times the peak
  int64_t decay_steps = 0;  // wsd: of the last phase; 0: a tenth of the run
};

/// The learning rate of each step: a pure function of the step's number, so there is no state to save.
///   warm-up   lr (step + 1) / warmup                                  step < warmup
///   after it  lr (f + (1 - f) shape(p)),  p = (step - warmup) / (steps - warmup), at most 1
/// with f = final_factor and shape 1, 1 - p, or (1 + cos(pi p)) / 2: torch's LambdaLR, LinearLR and
/// CosineAnnealingLR with eta_min = f lr, T_max = steps - warmup, counted from the end of the warm-up. Beyond
/// the last step it stays where it ended.
class Schedule {
 public:
  /// The default rate, constant.
  Schedule() : Schedule(ScheduleOptions{.kind = ScheduleKind::constant}) {}
  /// Throws if a number is negative or not finite, or warm-up and decay do not fit into the run.
  explicit Schedule(const ScheduleOptions& options);
  double at(int64_t step) const;
  const ScheduleOptions& options() const { return options_; }

 private:
  ScheduleOptions options_;
};

}  // namespace tessera::optim
