#pragma once

#include "optim/packing.h"
#include "optim/rules.h"

/// The kernels behind the optimizers. All pointers are on the device; arenas hold the packing's compute
/// dtype.

namespace tessera::optim {

struct StepArgs {
  const Place* places = nullptr;
  const Chunk* chunks = nullptr;
  int64_t chunk_count = 0;
  const void* gradients = nullptr;
  const NormBlock* norm_blocks = nullptr;
  int64_t norm_block_count = 0;
  void* states[2] = {};
  void* masters = nullptr;
  double* status = nullptr;   // StatusSlot
  int64_t* counts = nullptr;  // CountSlot
  ScaleState scaling;
};

/// Applies the rule to every element, or does nothing at all if status[kApply] is 0.
void update_cpu(const StepArgs& args, const Rule& rule);
void update_cuda(Device device, const StepArgs& args, const Rule& rule);

/// Adds up the squares of all gradients and calls prepare(). The order is that of the norm blocks, in f64:
/// the squares of a block in a fixed order, then the blocks' sums in a fixed order. It does not depend on
/// where the gradients lie, nor on how many blocks of threads there are. `partials`: scratch, a number per
/// norm block.
void measure_cpu(DType compute, const StepArgs& args, double* partials, const PrepareOptions& options);
void measure_cuda(Device device, const StepArgs& args, double* partials, const PrepareOptions& options);

void prepare_average_cuda(Device device, const StepArgs& args, double decay, bool warmup);

/// status[slot] = value, in stream order; the value travels as a kernel argument.
void write_status_cuda(Device device, double* status, StatusSlot slot, double value);

}  // namespace tessera::optim
