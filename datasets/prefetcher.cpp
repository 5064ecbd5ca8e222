#include "datasets/prefetcher.h"

#include <chrono>

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "runtime/error.h"

namespace tessera::datasets {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace

Prefetcher::Prefetcher(int workers, int depth) : workers_(size_t(workers)), depth_(uint64_t(depth)) {
  check(workers >= 1 && depth >= 1, "loader: ", workers, " workers and a depth of ", depth,
        "; both must be at least 1");
}

Prefetcher::~Prefetcher() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  work_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Prefetcher::start(Produce produce, uint64_t first, uint64_t end) {
  std::map<uint64_t, Slot> dropped;  // freed outside the lock
  {
    const std::lock_guard lock(mutex_);
    produce_ = std::make_shared<const Produce>(std::move(produce));
    run_ += 1;
    made_ = delivered_ = first;
    end_ = end;
    dropped.swap(slots_);
  }
  while (threads_.size() < workers_) threads_.emplace_back([this] { work(); });
  work_.notify_all();
}

void Prefetcher::work() {
#if defined(_OPENMP)
  omp_set_num_threads(1);  // of this thread alone: a worker is one core, more cores are more workers
#endif
  std::unique_lock lock(mutex_);
  for (;;) {
    work_.wait(lock, [&] { return stop_ || (made_ < end_ && made_ < delivered_ + depth_); });
    if (stop_) return;
    const uint64_t number = made_++, run = run_;
    const std::shared_ptr<const Produce> produce = produce_;
    lock.unlock();
    const Clock::time_point begun = Clock::now();
    Slot slot;
    try {
      slot.thing = (*produce)(number);
    } catch (...) {
      slot.error = std::current_exception();
    }
    const double seconds = seconds_since(begun);
    lock.lock();
    stats_.work_seconds += seconds;
    if (run != run_) continue;
    slots_.emplace(number, std::move(slot));
    ready_.notify_one();
  }
}

std::shared_ptr<void> Prefetcher::next() {
  const Clock::time_point begun = Clock::now();
  std::unique_lock lock(mutex_);
  check(delivered_ < end_, "loader: there is nothing behind batch ", end_);
  ready_.wait(lock, [&] { return slots_.contains(delivered_); });
  Slot slot = std::move(slots_.extract(delivered_).mapped());
  delivered_ += 1;
  stats_.batches += 1;
  stats_.wait_seconds += seconds_since(begun);
  lock.unlock();
  work_.notify_one();
  if (slot.error) std::rethrow_exception(slot.error);
  return std::move(slot.thing);
}

LoaderStats Prefetcher::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

}  // namespace tessera::datasets
