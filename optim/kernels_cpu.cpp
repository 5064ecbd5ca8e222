#include <numeric>

#include "optim/kernels.h"
#include "runtime/parallel.h"

namespace tessera::optim {
namespace {

template <class C, class W, class R>
void update_chunk(const StepArgs& args, const R& rule, const Chunk& chunk) {
  constexpr int kStates = R::kStates;
  const Place& place = args.places[chunk.place];
  const C clip = C(args.status[kClip]);
  const Scalars<C> scalars{C(args.status[kRate] * place.lr_scale), C(place.weight_decay),
                           C(args.status[kBias1]), C(args.status[kBias2])};
  for (int64_t row = chunk.row; row < chunk.row + chunk.rows; ++row) {
    const int64_t within = row * place.arena_stride + chunk.column, at = place.offset + within;
    W* const weight = static_cast<W*>(place.weight) + row * place.stride + chunk.column;
    C* const master = place.master < 0 ? nullptr : static_cast<C*>(args.masters) + place.master + within;
    const C* const gradient = static_cast<const C*>(args.gradients) + (R::kGradient ? at : 0);
    C* const first = static_cast<C*>(args.states[0]) + (kStates > 0 ? at : 0);
    C* const second = static_cast<C*>(args.states[1]) + (kStates > 1 ? at : 0);
    for (int32_t i = 0; i < chunk.columns; ++i) {
      C w = master ? master[i] : C(weight[i]);
      C g = 0, s[2] = {};
      if constexpr (R::kGradient) g = clip * gradient[i];
      if constexpr (kStates > 0) s[0] = first[i];
      if constexpr (kStates > 1) s[1] = second[i];
      rule(w, g, s, scalars);
      if constexpr (kStates > 0) first[i] = s[0];
      if constexpr (kStates > 1) second[i] = s[1];
      if constexpr (R::kWritesWeight) {
        if (master) master[i] = w;
        weight[i] = W(w);
      }
    }
  }
}

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

void update_cpu(const StepArgs& args, const Rule& rule) {
  if (args.status[kApply] == 0) return;
  std::visit(
      [&](const auto& chosen) {
        parallel_for(args.chunk_count, 1, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) {
            const Chunk& chunk = args.chunks[i];
            dispatch_floating(args.places[chunk.place].dtype, "update",
                              [&]<class W>() { update_chunk<Compute<W>, W>(args, chosen, chunk); });
          }
        });
      },
      rule);
}

void measure_cpu(DType compute, const StepArgs& args, double* partials, const PrepareOptions& options) {
  dispatch_compute(compute, [&]<class C>(C) {
    parallel_for(args.norm_block_count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) partials[i] = block_squares<C>(args, args.norm_blocks[i]);
    });
  });
  prepare(args.status, args.counts, args.scaling,
          std::accumulate(partials, partials + args.norm_block_count, 0.0), options);
}

}  // namespace tessera::optim
