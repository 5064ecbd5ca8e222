#pragma once

#include <filesystem>

namespace tessera {

/// CPUs' worth of time that control groups allow this process, rounded up; 0: no limit. `groups` is
/// /proc/self/cgroup and `mounts` /sys/fs/cgroup, or a test's copies: cpu.max of version 2, cpu.cfs_quota_us
/// and cpu.cfs_period_us of version 1, of the process's group and of every group above it. In a container
/// without a namespace of its own the group's path does not exist below the mount: then the mount's root is
/// the container's group.
int cgroup_cpus(const std::filesystem::path& groups, const std::filesystem::path& mounts);

/// Cores that this process may use: its affinity mask, limited by its control groups. At least 1.
int usable_cpus();

/// A number of threads from the text of an environment variable, "8" or "8,4" (the first counts). Throws,
/// naming the variable, if it is none.
int parse_threads(const char* variable, const char* text);

}  // namespace tessera
