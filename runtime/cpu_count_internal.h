#pragma once

#include <string>

namespace tessera {

/// CPUs' worth of time that the control groups of this process allow it (cpu.max of version 2,
/// cpu.cfs_quota_us and cpu.cfs_period_us of version 1), rounded up; 0: no limit. `root` as in
/// control_groups().
int cgroup_cpus(const std::string& root);

/// Cores that this process may use: its affinity mask, limited by its control groups. At least 1.
int usable_cpus();

/// Parses the number of threads in an environment variable, "8" or "8,4" (the first one counts). Throws,
/// naming the variable, if it is invalid.
int parse_threads(const char* variable, const char* text);

}  // namespace tessera
