#pragma once

#include <cstdint>
#include <string_view>

namespace tessera::optim {

/// The shape of a learning rate over a run.
enum class ScheduleKind : uint8_t {
  constant,
  linear,  // a straight line down to the minimum
  cosine,  // half a cosine down to the minimum        Loshchilov, Hutter, arXiv:1608.03983, equation 5
  wsd,     // constant, then a straight line down to the minimum over the last `decay_steps`: warm-up,
           // stable, decay                            Hu et al., MiniCPM, arXiv:2404.06395, section 4
  cosine_restarts,  // `restarts` + 1 cosines of equal length, each from the peak down to the minimum
                    //                                 Loshchilov, Hutter, arXiv:1608.03983, section 3
  cosine_warmups  // one cosine over the run, with a warm-up up to it after each of `restarts` resets to zero
                  //                                 Lialin et al., ReLoRA, arXiv:2307.05695, section 3
};

const char* name_of(ScheduleKind kind);  // "cosine"
/// Throws, naming the nearest.
ScheduleKind parse_schedule(std::string_view name);

struct ScheduleOptions {
  ScheduleKind kind = ScheduleKind::cosine;
  double lr = 1e-3;            // the peak
  int64_t steps = 0;           // of the whole run; at least 1 unless constant
  int64_t warmup = 0;          // steps of a straight line up to the peak
  double min_lr_ratio = 0;     // the minimum, that of the last step, is this times the peak; at most 1
  int64_t decay_steps = 0;     // wsd: of the last phase; 0: a tenth of the run
  int64_t restarts = 0;        // of cosine_restarts and cosine_warmups, at least 1
  int64_t restart_warmup = 0;  // steps of a straight line up after each restart
};

/// The learning rate of each step: a pure function of the step's number, so there is no state to save.
///   warm-up   lr (step + 1) / warmup                                  step < warmup
///   after it  lr (f + (1 - f) shape(p)),  p = (step - warmup) / (steps - warmup), at most 1
/// with f = min_lr_ratio and shape 1, 1 - p, or (1 + cos(pi p)) / 2: torch's LambdaLR, LinearLR and
/// CosineAnnealingLR with eta_min = f lr, T_max = steps - warmup, counted from the end of the warm-up. Beyond
/// the last step it stays where it ended.
///
/// Restarts: with L = steps - warmup and R = restarts, cycle i = 0 ... R begins at step b_i = warmup +
/// floor(i L / (R + 1)); w = restart_warmup steps of every cycle but the first are a straight line up, at the
/// j-th of them (j = 0 ...)
///   cosine_restarts  lr (f + (1 - f) (j + 1) / w), then the cosine with p from 0 at b_i + w to 1 at b_(i +
///   1);
///                    w = 0 is torch's CosineAnnealingWarmRestarts where R + 1 divides L
///   cosine_warmups   the rate of `cosine` at that step times (j + 1) / w
class Schedule {
 public:
  /// The default rate, constant.
  Schedule() : Schedule(ScheduleOptions{.kind = ScheduleKind::constant}) {}
  /// Throws if a number is negative or not finite, if a rate falls over 0 steps, if warm-up, decay or cycles
  /// do not fit into the run, and for restarts of a schedule that has none, or none of one that has them.
  explicit Schedule(const ScheduleOptions& options);
  /// The rate of step `step`, counted from 0. Throws if it is negative.
  double at(int64_t step) const;
  const ScheduleOptions& options() const { return options_; }

 private:
  bool has_restarts() const {
    return options_.kind == ScheduleKind::cosine_restarts || options_.kind == ScheduleKind::cosine_warmups;
  }
  void check_restarts() const;
  int64_t begin_of(int64_t cycle) const;
  double restarting(int64_t step) const;
  ScheduleOptions options_;
};

}  // namespace tessera::optim
