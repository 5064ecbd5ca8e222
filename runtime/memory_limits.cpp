#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "runtime/host_memory_internal.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

/// A counter of a control group; SIZE_MAX for "max", and for a file that is not there.
size_t read_number(const fs::path& path) {
  std::ifstream file(path);
  size_t value = 0;
  return file >> value ? value : SIZE_MAX;
}

/// The sum of the lines "name value" of that name. A file with units has them behind the value.
size_t sum_of(const fs::path& path, std::initializer_list<const char*> names) {
  std::ifstream file(path);
  size_t sum = 0;
  std::string name, rest;
  for (size_t value = 0; file >> name >> value && std::getline(file, rest);)
    if (std::ranges::find(names, name) != names.end()) sum += value;
  return sum;
}

/// What is left under a limit if the kernel drops the page cache of files first, as it does.
size_t room(size_t limit, size_t used, size_t cache) {
  if (limit == SIZE_MAX || used == SIZE_MAX) return limit;
  used -= std::min(used, cache);
  return limit - std::min(limit, used);
}

size_t plus(size_t a, size_t b) {
  return a > SIZE_MAX - b ? SIZE_MAX : a + b;
}

std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, at);) parts.push_back(part);
  return parts;
}

bool lists(const std::string& text, const std::string& word) {
  const auto words = split(text, ',');
  return std::ranges::find(words, word) != words.end();
}

/// Blanks, tabs, line ends and backslashes are three octal digits in mountinfo.
std::string unescaped(const std::string& text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const bool code =
        text[i] == '\\' && i + 3 < text.size() && text.find_first_not_of("01234567", i + 1) >= i + 4;
    out += code ? char((text[i + 1] - '0') * 64 + (text[i + 2] - '0') * 8 + (text[i + 3] - '0')) : text[i];
    if (code) i += 3;
  }
  return out;
}

/// The part of a group's path that lies below the part of the hierarchy that is mounted. Without a common
/// start (a container sees its group as the root, or the path of the host) the mount is the group.
std::string below(const std::string& group, const std::string& mounted) {
  if (group.starts_with("/..")) return "";
  if (mounted == "/") return group;
  if (group == mounted) return "";
  return group.starts_with(mounted + "/") ? group.substr(mounted.size()) : "";
}

}  // namespace

MemoryLimits::MemoryLimits(std::string root) : root_(std::move(root)) {
  // Which group the process is in, in the unified hierarchy (v2) and in that of the memory controller (v1).
  std::string unified, of_memory;
  std::ifstream groups(root_ + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {  // "4:memory:/path", "0::/path"
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (controllers.empty()) unified = line.substr(second + 1);
    if (lists(controllers, "memory")) of_memory = line.substr(second + 1);
  }
  std::ifstream mounts(root_ + "/proc/self/mountinfo");
  for (std::string line; std::getline(mounts, line);) {
    const size_t dash = line.find(" - ");
    if (dash == std::string::npos) continue;
    const auto fields = split(line.substr(0, dash), ' '), kind = split(line.substr(dash + 3), ' ');
    if (fields.size() < 5 || kind.size() < 3) continue;
    const bool is_unified = kind[0] == "cgroup2" && !unified.empty();
    const bool is_memory = kind[0] == "cgroup" && lists(kind[2], "memory") && !of_memory.empty();
    if (!is_unified && !is_memory) continue;
    const fs::path mount = root_ + unescaped(fields[4]);
    // A limit binds all groups below it.
    std::error_code ignored;
    for (fs::path at = mount.string() + below(is_unified ? unified : of_memory, unescaped(fields[3]));;
         at = at.parent_path()) {
      if (at.string().ends_with('/')) at = at.parent_path();
      if (fs::is_directory(at, ignored)) groups_.push_back({at.string(), is_unified});
      if (at == mount || at.string().size() <= mount.string().size()) break;
    }
  }
}

MemoryLimits::Room MemoryLimits::room_of(const Group& group) const {
  const fs::path at = group.folder;
  if (group.unified) {
    // Beyond memory.high the process is not ended but slowed down until it stands still.
    const size_t limit = std::min(read_number(at / "memory.max"), read_number(at / "memory.high"));
    const size_t cache = sum_of(at / "memory.stat", {"inactive_file", "active_file"});
    return {.limit = limit,
            .memory = room(limit, read_number(at / "memory.current"), cache),
            .swap = room(read_number(at / "memory.swap.max"), read_number(at / "memory.swap.current"), 0)};
  }
  const size_t cache = sum_of(at / "memory.stat", {"total_inactive_file", "total_active_file"});
  // That of the groups above, which a container does not see.
  const size_t above = sum_of(at / "memory.stat", {"hierarchical_memory_limit"});
  const size_t limit = std::min(read_number(at / "memory.limit_in_bytes"), above > 0 ? above : SIZE_MAX);
  return {.limit = limit,
          .memory = room(limit, read_number(at / "memory.usage_in_bytes"), cache),
          .both = room(read_number(at / "memory.memsw.limit_in_bytes"),
                       read_number(at / "memory.memsw.usage_in_bytes"), cache)};
}

size_t MemoryLimits::available() const {
  const auto kilobytes = [&](const char* name) { return sum_of(root_ + "/proc/meminfo", {name}); };
  size_t memory = kilobytes("MemAvailable:"), swap = kilobytes("SwapFree:");
  memory = memory == 0 && swap == 0 ? SIZE_MAX : memory * 1024;
  swap *= 1024;
  size_t both = SIZE_MAX;
  for (const Group& group : groups_) {
    const Room room = room_of(group);
    memory = std::min(memory, room.memory);
    swap = std::min(swap, room.swap);
    both = std::min(both, room.both);
  }
  return std::min(plus(memory, swap), both);
}

size_t MemoryLimits::total() const {
  const size_t kilobytes = sum_of(root_ + "/proc/meminfo", {"MemTotal:"});
  size_t total =
      kilobytes > 0 ? kilobytes * 1024 : size_t(::sysconf(_SC_PHYS_PAGES)) * size_t(::sysconf(_SC_PAGE_SIZE));
  for (const Group& group : groups_) total = std::min(total, room_of(group).limit);
  return total;
}

size_t MemoryLimits::within_reach() const {
  size_t pages = 0;
  std::ifstream own(root_ + "/proc/self/statm");
  own >> pages >> pages;  // the second number: what is resident
  const size_t available = this->available();
  return own ? plus(available, pages * size_t(::sysconf(_SC_PAGE_SIZE))) : SIZE_MAX;
}

namespace {

/// Found once: where a process's groups are mounted does not change while it runs.
const MemoryLimits& limits() {
  static const MemoryLimits limits;
  return limits;
}

}  // namespace

size_t available_memory() {
  return limits().available();
}
size_t total_memory() {
  return limits().total();
}
size_t memory_within_reach() {
  return limits().within_reach();
}

}  // namespace tessera
