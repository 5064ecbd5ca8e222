#pragma once

#include <cstdint>

#include "runtime/device.h"
#include "train/tnp_settings.h"

namespace tessera::train {

/// The largest batch whose training step fits on the device: doubles until a step runs out of memory, then
/// bisects.
int64_t find_max_batch(const TnpSettings& settings, Device device, int64_t most = int64_t(1) << 20);

}  // namespace tessera::train
