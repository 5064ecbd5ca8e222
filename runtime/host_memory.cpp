#include "runtime/host_memory_internal.h"

#include <sys/sysinfo.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>

namespace tessera {

size_t machine_memory() {
  struct sysinfo info {};
  if (::sysinfo(&info) != 0) return SIZE_MAX;
  return (size_t(info.totalram) + size_t(info.totalswap)) * info.mem_unit;
}

MemorySource host_memory(size_t most) {
  constexpr size_t kPage = 4096;
  struct Lent {
    std::map<void*, size_t> sizes;
    size_t total = 0;
  };
  const auto lent = std::make_shared<Lent>();  // the allocator calls one at a time
  MemorySource source;
  source.name = "cpu";
  source.allocate = [lent, most](size_t bytes) -> void* {
    const size_t whole = (bytes + kPage - 1) / kPage * kPage;
    if (whole < bytes || whole > most - lent->total) return nullptr;
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
