#include "comm/lane.h"

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/call_site.h"
#include "runtime/interrupt.h"

#if defined(TESSERA_WITH_CUDA)
#include "runtime/cuda.h"
#include "runtime/stream_scope.h"
#endif

namespace tessera::comm {
namespace {

/// Makes the calls on a worker thread, with tensors of its own: a tensor's storage counts in-place writes,
/// which only one thread may do.
class ThreadBackend : public Lane::Backend {
 public:
  explicit ThreadBackend(const Communicator& communicator) : communicator_(communicator) {
    const WithoutSignals scope;
    thread_ = std::jthread([this] { serve(); });
  }

  ~ThreadBackend() override {
    bool unfinished = false;
    {
      const std::lock_guard lock(mutex_);
      unfinished = !waiting_.empty();
      stop_ = true;
    }
    changed_.notify_all();
    communicator_.keep_to({});
    // Else the thread might wait for ranks that wait for this one.
    if (unfinished) communicator_.fail("it ended while its gradients were being summed");
  }

  void post(Lane::Collective collective, const Tensor& x, const Lane::Target& target) override {
    Posted posted{std::move(collective), x, x.raw(), CallScope::current()};
    if (target.tensor.defined())
      posted.target = target.tensor, posted.begin = target.begin, posted.to = target.tensor.raw();
    {
      const std::lock_guard lock(mutex_);
      if (error_) return;  // after a call has failed, calls are dropped until join()
      communicator_.keep_to(thread_.get_id());
      waiting_.push_back(std::move(posted));
    }
    changed_.notify_all();
  }

  void wait(size_t calls) override {
    const auto start = std::chrono::steady_clock::now();
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return error_ || done_ >= calls; });
    waited_ += seconds_since(start);
    if (error_) std::rethrow_exception(error_);
  }

  void join() override {
    const auto start = std::chrono::steady_clock::now();
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return waiting_.empty(); });
    communicator_.keep_to({});
    exposed_ = std::exchange(waited_, 0) + seconds_since(start);
    done_ = 0;
    if (const std::exception_ptr error = std::exchange(error_, nullptr)) std::rethrow_exception(error);
  }

  double exposed_ms() const override { return exposed_ * 1e3; }

 private:
  struct Posted {
    Lane::Collective collective;
    Tensor x;  // keeps the memory
    void* data;
    CallSite call;       // of the thread that posted it, for messages
    Tensor target = {};  // likewise
    int64_t begin = 0;
    void* to = nullptr;
  };

  static double seconds_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }

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
      done_ += 1;
      if (error) {
        error_ = error;
        waiting_.clear();
      }
      changed_.notify_all();
    }
  }

  void run(const Posted& posted) {
    const CallScope scope(posted.call);
    if (!scratch_.defined() || scratch_.dtype() != posted.x.dtype() || scratch_.count() < posted.x.count())
      scratch_ = Tensor::empty_packed({posted.x.count()}, posted.x.dtype(), Device::cpu());
    const Tensor copy = scratch_.slice(0, 0, posted.x.count());
    if (posted.x.count() > 0) std::memcpy(copy.raw(), posted.data, copy.bytes());
    posted.collective(communicator_, copy);
    if (posted.to)
      std::memcpy(posted.to,
                  static_cast<const char*>(copy.raw()) + posted.begin * int64_t(size_of(copy.dtype())),
                  posted.target.bytes());
    else if (posted.x.count() > 0 && !posted.target.defined())
      std::memcpy(posted.data, copy.raw(), copy.bytes());
  }

  const Communicator communicator_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Posted> waiting_;  // the first one may be running
  std::exception_ptr error_;
  bool stop_ = false;
  size_t done_ = 0;  // calls since the last join()
  double waited_ = 0, exposed_ = -1e-3;
  Tensor scratch_;
  std::jthread thread_;  // last: it uses all the others
};

#if defined(TESSERA_WITH_CUDA)

