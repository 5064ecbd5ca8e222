#pragma once

#include <vector>

#include "bench/record.h"

namespace tessera::bench {

/// Host overhead per operator: a chain of `count` scalings of four numbers, forward (check, allocate, record,
/// launch) and backward, wall clock until the device is done. op "host chain", modes "fwd" and "bwd"; the
/// peer is bench/peers/torch_peers.py OUT host.
std::vector<Record> bench_host(Device device, const Listener& listener = {}, int64_t count = 10000);

}  // namespace tessera::bench
