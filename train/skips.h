#pragma once

#include <string>

#include "train/optimizer_ref.h"

namespace tessera::train {

/// Counts steps without a finite gradient norm, and says when they are too many. Reads the optimizer's counts
/// where the trainer logs; an optimizer without counts skips nothing.
class SkipWatch {
 public:
  /// Starts from the optimizer's counts, before the first step of this process.
  explicit SkipWatch(const OptimizerRef& optimizer);
  /// To be called after a logged step; `finite`: the step was applied. Waits for the device.
  void look(bool finite);

  bool scales() const { return optimizer_ && optimizer_->loss_scale().defined(); }
  int64_t skipped() const { return all_.skipped; }   // of the whole run
  double loss_scale() const { return loss_scale_; }  // 0: none
  int64_t row() const { return all_.row; }           // skipped in a row up to the last look, as far as known
  /// Skipped steps in a row that count towards ending the run. With a loss scale only those at its minimum: a
  /// falling scale is how training in f16 begins, but at the smallest one nothing is left to try.
  int64_t fatal_row() const { return scales() ? minimum_.row : all_.row; }
  /// The warning that a step was skipped at the smallest loss scale, once; "" if there is nothing to say.
  std::string warning(int64_t step);
  /// The message of a run that ends because of its skipped steps.
  std::string complaint(int64_t step, const std::string& saved) const;

 private:
  /// How many steps up to the last one were skipped in a row, as far as two counts tell.
  struct Row {
    int64_t skipped = 0, done = 0, row = 0;
    void update(int64_t all_skipped, int64_t all_done, bool finite);
  };
  const optim::Optimizer* optimizer_;
  Row all_, minimum_;
  double loss_scale_ = 0;
  bool warned_ = false;
};

/// The end of messages about values that are not finite.
inline constexpr const char* kFindOperator =
    "--check-finite (TrainerOptions::check_finite in a program) to find the operator";

}  // namespace tessera::train
