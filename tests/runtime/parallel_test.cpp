#include "runtime/parallel.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/cpu_count_internal.h"
#include "runtime/error.h"
#include "tests/errors.h"
#include "tests/folder.h"

namespace tessera {
namespace {

/// Sets the number of threads for one test.
class Threads {
 public:
  explicit Threads(int threads) : before_(cpu_threads()) { set_cpu_threads(threads); }
  ~Threads() { set_cpu_threads(before_); }

 private:
  const int before_;
};

/// A count that threads raise and wait for.
class Count {
 public:
  void raise() {
    const std::lock_guard lock(mutex_);
    count_ += 1;
    changed_.notify_all();
  }
  void await(int count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return count_ >= count; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int count_ = 0;
};

TEST(ParallelFor, CoversEachIndexOnce) {
  for (const int threads : {1, 2, 4, 7}) {
    const Threads set(threads);
    for (const int64_t count : {0, 1, 7, 1000, 100'003})
      for (const int64_t grain : {1, 16, 1'000'000}) {
        std::vector<std::atomic<int>> seen(static_cast<size_t>(count));
        parallel_for(count, grain, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) seen[size_t(i)] += 1;
        });
        for (const auto& times : seen) ASSERT_EQ(times, 1);
      }
  }
}

TEST(ParallelFor, ItsBlocksDoNotDependOnTheNumberOfThreads) {
  const auto blocks = [](int threads, int64_t count, int64_t grain) {
    const Threads set(threads);
    std::mutex mutex;
    std::set<std::pair<int64_t, int64_t>> seen;
    parallel_for(count, grain, [&](int64_t begin, int64_t end) {
      const std::lock_guard lock(mutex);
      seen.emplace(begin, end);
    });
    return seen;
  };
  for (const auto& [count, grain] : {std::pair<int64_t, int64_t>{1000, 7}, {100'003, 1}, {5, 100}, {64, 64}})
    for (const int threads : {2, 3, 8}) EXPECT_EQ(blocks(threads, count, grain), blocks(1, count, grain));
  EXPECT_EQ(blocks(2, 10, 4), (std::set<std::pair<int64_t, int64_t>>{{0, 4}, {4, 8}, {8, 10}}));
  EXPECT_EQ(int64_t(blocks(2, 100'003, 1).size()), (100'003 + 97) / 98);  // 98 indices: at most 1024 blocks
}

TEST(ParallelFor, RunsBlocksAtTheSameTime) {
  const Threads set(3);
  Count begun;
  // No block ends before all three have begun: on fewer threads this would not end.
  parallel_for(3, 1, [&](int64_t, int64_t) {
    begun.raise();
    begun.await(3);
  });
}

TEST(ParallelFor, AThreadThatIsHeldUpDelaysOnlyItsBlock) {
  const Threads set(2);
  for (const int64_t held : {0, 1, 50, 99}) {
    Count done;
    // One block waits for all the others: with blocks dealt out beforehand this would not end.
    parallel_for(100, 1, [&](int64_t begin, int64_t) {
      if (begin == held) done.await(99);
      done.raise();
    });
  }
}

TEST(ParallelFor, RethrowsAndCanBeUsedAgain) {
  for (const int threads : {1, 4}) {
    const Threads set(threads);
    for (int round = 0; round < 20; ++round)
      EXPECT_EQ(message_of([] {
                  parallel_for(100, 1, [](int64_t begin, int64_t) { check(begin != 37, "planted"); });
                }),
                "planted");
    std::atomic<int> calls = 0;
    parallel_for(100, 1, [&](int64_t, int64_t) { calls += 1; });
    EXPECT_EQ(calls, 100);
  }
}

TEST(ParallelFor, LoopsInsideABodyRunInPlace) {
  const Threads set(4);
  std::atomic<int> elsewhere = 0, calls = 0;
  parallel_for(8, 1, [&](int64_t, int64_t) {
    const auto outer = std::this_thread::get_id();
    parallel_for(8, 1, [&](int64_t, int64_t) {
      calls += 1;
      elsewhere += std::this_thread::get_id() != outer;
    });
  });
  EXPECT_EQ(calls, 64);
  EXPECT_EQ(elsewhere, 0);
}

TEST(ParallelFor, OneThreadKeepsLoopsInPlace) {
  const Threads set(4);
  const auto here = std::this_thread::get_id();
  std::atomic<int> elsewhere = 0;
  {
    const OneThread outer;
    { const OneThread inner; }
    parallel_for(64, 1, [&](int64_t, int64_t) { elsewhere += std::this_thread::get_id() != here; });
  }
  EXPECT_EQ(elsewhere, 0);
  Count begun;  // afterwards there are several again
  parallel_for(2, 1, [&](int64_t, int64_t) {
    begun.raise();
    begun.await(2);
  });
}

TEST(ParallelFor, SeveralThreadsStartLoopsAtOnce) {
  const Threads set(3);
  std::vector<std::thread> callers;
  std::vector<int64_t> sums(4, 0);
  for (size_t c = 0; c < sums.size(); ++c)
    callers.emplace_back([&sum = sums[c]] {
      for (int round = 0; round < 200; ++round) {
        std::atomic<int64_t> total = 0;
        parallel_for(50, 1, [&](int64_t begin, int64_t) { total += begin; });
        sum += total;
      }
    });
  for (std::thread& caller : callers) caller.join();
  for (const int64_t sum : sums) EXPECT_EQ(sum, 200 * 49 * 50 / 2);
}

TEST(ParallelFor, WorksInAForkedProcess) {
  const Threads set(3);
  for (int round = 0; round < 20; ++round) {
    parallel_for(100, 1, [](int64_t, int64_t) {});  // the pool's threads are about to sleep
    const pid_t child = ::fork();
    if (child == 0) {
      std::atomic<int64_t> total = 0;
      for (int loop = 0; loop < 10; ++loop)
        parallel_for(100, 1, [&](int64_t begin, int64_t) { total += begin; });
      ::_exit(total == 10 * 4950 ? 0 : 1);
    }
    int status = -1;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  }
}

TEST(CpuThreads, AreSetAndRefused) {
  const Threads set(5);
  EXPECT_EQ(cpu_threads(), 5);
  for (const int wrong : {0, -1, kMostThreads + 1})
    EXPECT_NE(message_of([&] { set_cpu_threads(wrong); }).find("expected 1 to 4096"), std::string::npos);
  EXPECT_EQ(cpu_threads(), 5);
}

TEST(CpuThreads, VariablesAreNumbers) {
  EXPECT_EQ(parse_threads("TESSERA_THREADS", "1"), 1);
  EXPECT_EQ(parse_threads("OMP_NUM_THREADS", "12,4"), 12);
  for (const char* wrong : {"0", "-2", "two", "4x", "1e3", " 4", "99999999999"})
    EXPECT_EQ(
        message_of([&] { parse_threads("TESSERA_THREADS", wrong); }),
        std::string("TESSERA_THREADS is \"") + wrong + "\"; expected a number of threads from 1 to 4096");
}

/// A copy of what Linux shows of control groups, mounted in /sys/fs/cgroup.
struct Groups : TemporaryFolder {
  /// The process is in `group` of version 2, of which `mounted` is the part that is seen.
  void join(const std::string& group, const std::string& mounted = "/") const {
    put("proc/self/cgroup", "0::" + group + "\n");
    put("proc/self/mountinfo", "31 23 0:28 " + mounted + " /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
  }
  int cpus() const { return cgroup_cpus(path()); }
};

TEST(CgroupCpus, OfVersionTwoAreTheLeastUpToTheRoot) {
  const Groups at;
  const std::string top = "sys/fs/cgroup/a.slice/";
  EXPECT_EQ(at.cpus(), 0);
  at.join("/a.slice/b.scope");
  EXPECT_EQ(at.cpus(), 0);
  at.put(top + "b.scope/cpu.max", "max 100000\n");
  EXPECT_EQ(at.cpus(), 0);
  at.put(top + "cpu.max", "350000 100000\n");
  EXPECT_EQ(at.cpus(), 4);
  at.put(top + "b.scope/cpu.max", "50000 100000\n");
  EXPECT_EQ(at.cpus(), 1);
}

TEST(CgroupCpus, OfAContainerWithoutItsOwnNamespaceAreAtTheRoot) {
  const Groups at;
  at.put("sys/fs/cgroup/cpu.max", "200000 100000\n");
  at.join("/docker/0123abcd", "/docker/0123abcd");
  EXPECT_EQ(at.cpus(), 2);
  at.join("/docker/0123abcd");  // the host's path, which is not there
  EXPECT_EQ(at.cpus(), 2);
}

TEST(CgroupCpus, OfVersionOneAreQuotaOverPeriod) {
  const Groups at;
  at.put("proc/self/cgroup", "5:memory:/m\n4:cpu,cpuacct:/c\n1:cpuset:/c\n0::/\n");
  at.put("proc/self/mountinfo",
         "35 31 0:32 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
         "36 31 0:33 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n");
  const std::string top = "sys/fs/cgroup/cpu,cpuacct/";
  at.put(top + "cpu.cfs_quota_us", "-1");
  at.put(top + "cpu.cfs_period_us", "100000");
  EXPECT_EQ(at.cpus(), 0);
  at.put(top + "c/cpu.cfs_quota_us", "150000");
  at.put(top + "c/cpu.cfs_period_us", "50000");
  EXPECT_EQ(at.cpus(), 3);
}

TEST(CgroupCpus, OfThisProcessAreAtLeastOne) {
  EXPECT_GE(usable_cpus(), 1);
  EXPECT_LE(usable_cpus(), kMostThreads);
}

}  // namespace
}  // namespace tessera
