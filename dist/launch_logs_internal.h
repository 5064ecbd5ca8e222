#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "comm/socket.h"
#include "dist/launch.h"

namespace tessera::dist {

/// The number of a rank by that among the ranks of this machine.
int rank_of(const LaunchOptions& options, int local);
/// The file that a rank's output goes to.
std::string log_of(const LaunchOptions& options, int rank);
/// The logs of this machine's ranks, in the order of their local numbers, each locked for as long as the
/// launch lives: several machines may share the directory, two jobs may not.
std::vector<comm::File> open_logs(const LaunchOptions& options);
/// A line between what an earlier launch left in the logs and what this one adds.
void begin_logs(const std::vector<comm::File>& logs, const std::vector<std::string>& command);
/// Writes all of it; where that fails, on a full disk, the rest is left out.
void write_all(int file, std::string_view bytes);

}  // namespace tessera::dist
