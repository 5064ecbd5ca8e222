#include "runtime/host_memory_internal.h"
#include "runtime/integers.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <utility>

namespace tessera {

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

}  // namespace tessera
