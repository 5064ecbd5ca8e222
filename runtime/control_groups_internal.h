#pragma once

#include <string>
#include <vector>

namespace tessera {

/// One of the control groups that this process is in.
struct ControlGroup {
  std::string folder;  // with its files
  bool unified;        // version 2
};

/// The control groups that limit this process for one controller ("memory", "cpu"): its own and all ancestors
/// that are mounted, version 1 and 2. In a container whose view shows its group as the root, or with the
/// host's path, the mount point itself. `root`: prefix of "/proc" and of the mount points, for tests. Does
/// not throw: what is missing or malformed is left out.
std::vector<ControlGroup> control_groups(const std::string& root, const char* controller);

}  // namespace tessera
