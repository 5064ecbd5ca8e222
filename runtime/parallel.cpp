#include "runtime/parallel.h"

#include <pthread.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/cpu_count_internal.h"
#include "runtime/error.h"
#include "runtime/interrupt.h"

namespace tessera {
namespace {

/// How long a thread without work polls before it sleeps. A training step on the CPU starts a loop every 10
/// to 100 us; waking a sleeping thread takes about as long. Longer polling takes the core from other
/// processes for nothing.
constexpr std::chrono::microseconds kPolling{20};

constexpr int kMostRanges = 16;  // of blocks that threads begin with; more threads share them

std::atomic<int> thread_count = 0;  // 0: not determined yet

void pause_core() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// Polls until `ready()` or for kPolling. Returns the last answer.
template <class Ready>
bool poll(Ready ready) {
  const auto end = std::chrono::steady_clock::now() + kPolling;
  do {
    for (int i = 0; i < 16; ++i) {
      if (ready()) return true;
      pause_core();
    }
  } while (std::chrono::steady_clock::now() < end);
  return ready();
}

/// One parallel loop, in shared ownership: a worker that joins late finds no block left and simply drops it.
struct Loop {
  void (*const call)(const void* body, int block);
  const void* const body;  // owned by the caller; valid only while a block is claimed
  const int blocks;
  int worker_slots;  // workers that may still join; guarded by the pool's mutex
  /// Each thread starts with its own range of blocks, the same in every loop (consecutive loops mostly touch
  /// the same rows, which are then in its cache), and afterwards steals from the other ranges.
  const int ranges;
  std::array<std::atomic<int>, kMostRanges> next;
  std::atomic<int> left;
  std::atomic<bool> failed = false;
  std::exception_ptr error;
  bool awaited = false;  // guarded by the pool's mutex
  std::condition_variable finished;

  Loop(int blocks_, void (*call_)(const void*, int), const void* body_, int worker_slots_)
      : call(call_),
        body(body_),
        blocks(blocks_),
        worker_slots(worker_slots_),
        ranges(std::min(worker_slots_ + 1, kMostRanges)),
        left(blocks_) {
    for (int range = 0; range < ranges; ++range)
      next[size_t(range)].store(end_of(range - 1), std::memory_order_relaxed);
  }

  int end_of(int range) const { return int(int64_t(blocks) * (range + 1) / ranges); }
  bool exhausted() const {
    for (int range = 0; range < ranges; ++range)
      if (next[size_t(range)].load(std::memory_order_relaxed) < end_of(range)) return false;
    return true;
  }
  bool done() const { return left.load(std::memory_order_acquire) == 0; }

  /// Claims blocks until none is left, as thread number `thread` of the pool. Returns whether this thread
  /// finished the last one.
  bool work(int thread) {
    int finished_here = 0;
    for (int i = 0; i < ranges; ++i) {
      const int range = (thread + i) % ranges, end = end_of(range);
      for (int block; (block = next[size_t(range)].fetch_add(1, std::memory_order_relaxed)) < end;
           ++finished_here) {
        if (failed.load(std::memory_order_relaxed)) continue;
        try {
          call(body, block);
        } catch (...) {
          if (!failed.exchange(true)) error = std::current_exception();
        }
      }
    }
    return finished_here > 0 && left.fetch_sub(finished_here, std::memory_order_acq_rel) == finished_here;
  }
};

class Pool {
 public:
  /// `before`: the pool of the parent process after a fork; its threads do not exist in this one.
  explicit Pool(const Pool* before = nullptr) : before_(before) {}

  /// Calls call(body, block) for all blocks, on this thread and up to threads - 1 workers.
  void run(int blocks, void (*call)(const void*, int), const void* body, int threads) {
    const auto loop = std::make_shared<Loop>(blocks, call, body, std::min(threads, blocks) - 1);
    int wake = 0;
    {
      const std::lock_guard lock(mutex_);
      start_workers(threads - 1);
      prune();
      open_.push_back(loop);
      posted_.fetch_add(1, std::memory_order_release);
      wake = std::clamp(loop->worker_slots - polling_.load(std::memory_order_relaxed) - waking_, 0,
                        sleeping_ - waking_);
      waking_ += wake;
    }
    for (; wake > 0; --wake) wake_.notify_one();
    {
      const OneThread nested;  // loops nested in the body run inline
      loop->work(0);
    }
    if (!poll([&] { return loop->done(); })) {
      std::unique_lock lock(mutex_);
      loop->awaited = true;
      loop->finished.wait(lock, [&] { return loop->done(); });
    }
    if (loop->error) std::rethrow_exception(loop->error);
  }

