#pragma once

#include <string>
#include <vector>

namespace tessera {

/// One of the control groups that this process is in.
struct ControlGroup {
  std::string folder;  // with its files
  bool unified;        // version 2
};

/// The groups that bind this process for one controller ("memory", "cpu"): its own and all above it, as far
/// as they are mounted, of version 1 and 2. A container that sees its group as the root, or the path of the
/// host, has the mount itself. `root` stands before "/proc" and the mount points, for tests. Throws nothing:
/// what is missing or not understood is no group.
std::vector<ControlGroup> control_groups(const std::string& root, const char* controller);

}  // namespace tessera
