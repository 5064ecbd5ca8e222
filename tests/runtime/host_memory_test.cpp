#include "runtime/host_memory_internal.h"

#include <gtest/gtest.h>

#include "runtime/error.h"

namespace tessera {
namespace {

TEST(HostMemory, LendsNoMoreThanItIsToldAndAgainWhatCameBack) {
  const MemorySource source = host_memory([] { return size_t{1} << 20; });
  EXPECT_EQ(source.allocate((1 << 20) + 1), nullptr);
  EXPECT_EQ(source.allocate(SIZE_MAX), nullptr);
  for (int round = 0; round < 3; ++round) {
    void* const a = source.allocate(500'000);
    void* const b = source.allocate(500'000);
    ASSERT_TRUE(a && b);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(a) % 4096, 0u);
    EXPECT_EQ(source.allocate(500'000), nullptr);
    source.release(a), source.release(b);
  }
}

TEST(HostMemory, BeyondTheMachinesAnAllocationIsAnErrorAndNotAPromise) {
  EXPECT_GE(memory_limits().within_reach(), size_t(16) << 20);
  Allocator allocator(host_memory([] { return size_t{8} << 20; }));
  MemoryBlock* const held = allocator.allocate(6 << 20);
  EXPECT_THROW(allocator.allocate(6 << 20), OutOfMemory);
  allocator.free(held);
}

}  // namespace
}  // namespace tessera
