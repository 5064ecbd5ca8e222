#include <sched.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "runtime/control_groups_internal.h"
#include "runtime/cpu_count_internal.h"
#include "runtime/error.h"
#include "runtime/parallel.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr double kNoLimit = std::numeric_limits<double>::infinity();

/// CPUs' worth of time of one group: its quota over its period.
double limit_of(const ControlGroup& group) {
  const fs::path at = group.folder;
  std::string quota;
  double period = 0;
  if (group.unified) {  // "200000 100000" or "max 100000"
    std::ifstream file(at / "cpu.max");
    if (!(file >> quota >> period)) return kNoLimit;
  } else {
    std::ifstream quota_file(at / "cpu.cfs_quota_us"), period_file(at / "cpu.cfs_period_us");
    if (!(quota_file >> quota) || !(period_file >> period)) return kNoLimit;
  }
  const double share = quota == "max" ? -1 : std::strtod(quota.c_str(), nullptr);
  return share > 0 && period > 0 ? share / period : kNoLimit;
}

}  // namespace

int cgroup_cpus(const std::string& root) {
  double least = kNoLimit;
  for (const ControlGroup& group : control_groups(root, "cpu")) least = std::min(least, limit_of(group));
  return least == kNoLimit ? 0 : std::max(1, int(std::ceil(std::min(least, double(kMostThreads)))));
}

int usable_cpus() {
  int cores = int(std::max(1u, std::thread::hardware_concurrency()));
  // A mask of fixed size is refused on machines with more CPUs than it has bits.
  std::vector<cpu_set_t> mask(kMostThreads * 4 / CPU_SETSIZE);
  const size_t bytes = mask.size() * sizeof(cpu_set_t);
  if (::sched_getaffinity(0, bytes, mask.data()) == 0) cores = std::max(1, CPU_COUNT_S(bytes, mask.data()));
  const int allowed = cgroup_cpus("");
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
