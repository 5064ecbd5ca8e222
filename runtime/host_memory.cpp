#include "runtime/host_memory_internal.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <utility>

#include "runtime/integers.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

/// A counter of a control group; SIZE_MAX for "max", and for a file that is not there.
size_t read_number(const fs::path& path) {
  std::ifstream file(path);
  size_t value = 0;
  return file >> value ? value : SIZE_MAX;
}

/// The sum of the lines "name value" of that name. A file with units has them after the value.
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

}  // namespace

MemorySource host_memory(std::function<size_t()> most) {
  constexpr size_t kPage = 4096;
  struct Lent {
    std::map<void*, size_t> sizes;
    size_t total = 0;
  };
  const auto lent = std::make_shared<Lent>();  // the allocator calls one at a time
  MemorySource source;
  source.name = "cpu";
  source.allocate = [lent, most = std::move(most)](size_t bytes) -> void* {
    const size_t whole = round_up(bytes, kPage), limit = most();
    if (whole < bytes || whole > limit || lent->total > limit - whole) return nullptr;
    void* const data = std::aligned_alloc(kPage, whole);
    if (!data) return nullptr;
    lent->sizes.emplace(data, whole);
    lent->total += whole;
    return data;
  };
  source.release = [lent](void* data) {
    const auto found = lent->sizes.find(data);
    lent->total -= found->second;
    lent->sizes.erase(found);
    std::free(data);
  };
  source.usage = [] {
    const size_t total = memory_limits().total();
    return std::pair(std::min(memory_limits().available(), total), total);
  };
  source.fill = [](void* data, int byte, size_t bytes) { std::memset(data, byte, bytes); };
  source.read = [](void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); };
  return source;
}

MemoryLimits::MemoryLimits(std::string root)
    : root_(std::move(root)), groups_(control_groups(root_, "memory")) {}

MemoryLimits::Room MemoryLimits::room_of(const ControlGroup& group) const {
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
  for (const ControlGroup& group : groups_) {
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
  for (const ControlGroup& group : groups_) total = std::min(total, room_of(group).limit);
  return total;
}

size_t MemoryLimits::within_reach() const {
  size_t pages = 0;
  std::ifstream own(root_ + "/proc/self/statm");
  own >> pages >> pages;  // the second number: what is resident
  const size_t available = this->available();
  return own ? plus(available, pages * size_t(::sysconf(_SC_PAGE_SIZE))) : SIZE_MAX;
}

const MemoryLimits& memory_limits() {
  static const MemoryLimits limits;
  return limits;
}

}  // namespace tessera
