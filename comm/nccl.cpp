#include "comm/nccl.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include "comm/call_check.h"
#include "comm/deadline.h"
#include "comm/ending_internal.h"
#include "comm/links.h"
#include "runtime/capture.h"
#include "runtime/has_cuda.h"
#include "runtime/wait.h"

#if defined(TESSERA_WITH_CUDA) && __has_include(<nccl.h>)
#include <dlfcn.h>
#include <nccl.h>

#include "runtime/cuda.h"
#define TESSERA_WITH_NCCL
#endif

namespace tessera::comm {

#if defined(TESSERA_WITH_NCCL)

namespace {

/// The functions of the library.
struct Api {
  decltype(&ncclGetUniqueId) get_unique_id;
  decltype(&ncclCommInitRankConfig) init;
  decltype(&ncclCommGetAsyncError) async_error;
  decltype(&ncclCommAbort) abort;
  decltype(&ncclCommFinalize) finalize;
  decltype(&ncclCommDestroy) destroy;
  decltype(&ncclGetErrorString) error_string;
  decltype(&ncclGroupStart) group_start;
  decltype(&ncclGroupEnd) group_end;
  decltype(&ncclSend) send;
  decltype(&ncclRecv) receive;
  decltype(&ncclAllReduce) all_reduce;
  decltype(&ncclReduce) reduce;
  decltype(&ncclReduceScatter) reduce_scatter;
  decltype(&ncclGetVersion) version;
  std::string lacks;

  Api() {
    ::setenv("NCCL_NVLS_ENABLE", "0", 1);
    void* const library = ::dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
      lacks = std::string("NCCL cannot be loaded (") + ::dlerror() +
              "); install libnccl2, or name its folder in LD_LIBRARY_PATH";
      return;
    }
    load(library, "ncclGetUniqueId", get_unique_id), load(library, "ncclCommInitRankConfig", init);
    load(library, "ncclCommGetAsyncError", async_error), load(library, "ncclCommAbort", abort);
    load(library, "ncclCommFinalize", finalize), load(library, "ncclCommDestroy", destroy);
    load(library, "ncclGetErrorString", error_string), load(library, "ncclGroupStart", group_start);
    load(library, "ncclGroupEnd", group_end), load(library, "ncclSend", send);
    load(library, "ncclRecv", receive), load(library, "ncclAllReduce", all_reduce);
    load(library, "ncclReduce", reduce), load(library, "ncclReduceScatter", reduce_scatter);
    load(library, "ncclGetVersion", version);
  }

  template <class F>
  void load(void* library, const char* name, F& function) {
    function = reinterpret_cast<F>(::dlsym(library, name));
    if (!function) lacks = std::string("libnccl.so.2 has no ") + name + "; install NCCL 2.18 or newer";
  }
};

const Api& api() {
  static const Api loaded;
  return loaded;
}

ncclDataType_t type_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return ncclFloat64;
    case DType::f32:
      return ncclFloat32;
    case DType::bf16:
      return ncclBfloat16;
    case DType::f16:
      return ncclFloat16;
    default:
      return ncclUint8;
  }
}

/// A communicator of NCCL, which a thread may still be using when its owner is gone.
struct Handle {
  explicit Handle(Device device) : device(device) {}
  const Device device;
  ncclComm_t comm = nullptr;
  std::timed_mutex calling;         // held by the thread that is in a function of NCCL
  std::atomic<bool> ended = false;  // no function is called any more, but those that end it
};

void check_result(ncclResult_t result, const char* what) {
  check(result == ncclSuccess || result == ncclInProgress, "nccl: ", what, ": ", api().error_string(result),
        "; NCCL_DEBUG=WARN says more");
}

