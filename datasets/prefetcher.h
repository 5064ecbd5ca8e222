#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace tessera::datasets {

struct LoaderStats {
  uint64_t batches = 0;     // delivered
  double wait_seconds = 0;  // that the consumer waited for them
  double work_seconds = 0;  // that workers spent making them, all threads together
};

/// Seconds of std::chrono::steady_clock.
double steady_seconds();

/// Worker threads that make numbered items ahead of a single consumer, which gets them in order, whatever the
/// number of threads. At most `depth` of them wait or are being made.
class Prefetcher {
 public:
  using Produce = std::function<std::shared_ptr<void>(uint64_t number)>;
  /// Throws unless workers and depth are at least 1. No thread starts before start(). `clock` gives the
  /// seconds that the statistics count; all threads call it.
  Prefetcher(int workers, int depth, std::function<double()> clock = steady_seconds);
  /// Waits for what is being made, then ends the threads.
  ~Prefetcher();
  Prefetcher(const Prefetcher&) = delete;

  /// Drops all items and starts making numbers [first, end) with `produce`, which runs on several threads at
  /// once.
  void start(Produce produce, uint64_t first, uint64_t end);
  /// The next one, in order; rethrows what `produce` threw for it, and the call after that gives the one
  /// after it. Throws at the end.
  std::shared_ptr<void> next();
  LoaderStats stats() const;

 private:
  struct Slot {
    std::shared_ptr<void> thing;
    std::exception_ptr error;
  };
  void work();

  const size_t workers_;
  const uint64_t depth_;
  const std::function<double()> clock_;
  mutable std::mutex mutex_;
  std::condition_variable work_, ready_;
  std::shared_ptr<const Produce> produce_;
  uint64_t run_ = 0;  // counts start(): what an earlier run made is dropped
  uint64_t made_ = 0, delivered_ = 0, end_ = 0;
  std::map<uint64_t, Slot> slots_;
  bool stop_ = false;
  LoaderStats stats_;
  std::vector<std::thread> threads_;
};

}  // namespace tessera::datasets
