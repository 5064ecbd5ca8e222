#pragma once

#include "optim/packing.h"
#include "optim/rounding.h"
#include "optim/rules.h"
#include "runtime/has_cuda.h"

/// The kernels behind the optimizers. All pointers are on the device; arenas hold the packing's compute
/// dtype.

namespace tessera::optim {

struct StepArgs {
  const Place* places = nullptr;
  const Chunk* chunks = nullptr;
  int64_t chunk_count = 0;
  const void* gradients = nullptr;
  const NormBlock* norm_blocks = nullptr;  // to be measured
  int64_t norm_block_count = 0;
  int64_t norm_slots = 0;  // sums of all norm blocks
  void* states[2] = {};
  bool short_states = false;   // they are bf16, as bf16 weights are, which then have no masters
  uint64_t rounding_seed = 0;  // of RoundingBits
  int64_t first_state = 0;     // the element of the arena of gradients at which those of the states begin
  void* masters = nullptr;
  double* status = nullptr;           // StatusSlot
  int64_t* counts = nullptr;          // CountSlot
  const int64_t* restarts = nullptr;  // [kMostRules], see prepare(); null: never
  ScaleState scaling;
  /// Of optimizers that skip missing gradients, by places: 0: skip, else 1 + the rule's number; how often
  /// each was updated; its two bias corrections. Null: all are updated, with the rule's bias corrections.
  const uint8_t* arrived = nullptr;
  int64_t* parameter_steps = nullptr;
  double* parameter_bias = nullptr;
  int64_t place_count = 0;
  int rule = 0;  // whose bias corrections in `status`
};

/// Applies an elementwise rule (optim/rules.h) to the chunks, or does nothing at all if status[kApply] is 0.
/// Defined in optim/elementwise_kernels.h and optim/elementwise.cuh, where a rule instantiates them.
template <class R>
void update_cpu(const StepArgs& args, const R& rule);
template <class R>
void update_cuda(Device device, const StepArgs& args, const R& rule);

/// The same on the device of the parameters.
template <class R>
void update(Device device, const StepArgs& args, const R& rule) {
  if (device.is_cpu()) {
    update_cpu(args, rule);
  } else {
    if constexpr (kCuda) update_cuda(device, args, rule);
  }
}

/// to = from, or nothing at all if status[kApply] is 0. Not on the same memory.
void commit_cpu(void* to, const void* from, size_t bytes, const double* status);
void commit_cuda(Device device, void* to, const void* from, size_t bytes, const double* status);

/// Which part of a measurement is done: all of it; the squares of the given norm blocks alone, into their
/// slots; or the decision by the sums in all slots.
enum class Measure : uint8_t { whole, squares, decision };

/// Adds up the squares of all gradients and calls prepare(). The order is that of the norm blocks, in f64:
/// the squares of a block in a fixed order, then the blocks' sums in a fixed order. It does not depend on
/// where the gradients are stored, nor on how many blocks of threads there are. `partials`: scratch, a number
/// per norm block.
void measure_cpu(DType compute, const StepArgs& args, double* partials, const PrepareOptions& options,
                 Measure part = Measure::whole);
void measure_cuda(Device device, const StepArgs& args, double* partials, const PrepareOptions& options,
                  Measure part = Measure::whole);

/// The same on that device.
inline void measure(Device device, DType compute, const StepArgs& args, double* partials,
                    const PrepareOptions& options, Measure part = Measure::whole) {
  if (device.is_cpu()) {
    measure_cpu(compute, args, partials, options, part);
  } else {
    if constexpr (kCuda) measure_cuda(device, args, partials, options, part);
  }
}

/// prepare_parameter() for every place, after the measurement.
void prepare_parameters_cpu(const StepArgs& args, const PrepareOptions& options);
void prepare_parameters_cuda(Device device, const StepArgs& args, const PrepareOptions& options);

void prepare_average_cuda(Device device, const StepArgs& args, double decay, bool warmup);

/// status[slot] = value, in stream order; the value travels as a kernel argument.
void write_status_cuda(Device device, double* status, StatusSlot slot, double value);

}  // namespace tessera::optim