/// Aborts the communicator: kernels that wait for other ranks end. NCCL wants no thread in its functions then
/// (user guide, "Fault Tolerance"), so a call that is about to return is waited for. One that does not
/// return hangs, because the GPU's queue is full of work behind such a kernel or a rank does not connect: the
/// abort lets it go on.
void abort_calls(Handle& handle) {
  std::unique_lock lock(handle.calling, std::chrono::seconds(1));
  if (lock) lock.unlock();   // `ended` keeps others out; the abort may take as long as graphs live
  handle.device.activate();  // NCCL restores the thread's current GPU, which must not be another one's
  api().abort(handle.comm);
}

/// Throws the failure of the job as soon as there is one, while the host waits for a GPU and afterwards: what
/// the calls left on the GPU must not be read then, also when the communicator is gone.
class ResultsAreValid : public WaitObserver {
 public:
  explicit ResultsAreValid(const Communicator& host) : host_(host) {}
  void begins() noexcept override {
    const std::lock_guard lock(mutex_);
    if (host_) host_->call_check().send_now();
  }
  void ended() override {
    std::unique_lock lock(mutex_);
    if (!host_) fail_for(rank_, text_);
    const Communicator host = *host_;
    lock.unlock();
    host.call_check().confirm();
  }
  /// From now on every wait throws this failure.
  void keep(const RankFailure& failure) {
    const std::lock_guard lock(mutex_);
    rank_ = failure.rank(), text_ = failure.message();
    host_.reset();
  }

 private:
  std::mutex mutex_;
  std::optional<Communicator> host_;
  int rank_ = -1;
  std::string text_;
};

/// Messages between GPUs, and NCCL's own sum for two ranks.
class NcclLinks : public Links, public std::enable_shared_from_this<NcclLinks> {
 public:
  NcclLinks(const Communicator& host, Device device)
      : host_(host),
        device_(device),
        check_(host.call_check()),
        handle_(std::make_shared<Handle>(device)),
        valid_(std::make_shared<ResultsAreValid>(host)) {
    device.activate();
    ncclUniqueId id{};
    if (host.rank() == 0) check_result(api().get_unique_id(&id), "ncclGetUniqueId");
    const Tensor bytes = Tensor::empty_packed({int64_t(sizeof(id))}, DType::u8, Device::cpu());
    std::memcpy(bytes.raw(), &id, sizeof(id));
    host.broadcast(bytes, 0);
    std::memcpy(&id, bytes.raw(), sizeof(id));
    call_apart("ncclCommInitRankConfig", [id, size = host.size(), rank = host.rank()](Handle& handle) {
      ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
      config.blocking = 1;  // else each call starts a thread, 30 us and more
      return api().init(&handle.comm, size, id, rank, &config);
    });
    host.barrier();
    add_wait_observer(valid_);
    check_.on_failure(this, [handle = handle_, done = aborted_] {
      if (handle->ended.exchange(true)) return;
      std::thread([handle, done] {
        abort_calls(*handle);
        done->set_value();
      }).detach();
    });
  }
  /// All ranks end it together: ncclCommDestroy and ncclCommAbort wait for the other ranks of the machine
  /// (NCCL API, "Communicator Creation and Management Functions"). After a failure, calls that still wait for
  /// another rank are aborted.
  ~NcclLinks() override {
    const bool together = confirm_last_calls() && all_end(host_);
    check_.forget(this);
    end_results(together);
    const bool aborting = handle_->ended.exchange(true);  // by the thread of the comparison
    const bool ended = returns_in_time([handle = handle_, aborting, together, done = aborted_] {
      if (aborting) return done->get_future().wait();
      if (!together) return abort_calls(*handle);
      handle->device.activate();  // as in abort_calls()
      if (finalized(handle->comm))
        api().destroy(handle->comm);
      else
        api().abort(handle->comm);
    });
    if (ended) return;
    const std::string text =
        std::string("nccl: ") + (together ? "ncclCommFinalize or ncclCommDestroy" : "ncclCommAbort") +
        ": not done after " + std::to_string(int64_t(call_timeout())) + " s (TESSERA_COMM_SECONDS)";
    std::fprintf(stderr, "tessera: rank %d: %s\n", rank(), text.c_str());
    host_.fail(text);
    new Communicator(host_);  // leaked: its watch thread ends the process if something else also hangs
  }

