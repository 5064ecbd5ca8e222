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
  int64_t arena_elements = 0;  // of the gradients, with the zeros between them; a multiple of 64
  void* states[2] = {};
  void* masters = nullptr;
  double* status = nullptr;   // StatusSlot
  int64_t* counts = nullptr;  // CountSlot
  ScaleState scaling;
};

/// Applies the rule to every element, or does nothing at all if status[kApply] is 0.
void update_cpu(const StepArgs& args, const Rule& rule);
void update_cuda(Device device, const StepArgs& args, const Rule& rule);

/// Adds up the squares of all gradients in a fixed order and calls prepare(). `partials`: scratch, on the CPU
/// for one number a chunk, on a GPU for measure_blocks() of them.
void measure_cpu(DType compute, const StepArgs& args, double* partials, const PrepareOptions& options);
int64_t measure_blocks(Device device);
void measure_cuda(Device device, const StepArgs& args, double* partials, const PrepareOptions& options);

void prepare_average_cuda(Device device, const StepArgs& args, double decay, bool warmup);

/// status[slot] = value, in stream order; the value travels as a kernel argument.
void write_status_cuda(Device device, double* status, StatusSlot slot, double value);

}  // namespace tessera::optim