 private:
  /// Called under the mutex.
  void start_workers(int count) {
    if (started_ >= count) return;
    int failure = 0;
    try {
      const WithoutSignals scope;
      for (; started_ < count; ++started_)
        std::thread([this, thread = started_ + 1] { serve(thread); }).detach();
    } catch (const std::system_error& error) {
      failure = error.code().value();
    }
    check(failure == 0, "parallel loop: thread ", started_ + 2, " of ", count + 1, " cannot be started (",
          std::generic_category().message(failure), "); set TESSERA_THREADS to fewer threads");
  }

  /// Forgets loops that no worker can join any more. Called under the mutex.
  void prune() {
    std::erase_if(open_, [](const auto& loop) { return loop->worker_slots == 0 || loop->exhausted(); });
  }

  /// A loop with blocks and a worker slot left, which it takes, or null. Called under the mutex.
  std::shared_ptr<Loop> join() {
    prune();
    if (open_.empty()) return nullptr;
    open_.front()->worker_slots -= 1;
    return open_.front();
  }

  /// Thread number `thread`, from 1; the caller of a loop is 0.
  [[noreturn]] void serve(int thread) {
    const OneThread nested;
    std::unique_lock lock(mutex_);
    for (;;) {
      std::shared_ptr<Loop> loop = join();
      if (!loop) {
        const uint32_t seen = posted_.load(std::memory_order_relaxed);
        lock.unlock();
        polling_.fetch_add(1, std::memory_order_relaxed);
        poll([&] { return posted_.load(std::memory_order_acquire) != seen; });
        polling_.fetch_sub(1, std::memory_order_relaxed);
        lock.lock();
        loop = join();
      }
      if (!loop) {
        sleeping_ += 1;
        do {
          wake_.wait(lock);
          waking_ = std::max(0, waking_ - 1);  // a wait may also end by itself
        } while (!(loop = join()));
        sleeping_ -= 1;
      }
      lock.unlock();
      const bool last = loop->work(thread);
      lock.lock();
      if (last && loop->awaited) loop->finished.notify_one();
    }
  }

  const Pool* const before_;  // keeps the old pool reachable (leak checkers)
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::shared_ptr<Loop>> open_;
  std::atomic<uint32_t> posted_ = 0;  // changes when a loop is opened
  std::atomic<int> polling_ = 0;      // workers that poll and need not be woken
  int started_ = 0, sleeping_ = 0, waking_ = 0;
};

std::atomic<Pool*> current_pool = nullptr;

/// Never destroyed: its threads sleep until the process ends.
Pool& pool() {
  static const bool ready = [] {
    current_pool = new Pool;
    ::pthread_atfork(nullptr, nullptr, [] { current_pool = new Pool(current_pool); });
    return true;
  }();
  (void)ready;
  return *current_pool;
}

/// Throws if TESSERA_THREADS is invalid. An invalid OMP_NUM_THREADS is ignored with a warning, since it is
/// OpenMP's variable and OpenMP ignores it too.
int configured_threads() {
  constexpr const char* kOurs = "TESSERA_THREADS";
  constexpr const char* kOfOpenMp = "OMP_NUM_THREADS";
  if (const char* const text = std::getenv(kOurs); text && *text) return parse_threads(kOurs, text);
  const char* const text = std::getenv(kOfOpenMp);
  if (!text || !*text) return usable_cpus();
  try {
    return parse_threads(kOfOpenMp, text);
  } catch (const Error& error) {
    const int threads = usable_cpus();
    std::fprintf(stderr, "tessera: warning: %s; it is ignored, and %d threads are used\n",
                 error.message().c_str(), threads);
    return threads;
  }
}

}  // namespace

int cpu_threads() {
  int threads = thread_count.load(std::memory_order_relaxed);
  if (threads == 0) {
    const int found = configured_threads();
    if (thread_count.compare_exchange_strong(threads, found)) threads = found;
  }
  return threads;
}

void set_cpu_threads(int threads) {
  check(threads >= 1 && threads <= kMostThreads, "set_cpu_threads: ", threads, " threads; expected 1 to ",
        kMostThreads);
  thread_count = threads;
}

void parallel::run_blocks(int blocks, void (*call)(const void* body, int block), const void* body) {
  const int threads = OneThread::active() ? 1 : cpu_threads();
  if (threads > 1) return pool().run(blocks, call, body, threads);
  for (int block = 0; block < blocks; ++block) call(body, block);
}

}  // namespace tessera