  const char* name() const override { return "nccl"; }
  int rank() const override { return host_.rank(); }
  int size() const override { return host_.size(); }
  Device device() const override { return device_; }
  void fail(const std::string& cause) override { host_.fail(cause); }

  void exchange(const Call& call, std::span<const Transfer> transfers, std::span<const int> ranks) override {
    begin(call, ranks);
    if (std::ranges::all_of(transfers, [](const Transfer& t) { return t.bytes == 0; })) {
      if (int(ranks.size()) == size()) return check_.confirm();  // all ranks have made the call
      return call.kind == Kind::barrier ? meet(ranks) : void();
    }
    const auto issue = [stream = device_.stream()](const Handle& handle, std::span<const Transfer> all) {
      ncclResult_t result = api().group_start();
      for (const Transfer& t : all)
        if (t.bytes > 0 && result == ncclSuccess)
          result = t.direction == Transfer::Direction::send
                       ? api().send(t.data, t.bytes, ncclUint8, t.peer, handle.comm, stream)
                       : api().receive(t.data, t.bytes, ncclUint8, t.peer, handle.comm, stream);
      const ncclResult_t ended = api().group_end();
      return result == ncclSuccess ? ended : result;
    };
    if (connected_) return call_here("ncclSend or ncclRecv", [&](Handle& h) { return issue(h, transfers); });
    call_apart("ncclSend or ncclRecv", [issue, all = std::vector(transfers.begin(), transfers.end())](
                                           Handle& h) { return issue(h, all); });
  }

  bool sum(const Call& call, const Tensor& x, std::span<const int> ranks) override {
    if (ranks.size() != 2 || size() != 2) return false;  // NCCL sums three and more in another order
    begin(call, ranks);
    const auto issue = [data = x.raw(), count = size_t(x.count()), type = type_of(x.dtype()),
                        stream = device_.stream()](Handle& handle) {
      return api().all_reduce(data, data, count, type, ncclSum, handle.comm, stream);
    };
    connected_ ? call_here("ncclAllReduce", issue) : call_apart("ncclAllReduce", issue);
    return true;
  }

  bool sum_scatter(const Call& call, const Tensor& in, const Tensor& out,
                   std::span<const int> ranks) override {
    if (ranks.size() != 2 || size() != 2) return false;
    begin(call, ranks);
    scatter(in.raw(), out);
    return true;
  }

  bool sum_parts(const Call& call, std::span<const Tensor> parts, std::span<const int> ranks) override {
    if (ranks.size() != 2 || size() != 2) return false;
    begin(call, ranks);
    struct Part {
      std::byte* data;
      size_t count;
    };
    const auto part_of = [](const Tensor& x) {
      return Part{static_cast<std::byte*>(x.raw()), size_t(x.count())};
    };
    const std::array both{part_of(parts[0]), part_of(parts[1])};
    const auto type = type_of(parts[0].dtype());
    if (both[0].count == both[1].count && both[0].data + parts[0].bytes() == both[1].data) {
      scatter(both[0].data, parts[size_t(rank())]);
      return true;
    }
    const auto issue = [both, type, stream = device_.stream()](Handle& handle) {
      ncclResult_t result = api().group_start();
      for (int root = 0; root < 2; ++root)
        if (const Part& part = both[size_t(root)]; part.count > 0 && result == ncclSuccess)
          result = api().reduce(part.data, part.data, part.count, type, ncclSum, root, handle.comm, stream);
      const ncclResult_t ended = api().group_end();
      return result == ncclSuccess ? ended : result;
    };
    connected_ ? call_here("ncclReduce", issue) : call_apart("ncclReduce", issue);
    return true;
  }

