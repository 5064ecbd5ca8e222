#pragma once

#include <string>
#include <vector>

#include "runtime/allocator.h"
#include "runtime/control_groups_internal.h"

namespace tessera {

/// Memory of the host for tensors, in pages. It lends no more bytes in all than `most` says when it is asked,
/// whatever the system would promise: what is promised beyond the machine's memory ends the process, or
/// another one, when it is used.
MemorySource host_memory(std::function<size_t()> most);

/// Memory as this process may have it: what /proc/meminfo says, and the limits of the control groups (cgroup
/// v1 and v2) that it is in, its own and all above it. A container is ended at the limit of its group,
/// however much the machine has.
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

/// Of this process.
size_t available_memory();
size_t total_memory();
size_t memory_within_reach();

}  // namespace tessera
