#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "runtime/error.h"
#include "runtime/host_memory_internal.h"
#include "tests/folder.h"

// Files of /proc and of control groups as different systems have them, below a folder of their own.

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr size_t kLimitUnit = 1 << 20;  // 1 MiB

class Limits : public ::testing::Test {
 protected:
  Limits() {
    put("proc/meminfo",
        "MemTotal:       16777216 kB\nMemFree:         1048576 kB\nMemAvailable:    8388608 kB\n"
        "HugePages_Total:       0\nSwapFree:        2097152 kB\n");  // 16, 8 and 2 GiB
    put("proc/self/statm", "1000 256 30 1 0 40 0\n");
  }
  void put(const std::string& name, const std::string& text) const { folder.put(name, text); }
  void put_mib(const std::string& name, size_t mib) const {
    put(name, std::to_string(mib * kLimitUnit) + "\n");
  }
  /// The unified hierarchy, of which `mounted` is mounted, and the group of the process.
  void unified(const std::string& group, const std::string& mounted = "/") const {
    put("proc/self/cgroup", "0::" + group + "\n");
    put("proc/self/mountinfo", "22 1 0:21 / / rw - ext4 /dev/sda rw\n35 22 0:29 " + mounted +
                                   " /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n");
  }
  size_t available() const { return MemoryLimits(root).available() / kLimitUnit; }
  size_t total() const { return MemoryLimits(root).total() / kLimitUnit; }
  const TemporaryFolder folder;
  const std::string root = folder.path();
  const std::string top = "sys/fs/cgroup";
};

TEST_F(Limits, WithoutGroupsAreThoseOfTheMachine) {
  EXPECT_EQ(available(), 10 * 1024u);
  EXPECT_EQ(total(), 16 * 1024u);
  const size_t pages = 256 * size_t(::sysconf(_SC_PAGE_SIZE));
  EXPECT_EQ(MemoryLimits(root).within_reach(), 10 * 1024 * kLimitUnit + pages);
  fs::remove(fs::path(root) / "proc/meminfo");
  EXPECT_EQ(MemoryLimits(root).available(), SIZE_MAX);
}

TEST_F(Limits, OfAUnifiedGroupLessWhatItUsesButForThePageCache) {
  unified("/box");
  put_mib(top + "/box/memory.max", 2048);
  put_mib(top + "/box/memory.current", 1500);
  put("proc/none", "");
  put(top + "/box/memory.stat", "anon 123\nfile 999999999999\ninactive_file " +
                                    std::to_string(700 * kLimitUnit) + "\nactive_file " +
                                    std::to_string(300 * kLimitUnit) + "\n");
  put_mib(top + "/box/memory.swap.max", 100);
  put_mib(top + "/box/memory.swap.current", 40);
  EXPECT_EQ(available(), 2048 - 500 + 60u);
  EXPECT_EQ(total(), 2048u);
  put_mib(top + "/box/memory.high", 1024);  // the lower of the two counts
  EXPECT_EQ(available(), 1024 - 500 + 60u);
  put_mib(top + "/box/memory.current", 4096);  // beyond the limit there is nothing, and not 2^64
  EXPECT_EQ(available(), 60u);
}

TEST_F(Limits, OfAGroupAreThoseOfAllAboveItAndMaxIsNone) {
  unified("/a/b/c");
  for (const char* group : {"/a", "/a/b", "/a/b/c"}) {
    put(top + group + "/memory.max", "max\n");
    put(top + group + "/memory.high", "max\n");
    put(top + group + "/memory.swap.max", "max\n");
    put_mib(top + group + "/memory.current", 10);
    put(top + group + "/memory.stat", "inactive_file 0\n");
  }
  EXPECT_EQ(available(), 10 * 1024u);
  put_mib(top + "/a/memory.max", 110);
  put(top + "/a/memory.swap.max", "0\n");
  EXPECT_EQ(available(), 100u);
  EXPECT_EQ(total(), 110u);
  put_mib(top + "/a/b/memory.max", 60);
  EXPECT_EQ(available(), 50u);
}

TEST_F(Limits, OfAContainerThatSeesItsGroupAsTheRoot) {
  unified("/");
  put_mib(top + "/memory.max", 512);
  put_mib(top + "/memory.current", 12);
  put(top + "/memory.swap.max", "0\n");
  EXPECT_EQ(available(), 500u);
  unified("/../../other");  // entered from outside its namespace
  EXPECT_EQ(available(), 500u);
  unified("/docker/box", "/docker/box");  // the host's path, and a mount of that group alone
  EXPECT_EQ(available(), 500u);
  unified("/docker/box", "/docker");  // a mount of the group above
  put_mib(top + "/box/memory.max", 40);
  put_mib(top + "/box/memory.current", 10);
  EXPECT_EQ(available(), 30u);
}

TEST_F(Limits, OfTheMemoryControllerOfVersionOne) {
  put("proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/box\n2:pids:/box\n0::/\n");
  put("proc/self/mountinfo",
      "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
      "32 31 0:29 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n"
      "35 31 0:32 / /sys/fs/cgroup/cpu\\040memory rw,relatime - cgroup cgroup rw,cpu,memory\n"
      "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n");
  const std::string v1 = top + "/cpu memory", none = "9223372036854771712\n";
  put(v1 + "/memory.limit_in_bytes", none);
  put_mib(v1 + "/memory.usage_in_bytes", 3000);
  put(v1 + "/box/memory.limit_in_bytes", none);
  put_mib(v1 + "/box/memory.usage_in_bytes", 1000);
  EXPECT_EQ(available(), 10 * 1024u);
  EXPECT_EQ(total(), 16 * 1024u);
  put_mib(v1 + "/box/memory.limit_in_bytes", 2000);
  put(v1 + "/box/memory.stat",
      "inactive_file 5\ntotal_inactive_file " + std::to_string(100 * kLimitUnit) + "\n");
  EXPECT_EQ(available(), 1100 + 2048u);  // and all of the swap
  EXPECT_EQ(total(), 2000u);
  put_mib(v1 + "/box/memory.memsw.limit_in_bytes", 2200);  // memory and swap together
  put_mib(v1 + "/box/memory.memsw.usage_in_bytes", 1000);
  EXPECT_EQ(available(), 1300u);
  put(v1 + "/box/memory.stat", "hierarchical_memory_limit " + std::to_string(1500 * kLimitUnit) + "\n");
  put(v1 + "/box/memory.memsw.limit_in_bytes", none);
  put("proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\nSwapFree: 0 kB\n");
  EXPECT_EQ(available(), 500u);  // of a group above that is not seen
}

TEST_F(Limits, BindTheAllocator) {
  unified("/");
  put_mib(top + "/memory.max", 64);
  put_mib(top + "/memory.current", 0);
  put(top + "/memory.swap.max", "0\n");
  put("proc/self/statm", "0 0\n");
  Allocator allocator(host_memory([limits = MemoryLimits(root)] { return limits.within_reach(); }));
  MemoryBlock* const held = allocator.allocate(48 * kLimitUnit);
  EXPECT_THROW(allocator.allocate(48 * kLimitUnit), OutOfMemory);
  allocator.free(held);
}

}  // namespace
}  // namespace tessera
