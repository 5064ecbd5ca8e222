#include <cstring>
#include <numeric>

#include "optim/elementwise_kernels.h"

namespace tessera::optim {
namespace {

template <class C>
double block_squares(const StepArgs& args, const NormBlock& block) {
  constexpr int kLanes = 8;  // sums that do not wait for each other
  const C* const gradient = static_cast<const C*>(args.gradients) + block.offset;
  double lanes[kLanes] = {};
  for (int32_t i = 0; i < block.elements; i += kLanes)
    for (int k = 0; k < kLanes; ++k) lanes[k] += double(gradient[i + k]) * double(gradient[i + k]);
  return std::accumulate(lanes, lanes + kLanes, 0.0);
}

/// Calls f with a value of the arithmetic type of an arena.
template <class F>
void dispatch_compute(DType compute, F&& f) {
  compute == DType::f64 ? f(double{}) : f(float{});
}

}  // namespace

template void update_cpu(const StepArgs&, const AdamWRule&);
template void update_cpu(const StepArgs&, const SgdRule&);
template void update_cpu(const StepArgs&, const MomentumRule&);
template void update_cpu(const StepArgs&, const TakeRule&);
template void update_cpu(const StepArgs&, const DescendRule&);
template void update_cpu(const StepArgs&, const DirectionRule&);
template void update_cpu(const StepArgs&, const MomentsRule&);
template void update_cpu(const StepArgs&, const AverageRule&);

void commit_cpu(void* to, const void* from, size_t bytes, const double* status) {
  if (status[kApply] != 0 && bytes > 0) std::memcpy(to, from, bytes);
}

void prepare_parameters_cpu(const StepArgs& args, const PrepareOptions& options) {
  for (int64_t i = 0; i < args.place_count; ++i)
    prepare_parameter(args.status, args.arrived[i], args.parameter_steps[i], args.parameter_bias + 2 * i,
                      options);
}

void measure_cpu(DType compute, const StepArgs& args, double* partials, const PrepareOptions& options,
                 Measure part) {
  if (part != Measure::decision)
    dispatch_compute(compute, [&]<class C>(C) {
      parallel_for(args.norm_block_count, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
          partials[args.norm_blocks[i].slot] = block_squares<C>(args, args.norm_blocks[i]);
      });
    });
  if (part != Measure::squares)
    prepare(args.status, args.counts, args.scaling,
            std::accumulate(partials, partials + args.norm_slots, 0.0), options, args.restarts);
}

}  // namespace tessera::optim
