#pragma once

#include <string>
#include <vector>

#include "runtime/allocator.h"
#include "runtime/control_groups_internal.h"

namespace tessera {

/// Page-aligned host memory for tensors. Hands out at most most() bytes in total, whatever the system would
/// grant: under overcommit, memory beyond what the machine has gets this or another process killed when it is
/// touched.
MemorySource host_memory(std::function<size_t()> most);

/// The memory limits of this process: /proc/meminfo and the limits of its control groups (v1 and v2), its
/// own and all ancestors. A container is killed at the limit of its group, however much memory the machine
/// has.
class MemoryLimits {
 public:
  /// `root`: before "/proc" and the mount points, for tests. Throws nothing: a file that is missing or not
  /// understood sets no limit.
  explicit MemoryLimits(std::string root = "");

  /// Bytes of memory and swap that could be taken now: the page cache of files counts as free. SIZE_MAX if
  /// nothing is known.
  size_t available() const;
  /// Bytes of memory, without swap: the machine's, or the least limit.
  size_t total() const;
  /// Bytes that this process could have in all: what is resident, and what is available.
  size_t within_reach() const;

 private:
  /// Bytes left under the limits of one group; SIZE_MAX: none.
  struct Room {
    size_t limit = SIZE_MAX, memory = SIZE_MAX, swap = SIZE_MAX, both = SIZE_MAX;
  };
  Room room_of(const ControlGroup& group) const;
  std::string root_;
  std::vector<ControlGroup> groups_;
};

/// Of this process; found once: where its groups are mounted does not change while it runs.
const MemoryLimits& memory_limits();

}  // namespace tessera
