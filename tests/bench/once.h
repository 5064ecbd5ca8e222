#pragma once

#include "bench/timer.h"

namespace tessera::bench {

/// One timed step after one that warms up: for what a record says, not for its times.
inline constexpr TimerOptions kOnce = {.seconds = 0, .least = 1, .most = 1, .warmups = 1, .cold = false};

}  // namespace tessera::bench
