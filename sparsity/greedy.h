#pragma once

#include "sparsity/gate_calibration.h"
#include "sparsity/walk.h"

namespace tessera::sparsity {

/// TEAL's greedy distribution (algorithm 1 of arXiv:2408.14690) for the walk's next block, whose layers are
/// dense. It starts without gates; each step adds options.step d_model^2 / weights to the share of one
/// projection: the one whose step gives the least error of the block's output, the earliest of equals. No
/// share goes beyond kMostShare. `layers`: those of the block. The inputs are what the dense blocks before it
/// output.
GreedyBlock distribute_greedily(models::LanguageRef model, const BlockWalk& walk,
                                const Calibration& calibration, const std::vector<CalibratedLayer>& layers,
                                const GateOptions& options);

inline constexpr double kMostShare = 0.99;

}  // namespace tessera::sparsity