 private:
  /// out = the sum of both ranks' elements of `from` at this rank's place.
  void scatter(const void* from, const Tensor& out) const {
    const auto issue = [from, to = out.raw(), count = size_t(out.count()), type = type_of(out.dtype()),
                        stream = device_.stream()](Handle& handle) {
      return api().reduce_scatter(from, to, count, type, ncclSum, handle.comm, stream);
    };
    connected_ ? call_here("ncclReduceScatter", issue) : call_apart("ncclReduceScatter", issue);
  }

  /// Calls without their numbers.
  struct Alike {
    bool operator()(Call a, Call b) const {
      a.number = b.number = 0;
      return std::memcmp(&a, &b, sizeof(Call)) < 0;
    }
  };

  /// ncclCommFinalize: waits until all operations are complete and connections are closed, so that
  /// ncclCommDestroy is local.
  static bool finalized(ncclComm_t comm) {
    ncclResult_t state = api().finalize(comm);
    for (; state == ncclInProgress; std::this_thread::yield())
      if (api().async_error(comm, &state) != ncclSuccess) return false;
    return state == ncclSuccess;
  }

  /// A graph that is being captured keeps these links: a communicator is not destroyed before all graphs that
  /// hold its calls are, for which NCCL would wait.
  void keep_in_capture() {
    CaptureSession* const session = CaptureSession::current();
    if (!session || session->state(this)) return;
    session->state(this) = shared_from_this();
    session->keep(shared_from_this());
  }

  /// Posts the call to be compared with those of the other ranks. A call like which there was none yet, and
  /// one that is captured, is compared before it is issued: the first may connect the ranks, for which NCCL
  /// blocks the host, and buffers of the second may be written by other ranks (NCCL_GRAPH_REGISTER). Any
  /// other call is issued at once. Its kernels write within the results that this rank gave, whatever the
  /// others called; if they wait for ever, the comparison fails the job, which aborts them.
  void begin(const Call& call, std::span<const int> ranks) {
    keep_in_capture();
    const std::pair number(call.communicator, call.number);
    const bool between_two = call.kind == Kind::send || call.kind == Kind::receive;
    if (!between_two && number == last_ && call.kind != Kind::barrier) return;  // a further part of the call
    if (!between_two) last_ = number;
    connected_ = !device_.capturing() && !is_new(call);
    if (between_two || int(ranks.size()) != size()) return check_failure();
    check_.post(call);
    if (!connected_) check_.confirm();
  }
  bool is_new(const Call& call) {
    constexpr size_t kMost = 4096;  // kinds and shapes; then they begin again
    if (made_.size() == kMost) made_.clear();
    return made_.insert(call).second;
  }

  /// A barrier of some of the ranks, whose calls are not compared: messages on the host to the first of them,
  /// and back.
  void meet(std::span<const int> ranks) const {
    const Tensor message = Tensor::zeros({1}, DType::u8, Device::cpu());
    const auto others = ranks.subspan(1);
    if (rank() != ranks[0]) {
      host_.send(message, ranks[0]);
      return host_.receive(message, ranks[0]);
    }
    for (const int other : others) host_.receive(message, other);
    for (const int other : others) host_.send(message, other);
  }

  void check_failure() const {
    if (check_.failed()) check_.confirm();
  }

  /// f is a call whose connections exist, so it only enqueues.
  template <class F>
  void call_here(const char* what, F&& f) const {
    std::unique_lock lock(handle_->calling);
    if (handle_->ended) {
      lock.unlock();
      return check_.confirm();  // throws
    }
    throw_cause(f(*handle_), what, lock);
  }

  /// f may block until other ranks connect: it runs on a thread of its own, and this one waits until it has
  /// returned, the job has failed, or the deadline.
  void call_apart(const char* what, std::function<ncclResult_t(Handle&)> f) const {
    std::packaged_task<ncclResult_t()> task([handle = handle_, f = std::move(f)] {
      const std::lock_guard lock(handle->calling);
      if (handle->ended) return ncclInvalidUsage;
      handle->device.activate();
      return f(*handle);
    });
    std::future<ncclResult_t> done = task.get_future();
    std::thread(std::move(task)).detach();
    for (const Deadline deadline;
         done.wait_for(std::chrono::milliseconds(10)) != std::future_status::ready;) {
      check_failure();
      check(!deadline.passed(), "nccl: ", what, ": not done after ", deadline.seconds(), " s");
    }
    std::unique_lock lock(handle_->calling);
    throw_cause(done.get(), what, lock);
  }

