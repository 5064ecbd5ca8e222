#include "comm/lane.h"

#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>

#if defined(TESSERA_WITH_CUDA)
#include "runtime/cuda.h"
#include "runtime/stream_scope.h"
#endif

namespace tessera::comm {
namespace {

/// A thread makes the calls. It has tensors of its own: those of the caller count their writers, which only
/// one thread may do.
class HostWay : public Lane::Way {
 public:
  explicit HostWay(const Communicator& communicator) : communicator_(communicator) {
    // Signals belong to the program's own threads.
    sigset_t all, before;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);
    thread_ = std::jthread([this] { serve(); });
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  ~HostWay() override {
    bool unfinished = false;
    {
      const std::lock_guard lock(mutex_);
      unfinished = !waiting_.empty();
      stop_ = true;
    }
    changed_.notify_all();
    // Else the thread might wait for ranks that wait for this one.
    if (unfinished) communicator_.fail("it ended while its gradients were being summed");
  }

  void post(Lane::Act act, const Tensor& x) override {
    {
      const std::lock_guard lock(mutex_);
      if (error_) return;  // nothing is done between a call that failed and join()
      waiting_.push_back({std::move(act), x, x.raw()});
    }
    changed_.notify_all();
  }

  void join() override {
    const auto start = std::chrono::steady_clock::now();
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return waiting_.empty(); });
    exposed_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (const std::exception_ptr error = std::exchange(error_, nullptr)) std::rethrow_exception(error);
  }

  double exposed_ms() const override { return exposed_ * 1e3; }

 private:
  struct Posted {
    Lane::Act act;
    Tensor x;  // keeps the memory
    void* data;
  };

  void serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return stop_ || !waiting_.empty(); });
      if (stop_) return;
      const Posted& posted = waiting_.front();  // stays there until it is done
      lock.unlock();
      std::exception_ptr error;
      try {
        run(posted);
      } catch (...) {
        error = std::current_exception();
      }
      lock.lock();
      waiting_.pop_front();
      if (error) {
        error_ = error;
        waiting_.clear();
      }
      changed_.notify_all();
    }
  }

  void run(const Posted& posted) {
    if (!scratch_.defined() || scratch_.dtype() != posted.x.dtype() || scratch_.count() < posted.x.count())
      scratch_ = Tensor::empty_packed({posted.x.count()}, posted.x.dtype(), Device::cpu());
    const Tensor copy = scratch_.slice(0, 0, posted.x.count());
    if (posted.x.count() > 0) std::memcpy(copy.raw(), posted.data, copy.bytes());
    posted.act(communicator_, copy);
    if (posted.x.count() > 0) std::memcpy(posted.data, copy.raw(), copy.bytes());
  }

  const Communicator communicator_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Posted> waiting_;  // the first one may be running
  std::exception_ptr error_;
  bool stop_ = false;
  double exposed_ = -1e-3;
  Tensor scratch_;
  std::jthread thread_;  // last: it uses all the others
};

#if defined(TESSERA_WITH_CUDA)

/// A stream of its own, whose blocks the GPU prefers to those of the computation: the links should not wait.
class StreamWay : public Lane::Way {
 public:
  StreamWay(const Communicator& communicator, Device device)
      : communicator_(communicator), device_(device), beside_(communicator.size() == 2), reached_(device) {
    device.activate();
    int least = 0, greatest = 0;
    check(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest));
    check(cudaEventCreate(&waits_));
    check(cudaEventCreate(&goes_on_));
  }
  ~StreamWay() override {
    cudaEventDestroy(waits_);
    cudaEventDestroy(goes_on_);
    cudaStreamDestroy(stream_);
  }

  void post(Lane::Act act, const Tensor& x) override {
    if (!beside_) {
      if (!posted_) mark(waits_);
      posted_ = true;
      return act(communicator_, x);
    }
    posted_ = true;
    reached_.record();
    reached_.block(stream_);
    const StreamScope scope(device_, stream_);
    act(communicator_, x);
  }

  void join() override {
    if (!posted_) return;
    posted_ = false;
    if (beside_) {
      mark(waits_);
      reached_.record(stream_);
      reached_.block(device_.stream());
    }
    mark(goes_on_);
    joined_ = true;
  }

  double exposed_ms() const override {
    if (!joined_) return -1;
    device_.synchronize();
    float elapsed = 0;
    check(cudaEventElapsedTime(&elapsed, waits_, goes_on_));
    return elapsed;
  }

 private:
  /// A point of time on the computation's stream; in a graph, of each of its launches.
  void mark(cudaEvent_t event) const {
    check(cudaEventRecordWithFlags(event, device_.stream(),
                                   device_.capturing() ? cudaEventRecordExternal : cudaEventRecordDefault));
  }

  const Communicator communicator_;
  const Device device_;
  const bool beside_;
  Event reached_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t waits_ = nullptr, goes_on_ = nullptr;
  bool posted_ = false, joined_ = false;
};

#endif

std::unique_ptr<Lane::Way> way_of(const Communicator& communicator, [[maybe_unused]] Device device) {
#if defined(TESSERA_WITH_CUDA)
  if (device.is_cuda()) return std::make_unique<StreamWay>(communicator, device);
#endif
  return std::make_unique<HostWay>(communicator);
}

}  // namespace

Lane::Lane(const Communicator& communicator, Device device) : way_(way_of(communicator, device)) {}
Lane::~Lane() = default;

namespace {

void check_packed(const char* call, const Tensor& x) {
  check(x.defined() && x.layout().is_packed(), call, " next to the computation: ", describe(x),
        " is not packed; give a range of an arena, or Tensor::empty_packed");
}

}  // namespace

void Lane::all_reduce(const Tensor& x) {
  check_packed("all_reduce", x);
  way_->post([](const Communicator& communicator, const Tensor& own) { communicator.all_reduce(own); }, x);
}

void Lane::reduce_parts(const Tensor& x, std::vector<int64_t> ends) {
  check_packed("reduce_parts", x);
  way_->post([ends = std::move(ends)](const Communicator& communicator,
                                      const Tensor& own) { communicator.reduce_parts(own, ends); },
             x);
}

void Lane::join() {
  way_->join();
}

double Lane::exposed_ms() const {
  return way_->exposed_ms();
}

}  // namespace tessera::comm
