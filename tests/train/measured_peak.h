#pragma once

#include "runtime/allocator.h"
#include "train/step.h"

namespace tessera::train {

/// Bytes of live tensors at the peak of a training step on the CPU, the job's own from its making on
/// (`before`) included. Blocks are counted as the allocator rounds them.
inline double measured_peak(Job& job, size_t before) {
  Allocator& allocator = job.device().allocator();
  Step step(job);
  step();
  allocator.reset_peaks();
  step();
  return double(allocator.stats().allocated_peak) - double(before);
}

}  // namespace tessera::train