/// Issues the calls to a separate high-priority stream, so that communication kernels are scheduled before
/// compute kernels.
class StreamBackend : public Lane::Backend {
 public:
  StreamBackend(const Communicator& communicator, Device device, bool peers)
      : communicator_(communicator),
        device_(device),
        overlaps_(peers || communicator.size() == 2),
        reached_(device) {
    device.activate();
    int least = 0, greatest = 0;
    check(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest));
  }
  ~StreamBackend() override {
    for (const auto& [from, to] : wait_events_) cudaEventDestroy(from), cudaEventDestroy(to);
    cudaStreamDestroy(stream_);
  }

  void post(Lane::Collective collective, const Tensor& x, const Lane::Target& target) override {
    if (posted_ == done_.size()) done_.emplace_back(device_);
    if (!overlaps_) {
      if (posted_++ == 0) mark(wait_event(0).first);
      return run(collective, x, target);
    }
    reached_.record();
    reached_.block(stream_);
    {
      const StreamScope scope(device_, stream_);
      run(collective, x, target);
    }
    done_[posted_++].record(stream_);
  }

  void wait(size_t calls) override {
    if (!overlaps_ || calls == 0) return;
    mark(wait_event(waits_).first);
    done_[calls - 1].block(device_.stream());
    mark(wait_event(waits_++).second);
  }

  void join() override {
    if (std::exchange(posted_, 0) == 0) return;
    if (overlaps_) {
      mark(wait_event(waits_).first);
      reached_.record(stream_);
      reached_.block(device_.stream());
    }
    mark(wait_event(waits_).second);
    last_wait_count_ = std::exchange(waits_, 0) + 1;
  }

  double exposed_ms() const override {
    if (last_wait_count_ == 0) return -1;
    device_.synchronize();
    double sum = 0;
    for (size_t i = 0; i < last_wait_count_; ++i) {
      float elapsed = 0;
      check(cudaEventElapsedTime(&elapsed, wait_events_[i].first, wait_events_[i].second));
      sum += elapsed;
    }
    return sum;
  }

 private:
  void run(const Lane::Collective& collective, const Tensor& x, const Lane::Target& target) const {
    collective(communicator_, x);
    if (const Tensor& to = target.tensor; to.defined() && to.count() > 0)
      to.detach().copy_from(x.detach().slice(0, target.begin, target.begin + to.count()));
  }
  /// Events around a wait of the compute stream: before it and after it.
  using EventPair = std::pair<cudaEvent_t, cudaEvent_t>;
  const EventPair& wait_event(size_t number) {
    if (number == wait_events_.size()) {
      EventPair made{};
      check(cudaEventCreate(&made.first));
      check(cudaEventCreate(&made.second));
      wait_events_.push_back(made);
    }
    return wait_events_[number];
  }
  /// Records an event on the compute stream; under capture as an external event node, so that every launch of
  /// the graph records it.
  void mark(cudaEvent_t event) const {
    check(cudaEventRecordWithFlags(event, device_.stream(),
                                   device_.capturing() ? cudaEventRecordExternal : cudaEventRecordDefault));
  }

  const Communicator communicator_;
  const Device device_;
  const bool overlaps_;
  Event reached_;
  cudaStream_t stream_ = nullptr;
  std::vector<Event> done_;             // by call since the last join()
  std::vector<EventPair> wait_events_;  // by wait since then; the last one is the join's
  size_t posted_ = 0, waits_ = 0;
  size_t last_wait_count_ = 0;  // of the last step
};

#endif

std::unique_ptr<Lane::Backend> make_backend(const Communicator& communicator, [[maybe_unused]] Device device,
                                            [[maybe_unused]] bool peers) {
#if defined(TESSERA_WITH_CUDA)
  if (device.is_cuda()) return std::make_unique<StreamBackend>(communicator, device, peers);
#endif
  return std::make_unique<ThreadBackend>(communicator);
}

}  // namespace

Lane::Lane(const Communicator& communicator, Device device, const PeerSums* peers)
    : rank_(communicator.rank()),
      peers_(peers),
      backend_(make_backend(communicator, device, peers != nullptr)) {}
Lane::~Lane() = default;

namespace {

void check_packed(const char* call, const Tensor& x) {
  check(x.defined() && x.layout().is_packed(), call, " next to the computation: ", describe(x),
        " is not packed; give a range of an arena, or Tensor::empty_packed");
}

}  // namespace

void Lane::post(Collective collective, const Tensor& x, const Target& target) {
  backend_->post(std::move(collective), x, target);
  posted_ += 1;
}

void Lane::all_reduce(const Tensor& x) {
  check_packed("all_reduce", x);
  if (peers_)
    return post([peers = peers_](const Communicator&, const Tensor& own) { peers->all_reduce(own); }, x, {});
  post([](const Communicator& communicator, const Tensor& own) { communicator.all_reduce(own, Site()); }, x,
       {});
}

void Lane::reduce_parts(const Tensor& x, std::vector<int64_t> ends) {
  check_packed("reduce_parts", x);
  if (peers_)
    return post([peers = peers_, ends = std::move(ends)](
                    const Communicator&, const Tensor& own) { peers->reduce_parts(own, ends); },
                x, {});
  post([ends = std::move(ends)](const Communicator& communicator,
                                const Tensor& own) { communicator.reduce_parts(own, ends, Site()); },
       x, {});
}

void Lane::reduce_parts(const Tensor& x, std::vector<int64_t> ends, const Tensor& own) {
  check_packed("reduce_parts", x), check_packed("reduce_parts", own);
  const int64_t begin = rank_ == 0 ? 0 : ends[size_t(rank_ - 1)];
  check(own.count() == ends[size_t(rank_)] - begin && own.dtype() == x.dtype(), "reduce_parts to ",
        describe(own), "; expected ", ends[size_t(rank_)] - begin, " elements of ", x.dtype());
  own.bump_version();
  post([ends = std::move(ends)](const Communicator& communicator,
                                const Tensor& copy) { communicator.reduce_parts(copy, ends, Site()); },
       x, {own, begin});
}

void Lane::wait(size_t calls) {
  check(calls <= posted(), "wait: ", calls, " of ", posted(), " calls");
  if (calls > joined_) backend_->wait(calls - joined_);
}

void Lane::join() {
  joined_ += std::exchange(posted_, 0);
  backend_->join();
}

double Lane::exposed_ms() const {
  return backend_->exposed_ms();
}

}  // namespace tessera::comm
