#pragma once

#include <cstdint>
#include <string>
#include <string_view>

/// The messages of an event file: events_protobuf.cpp with libprotobuf, else events_absent.cpp.

namespace tessera::io::events {

bool available();
std::string version_message(double wall_time);
std::string scalar_message(std::string_view tag, int64_t step, float value, double wall_time);

}  // namespace tessera::io::events
