#include "train/tnp_batch_size.h"

#include <algorithm>

#include "runtime/allocator.h"
#include "runtime/error.h"
#include "runtime/interrupt.h"
#include "train/step.h"
#include "train/tnp_job.h"

namespace tessera::train {

int64_t find_max_batch(const TnpSettings& settings, Device device, int64_t most) {
  const auto fits = [&](int64_t batch) {
    check_interrupt();
    TnpSettings trial = settings;
    trial.batch = batch;
    device.allocator().release_cached();
    try {
      TnpJob job(trial, device);
      for (const Tensor& input : job.inputs()) input.fill(0.5);
      Step step(job, {.graph = false, .global_order = settings.order == "global"});
      step(), step();
      device.synchronize();
      return true;
    } catch (const OutOfMemory&) {
      return false;
    }
  };
  check(fits(1), "find-max-batch: not even a batch of one task fits on ", device.name(),
        "; try --checkpoint-interval 1 or a smaller model");
  int64_t low = 1, high = 2;
  while (high <= most && fits(high)) low = high, high *= 2;
  high = std::min(high, most + 1);
  while (high - low > std::max<int64_t>(1, low / 32)) {  // within three percent
    const int64_t middle = low + (high - low) / 2;
    (fits(middle) ? low : high) = middle;
  }
  device.allocator().release_cached();
  return low;
}

}  // namespace tessera::train
