#include "eval/tnp.h"

#include <cmath>

#include "autograd/tape.h"
#include "comm/recorded.h"
#include "datasets/posterior.h"
#include "runtime/interrupt.h"

namespace tessera::eval {

namespace {

/// All ranks of the group are interrupted between the same batches, or none: they make calls together.
void check_interrupt_of(const TnpGroup& group) {
  if (const int64_t signal = group.host.largest(InterruptGuard::signal_received()))
    throw Interrupted(int(signal), __FILE__, __LINE__);
}

/// Of each target, [B, N] in row-major order.
std::vector<double> point_losses(const models::Tnp& model, const models::TnpBatch& whole,
                                 const TnpGroup* group) {
  if (!group) return model.point_losses(whole).to_vector<double>();
  const Tensor own = model.point_losses(models::part_of(whole, group->split)).to(Device::cpu());
  return comm::gather_rows(group->host, own.transpose(0, 1), group->split->targets.queries)
      .transpose(0, 1)
      .to_vector<double>();
}

}  // namespace

TnpEvaluation evaluate_tnp(const models::Tnp& model, const datasets::Prior& prior, int64_t tasks,
                           const TnpGroup* group) {
  const NoTape off;
  const int64_t batch = prior.options().batch, targets = prior.options().targets;
  TnpEvaluation result;
  std::vector<double> gaps;  // of each task
  double model_sum = 0, optimal_sum = 0;
  for (uint64_t index = 0; int64_t(gaps.size()) < tasks; ++index) {
    if (group)
      check_interrupt_of(*group);
    else
      check_interrupt();
    const datasets::RegressionBatch fresh = prior.batch(index);
    const std::vector<double> losses = point_losses(model, {fresh.xc, fresh.yc, fresh.xt, fresh.yt}, group);
    const auto log_density = datasets::predict(prior.options(), fresh).log_density.to_vector<double>();
    for (int64_t b = 0; b < batch && int64_t(gaps.size()) < tasks; ++b) {
      double gap = 0;
      for (int64_t n = 0; n < targets; ++n) {
        const size_t at = size_t(b * targets + n);
        model_sum += losses[at];
        optimal_sum -= log_density[at];
        gap += losses[at] + log_density[at];
      }
      gaps.push_back(gap / double(targets));
    }
  }
  result.tasks = int64_t(gaps.size());
  result.points = result.tasks * targets;
  result.nll = model_sum / double(result.points);
  result.optimal_nll = optimal_sum / double(result.points);
  result.gap = result.nll - result.optimal_nll;
  double squares = 0;
  for (const double gap : gaps) squares += (gap - result.gap) * (gap - result.gap);
  if (gaps.size() > 1) result.gap_error = std::sqrt(squares / double(gaps.size() - 1) / double(gaps.size()));
  return result;
}

}  // namespace tessera::eval