  /// An error of NCCL is mostly due to another rank, whose failure says more and comes at about the same
  /// time.
  void throw_cause(ncclResult_t result, const char* what, std::unique_lock<std::timed_mutex>& lock) const {
    // NCCL_COMM_BLOCKING=0 in the environment makes calls return before they are enqueued.
    for (const Deadline deadline; result == ncclInProgress; std::this_thread::yield()) {
      check_result(api().async_error(handle_->comm, &result), what);
      check(!deadline.passed(), "nccl: ", what, ": not done after ", deadline.seconds(), " s");
    }
    if (result == ncclSuccess) return;
    lock.unlock();
    check_.throw_failure_within(kPatience);
    check_result(result, what);
  }

  /// Whether the last calls were those of all ranks. The program does not learn it any more if not: the error
  /// is printed.
  bool confirm_last_calls() noexcept {
    if (std::uncaught_exceptions() > 0) return true;  // all_end() tells the others
    const bool unknown = !check_.failed() && !check_.confirmed();
    try {
      check_.confirm();
      return true;
    } catch (const std::exception& error) {
      if (unknown) std::fprintf(stderr, "tessera: rank %d: %s\n", rank(), message_of(error).c_str());
      return false;
    }
  }

  /// After a failure what the calls computed is never valid.
  void end_results(bool together) noexcept {
    if (!together) try {
        check_.throw_failure_within(kPatience);
      } catch (const RankFailure& failure) {
        return valid_->keep(failure);
      } catch (const std::exception&) {
      }
    remove_wait_observer(valid_.get());
  }

  static constexpr double kPatience = 3;  // seconds until a failure elsewhere is known here

  const Communicator host_;
  const Device device_;
  CallCheck& check_;  // of host_
  const std::shared_ptr<Handle> handle_;
  const std::shared_ptr<std::promise<void>> aborted_ = std::make_shared<std::promise<void>>();
  const std::shared_ptr<ResultsAreValid> valid_;
  std::pair<uint64_t, uint64_t> last_;  // communicator and number of the last call
  bool connected_ = false;              // it needs no further connections
  std::set<Call, Alike> made_;
};

}  // namespace

std::string nccl_lacks() {
  return api().lacks;
}

std::string nccl_version() {
  int code = 0;
  if (!api().lacks.empty() || api().version(&code) != ncclSuccess) return "";
  return std::to_string(code / 10000) + "." + std::to_string(code / 100 % 100) + "." +
         std::to_string(code % 100);
}

std::string gpu_uuid(Device device) {
  if (device.is_cpu()) return "";
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, device.index()));
  std::string text = "GPU";
  for (size_t i = 0; i < sizeof(properties.uuid.bytes); ++i) {
    const auto byte = uint8_t(properties.uuid.bytes[i]);
    if (i == 0 || i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    for (const int digit : {byte >> 4, byte & 15}) text += "0123456789abcdef"[digit];
  }
  return text;
}

Communicator connect_nccl(const Communicator& host, Device device) {
  if (host.size() == 1) return Communicator();
  check(api().lacks.empty(), api().lacks);
  return Communicator(make_host_transport(std::make_shared<NcclLinks>(host, device)));
}

#else

std::string nccl_lacks() {
  return kCuda ? "this build was made without nccl.h; install libnccl-dev and build again"
               : "this build has no CUDA; build it with a CUDA toolkit";
}

std::string nccl_version() {
  return "";
}

std::string gpu_uuid(Device) {
  return "";
}

Communicator connect_nccl(const Communicator&, Device) {
  fail_at(Site::here(), nccl_lacks());
}

#endif

}  // namespace tessera::comm
