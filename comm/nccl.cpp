#include "comm/nccl.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>

#include "comm/deadline.h"
#include "comm/ending_internal.h"
#include "comm/links.h"
#include "runtime/capture.h"
#include "runtime/has_cuda.h"

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
    load(library, "ncclReduce", reduce), load(library, "ncclGetVersion", version);
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

/// Messages between GPUs, and NCCL's own sum for two ranks.
class NcclLinks : public Links, public std::enable_shared_from_this<NcclLinks> {
 public:
  NcclLinks(const Communicator& host, Device device) : host_(host), device_(device) {
    device.activate();
    ncclUniqueId id{};
    if (host.rank() == 0) check_result(api().get_unique_id(&id), "ncclGetUniqueId");
    const Tensor bytes = Tensor::empty_packed({int64_t(sizeof(id))}, DType::u8, Device::cpu());
    std::memcpy(bytes.raw(), &id, sizeof(id));
    host.broadcast(bytes, 0);
    std::memcpy(&id, bytes.raw(), sizeof(id));
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    wait_until_issued(api().init(&comm_, host.size(), id, host.rank(), &config), "ncclCommInitRankConfig");
    host.barrier();
  }
  /// All ranks end it together: ncclCommDestroy and ncclCommAbort wait for the other ranks of the machine
  /// (NCCL API, "Communicator Creation and Management Functions"). After a failure, calls that still wait for
  /// another rank are aborted.
  ~NcclLinks() override {
    const bool together = all_end(host_);
    const bool ended = returns_in_time([comm = comm_, device = device_, together] {
      device.activate();  // NCCL restores the thread's current GPU, which must not be another one's
      if (together && finalized(comm))
        api().destroy(comm);
      else
        api().abort(comm);
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
    compare(call, ranks);
    keep_in_capture();
    if (std::ranges::all_of(transfers, [](const Transfer& t) { return t.bytes == 0; }) &&
        int(ranks.size()) == size())
      return host_.barrier();
    const cudaStream_t stream = device_.stream();
    check_result(api().group_start(), "ncclGroupStart");
    for (const Transfer& t : transfers)
      if (t.bytes > 0)
        check_result(t.direction == Transfer::Direction::send
                         ? api().send(t.data, t.bytes, ncclUint8, t.peer, comm_, stream)
                         : api().receive(t.data, t.bytes, ncclUint8, t.peer, comm_, stream),
                     "ncclSend or ncclRecv");
    wait_until_issued(api().group_end(), "ncclGroupEnd");
  }

  bool sum(const Call& call, const Tensor& x, std::span<const int> ranks) override {
    if (ranks.size() != 2 || size() != 2) return false;  // NCCL sums three and more in another order
    compare(call, ranks);
    keep_in_capture();
    wait_until_issued(api().all_reduce(x.raw(), x.raw(), size_t(x.count()), type_of(x.dtype()), ncclSum,
                                       comm_, device_.stream()),
                      "ncclAllReduce");
    return true;
  }

  bool sum_parts(const Call& call, std::span<const Tensor> parts, std::span<const int> ranks) override {
    if (ranks.size() != 2 || size() != 2) return false;
    compare(call, ranks);
    keep_in_capture();
    const cudaStream_t stream = device_.stream();
    check_result(api().group_start(), "ncclGroupStart");
    for (int root = 0; root < 2; ++root) {
      const Tensor& part = parts[size_t(root)];
      if (part.count() > 0)
        check_result(api().reduce(part.raw(), part.raw(), size_t(part.count()), type_of(part.dtype()),
                                  ncclSum, root, comm_, stream),
                     "ncclReduce");
    }
    wait_until_issued(api().group_end(), "ncclGroupEnd");
    return true;
  }

 private:
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

  /// Compares the call with those of the other ranks, on the host, before it is issued: mismatched NCCL
  /// kernels would hang.
  void compare(const Call& call, std::span<const int> ranks) {
    const std::pair number(call.communicator, call.number);
    const bool between_two = call.kind == Kind::send || call.kind == Kind::receive;
    if (between_two || int(ranks.size()) != size() || (number == compared_ && call.kind != Kind::barrier))
      return;
    compared_ = number;
    const Tensor all = Tensor::empty_packed({size() * int64_t(sizeof(Call))}, DType::u8, Device::cpu());
    const Tensor own = Tensor::empty_packed({int64_t(sizeof(Call))}, DType::u8, Device::cpu());
    std::memcpy(own.raw(), &call, sizeof(call));
    host_.all_gather(own, all);
    for (int r = 0; r < size(); ++r) {
      Call theirs;
      std::memcpy(&theirs, static_cast<const char*>(all.raw()) + size_t(r) * sizeof(Call), sizeof(Call));
      if (r != rank() && !call.agrees_with(theirs, rank(), r))
        fail_for(-1, disagreement(call, rank(), theirs, r));
    }
  }

  void check_result(ncclResult_t result, const char* what) const {
    check(result == ncclSuccess || result == ncclInProgress, "nccl: ", what, ": ", api().error_string(result),
          "; NCCL_DEBUG=WARN says more");
  }

  /// Waits until NCCL, in nonblocking mode, has issued the operation.
  void wait_until_issued(ncclResult_t result, const char* what) const {
    check_result(result, what);
    for (const Deadline deadline; result == ncclInProgress; std::this_thread::yield()) {
      check_result(api().async_error(comm_, &result), what);
      check_result(result, what);
      check(!deadline.passed(), "nccl: ", what, ": not done after ", deadline.seconds(), " s");
    }
  }

  const Communicator host_;
  const Device device_;
  ncclComm_t comm_ = nullptr;
  std::pair<uint64_t, uint64_t> compared_;  // communicator and number of the last call compared
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

Communicator connect_nccl(const Communicator& host, Device device) {
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

Communicator connect_nccl(const Communicator&, Device) {
  fail_at(Site::here(), nccl_lacks());
}

#endif

}  // namespace tessera::comm
