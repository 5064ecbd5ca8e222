#include "ops/indices.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_kernels.h"

namespace tessera::ops {

void count_targets_cpu(const Tensor& count, const Tensor& targets, int64_t classes, int64_t ignored) {
  const Indices target(targets);
  int64_t counted = 0;
  for (int64_t row = 0; row < targets.count(); ++row) {
    check(target[row] == ignored || (0 <= target[row] && target[row] < classes),
          "linear_cross_entropy: target ", target[row], " at position ", row, " of targets ",
          describe(targets), " is outside [0, ", classes, ") and is not ignore_index ", ignored);
    counted += target[row] != ignored;
  }
  count.fill(double(counted));
}

void sum_losses_cpu(const Tensor& loss, const Tensor& losses, const Tensor& count) {
  dispatch_floating(loss.dtype(), "linear_cross_entropy", [&]<class T>() {
    double sum = 0;
    for (int64_t row = 0; row < losses.count(); ++row) sum += double(Compute<T>(losses.data<T>()[row]));
    *loss.data<T>() = T(Compute<T>(count.defined() ? sum / count.item() : sum));
  });
}

}  // namespace tessera::ops
