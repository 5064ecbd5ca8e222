#pragma once

#include "optim/kernels.h"
#include "runtime/parallel.h"

/// The fused elementwise update on the CPU. A rule instantiates it in one .cpp:
///   template void update_cpu(const StepArgs&, const MyRule&);

namespace tessera::optim {
namespace detail {

/// State: C, or bf16.
template <class C, class W, class State, class R>
void update_chunk(const StepArgs& args, const R& rule, const Chunk& chunk) {
  constexpr int kStates = R::kStates;
  constexpr bool kShort = !std::is_same_v<State, C>;
  const RoundingBits bits{args.rounding_seed, kShort ? uint64_t(args.counts[kSteps]) : 0};
  const Place& place = args.places[chunk.place];
  const C clip = C(args.status[kClip]);
  const double* const bias =
      args.parameter_bias ? args.parameter_bias + 2 * chunk.place : args.status + kBias1 + 2 * args.rule;
  const Scalars<C> scalars{C(args.status[kRate] * place.lr_scale), C(place.weight_decay), C(bias[0]),
                           C(bias[1])};
  for (int64_t row = chunk.row; row < chunk.row + chunk.rows; ++row) {
    const int64_t within = row * place.arena_stride + chunk.column, at = place.offset + within,
                  state = at - args.first_state;
    W* const weight = static_cast<W*>(place.weight) + row * place.stride + chunk.column;
    C* const master = place.master < 0 ? nullptr : static_cast<C*>(args.masters) + place.master + within;
    const C* const gradient = static_cast<const C*>(args.gradients) + (R::kGradient ? at : 0);
    State* const first = static_cast<State*>(args.states[0]) + (kStates > 0 ? state : 0);
    State* const second = static_cast<State*>(args.states[1]) + (kStates > 1 ? state : 0);
    Uint4 random{};
    for (int32_t i = 0; i < chunk.columns; ++i) {
      C w = master ? master[i] : C(weight[i]);
      C g = 0, s[2] = {};
      if constexpr (R::kGradient) g = clip * gradient[i];
      if constexpr (kStates > 0) s[0] = C(first[i]);
      if constexpr (kStates > 1) s[1] = C(second[i]);
      rule(w, g, s, scalars);
      if constexpr (kStates > 0) first[i] = State(s[0]);
      if constexpr (kStates > 1) second[i] = State(s[1]);
      if constexpr (R::kWritesWeight) {
        if (master) master[i] = w;
        weight[i] = W(w);
      }
      if constexpr (kShort) {
        if (i == 0 || (at + i) % 4 == 0) random = bits.of_block((at + i) / 4);
        const uint32_t word = random.word[(at + i) % 4];
        if constexpr (R::kSlowState == 0) first[i] = round_stochastically(s[0], word >> 16);
        if constexpr (R::kSlowState == 1) second[i] = round_stochastically(s[1], word >> 16);
        if constexpr (std::is_same_v<W, bf16>) weight[i] = round_stochastically(w, word);
      }
    }
  }
}

}  // namespace detail

template <class R>
void update_cpu(const StepArgs& args, const R& rule) {
  if (args.status[kApply] == 0) return;
  parallel_for(args.chunk_count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Chunk& chunk = args.chunks[i];
      if (args.arrived && args.arrived[chunk.place] == 0) continue;
      dispatch_floating(args.places[chunk.place].dtype, "update", [&]<class W>() {
        if constexpr (TakesShortStates<R> && (std::is_same_v<W, float> || std::is_same_v<W, bf16>)) {
          if (args.short_states) return detail::update_chunk<float, W, bf16>(args, rule, chunk);
        }
        detail::update_chunk<Compute<W>, W, Compute<W>>(args, rule, chunk);
      });
    }
  });
}

}  // namespace tessera::optim
