#include <sched.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "runtime/cpu_count_internal.h"
#include "runtime/error.h"
#include "runtime/parallel.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr double kNoLimit = std::numeric_limits<double>::infinity();

/// Quota over period of version 2, "200000 100000" or "max 100000".
double limit_v2(const fs::path& group) {
  std::ifstream file(group / "cpu.max");
  std::string quota;
  double period = 0;
  if (!(file >> quota >> period) || quota == "max" || period <= 0) return kNoLimit;
  return std::strtod(quota.c_str(), nullptr) / period;
}

double limit_v1(const fs::path& group) {
  std::ifstream quota_file(group / "cpu.cfs_quota_us"), period_file(group / "cpu.cfs_period_us");
  double quota = 0, period = 0;
  if (!(quota_file >> quota) || !(period_file >> period) || quota <= 0 || period <= 0) return kNoLimit;
  return quota / period;
}

/// The least of the limits of `path` below `root` and of the groups above it, up to the root.
template <class Limit>
double least_limit(const fs::path& root, const fs::path& path, Limit limit) {
  double least = limit(root);
  fs::path group = root;
  for (const fs::path& name : path.relative_path()) least = std::min(least, limit(group /= name));
  return least;
}

bool names_cpu(const std::string& controllers) {
  return ("," + controllers + ",").find(",cpu,") != std::string::npos;
}

}  // namespace

int cgroup_cpus(const fs::path& groups, const fs::path& mounts) {
  double least = kNoLimit;
  std::ifstream file(groups);
  // hierarchy:controllers:path; version 2 is "0::path".
  for (std::string line; std::getline(file, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const fs::path path = line.substr(second + 1);
    if (controllers.empty()) {
      least = std::min(
          {least, least_limit(mounts, path, limit_v2), least_limit(mounts / "unified", path, limit_v2)});
    } else if (names_cpu(controllers)) {
      least = std::min({least, least_limit(mounts / controllers, path, limit_v1),
                        least_limit(mounts / "cpu", path, limit_v1)});
    }
  }
  return least == kNoLimit ? 0 : std::max(1, int(std::ceil(std::min(least, double(kMostThreads)))));
}

int usable_cpus() {
  int cores = int(std::max(1u, std::thread::hardware_concurrency()));
  // A mask of fixed size is refused on machines with more CPUs than it has bits.
  std::vector<cpu_set_t> mask(kMostThreads * 4 / CPU_SETSIZE);
  const size_t bytes = mask.size() * sizeof(cpu_set_t);
  if (::sched_getaffinity(0, bytes, mask.data()) == 0) cores = std::max(1, CPU_COUNT_S(bytes, mask.data()));
  const int allowed = cgroup_cpus("/proc/self/cgroup", "/sys/fs/cgroup");
  return std::min({cores, allowed > 0 ? allowed : cores, kMostThreads});
}

int parse_threads(const char* variable, const char* text) {
  int threads = 0;
  const char* const last = text + std::strlen(text);
  const auto [end, code] = std::from_chars(text, last, threads);
  check(code == std::errc{} && (end == last || *end == ',') && threads >= 1 && threads <= kMostThreads,
        variable, " is \"", text, "\"; expected a number of threads from 1 to ", kMostThreads);
  return threads;
}

}  // namespace tessera
