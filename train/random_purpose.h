#pragma once

#include <cstdint>

#include "runtime/rng.h"

namespace tessera::train {

/// The purposes for which a run draws random numbers. Each purpose has its own streams under one seed, so
/// that a change of one (dropout where there was none, one more layer to initialise, weights that are loaded)
/// leaves the numbers of the others as they are.
enum class RandomPurpose : uint64_t {
  initialisation = 0,
  dropout = 0xD509'5EED'0000'0003u,
  sequence_order = 0x0D4E'5EED'0000'0001u,     // order of the windows of a text
  text_order = 0x0D3E'5EED'0000'0002u,         // order of labelled texts
  activation_choice = 0x2424'5EED'0000'0005u,  // random choices of 2:4 activations
  row_choice = 0x511C'5EED'0000'0004u,         // rows of sliced backward passes
  branch_choice = 0xD209'5EED'0000'0005u,      // residual branches dropped by a step (DropBP)
  evaluation = 0xE7A1'5EED'0000'0001u,         // tasks that training never sees
  calibration = 0xCA11'5EED'0000'0001u,        // samples of a text
  rounding = 0x20D0'5EED'0000'0006u,           // stochastic rounding by an optimizer
  masking = 0x3A5C'5EED'0000'0004u  // which tokens a language model predicts, and what stands there
};

/// The seed of that purpose. Seeds of runs that differ by less than 2^32 share none.
inline uint64_t seed_for(RandomPurpose purpose, uint64_t seed) {
  return seed ^ uint64_t(purpose);
}

/// The generator of a model draws its initial values and later its dropout masks. Call this when the model is
/// made: from here on `rng` draws for `purpose`, from the first stream on.
inline void use_for(RandomPurpose purpose, uint64_t seed, Rng& rng) {
  rng.set_state({seed_for(purpose, seed), 0});
}

}  // namespace tessera::train
