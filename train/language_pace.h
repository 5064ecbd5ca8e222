#pragma once

#include <cstdint>
#include <vector>

#include "runtime/device.h"
#include "train/language_settings.h"

namespace tessera::train {

/// The periods, in steps, of what the optimizer of this job does besides its usual step: GaLore's
/// decompositions, LORO's exact steps and balancing.
std::vector<int64_t TrainingSettings::*> periods_of(const LanguageSettings& settings);

/// The number of steps of this job that fit into this many seconds, estimated from a few steps on random
/// tokens, and from one of each of periods_of(), counted by its share of the steps.
int64_t steps_within(const LanguageSettings& settings, Device device, double seconds);

}  // namespace tessera::train
