#include "datasets/prefetcher.h"

#include <chrono>

#include "runtime/error.h"
#include "runtime/parallel.h"

namespace tessera::datasets {

double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Prefetcher::Prefetcher(int workers, int depth, std::function<double()> clock)
    : workers_(size_t(workers)), depth_(uint64_t(depth)), clock_(std::move(clock)) {
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
  const OneThread one;  // a worker is one core, more cores are more workers
  std::unique_lock lock(mutex_);
  for (;;) {
    work_.wait(lock, [&] { return stop_ || (made_ < end_ && made_ < delivered_ + depth_); });
    if (stop_) return;
    const uint64_t number = made_++, run = run_;
    const std::shared_ptr<const Produce> produce = produce_;
    lock.unlock();
    const double begun = clock_();
    Slot slot;
    try {
      slot.thing = (*produce)(number);
    } catch (...) {
      slot.error = std::current_exception();
    }
    const double seconds = clock_() - begun;
    lock.lock();
    stats_.work_seconds += seconds;
    if (run != run_) continue;
    slots_.emplace(number, std::move(slot));
    ready_.notify_one();
  }
}

std::shared_ptr<void> Prefetcher::next() {
  const double begun = clock_();
  std::unique_lock lock(mutex_);
  check(delivered_ < end_, "loader: there is no batch after batch ", end_);
  ready_.wait(lock, [&] { return slots_.contains(delivered_); });
  Slot slot = std::move(slots_.extract(delivered_).mapped());
  delivered_ += 1;
  stats_.batches += 1;
  stats_.wait_seconds += clock_() - begun;
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
