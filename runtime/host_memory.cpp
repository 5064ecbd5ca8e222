#include "runtime/host_memory_internal.h"

#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <utility>

namespace tessera {

size_t memory_within_reach() {
  size_t kilobytes = 0, pages = 0;
  int found = 0;
  std::ifstream system("/proc/meminfo"), own("/proc/self/statm");
  std::string name, unit;
  for (size_t value = 0; found < 2 && system >> name >> value && std::getline(system, unit);)
    if (name == "MemAvailable:" || name == "SwapFree:") kilobytes += value, ++found;
  own >> pages >> pages;  // the second number: what is resident
  if (found == 0 || !own) return SIZE_MAX;
  return kilobytes * 1024 + pages * size_t(::sysconf(_SC_PAGE_SIZE));
}

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
    const size_t whole = (bytes + kPage - 1) / kPage * kPage, limit = most();
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
    const auto page = size_t(::sysconf(_SC_PAGE_SIZE));
    return std::pair(size_t(::sysconf(_SC_AVPHYS_PAGES)) * page, size_t(::sysconf(_SC_PHYS_PAGES)) * page);
  };
  source.fill = [](void* data, int byte, size_t bytes) { std::memset(data, byte, bytes); };
  source.read = [](void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); };
  return source;
}

}  // namespace tessera
