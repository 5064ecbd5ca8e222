#include "runtime/capture.h"

#include <algorithm>
#include <utility>

#include "runtime/allocator.h"
#include "runtime/capture_internal.h"
#include "runtime/device_context.h"
#include "runtime/error.h"
#include "runtime/stream_scope.h"

#if defined(TESSERA_WITH_CUDA)
#include "runtime/cuda.h"
#include "runtime/wait.h"
#endif

namespace tessera {
namespace {

thread_local CaptureSession* t_session = nullptr;

/// Graphs kept per body, one per state on entry; beyond that the least recently launched one is dropped, and
/// captured again when it is needed.
constexpr size_t kMostGraphs = 8;

#if defined(TESSERA_WITH_CUDA)
class CudaGraph : public Graph {
 public:
  CudaGraph(cudaGraph_t captured, Device device) : device_(device) {
    check(cudaGraphGetNodes(captured, nullptr, &nodes_));
    check(cudaGraphInstantiate(&graph_, captured, 0));
  }
  ~CudaGraph() override {
    // The memory that running launches read is about to be released: wait for them. Not while capturing,
    // where waiting would be an error; there the driver defers freeing until they are done.
    try {
      if (own_ && !is_capturing(own_)) wait_for_stream(own_, "the launches of a graph");
      for (const auto& fence : elsewhere_) wait_until([&] { return fence->done(); }, "the launch of a graph");
    } catch (const Error&) {  // the device does not answer: the graph is not destroyed under its launch
      return;
    }
    cudaGraphExecDestroy(graph_);
  }
  CudaGraph(const CudaGraph&) = delete;
  void launch() override {
    const StreamHandle stream = device_.stream();
    check(cudaGraphLaunch(graph_, stream));
    if (StreamScope::current(device_)) {
      std::erase_if(elsewhere_, [](const auto& fence) { return fence->done(); });
      if (auto fence = device_.fence()) elsewhere_.push_back(std::move(fence));
    } else {
      own_ = stream;
    }
  }
  size_t nodes() const override { return nodes_; }

 private:
  Device device_;
  StreamHandle own_ = nullptr;  // the compute stream, once it has a launch
  std::vector<std::shared_ptr<const Fence>>
      elsewhere_;  // the ends of launches on other streams, which may be gone
  cudaGraphExec_t graph_ = nullptr;
  size_t nodes_ = 0;
};

class CudaRecorder : public GraphRecorder {
 public:
  explicit CudaRecorder(Device device) : device_(device) {}
  void begin() override { check(cudaStreamBeginCapture(device_.stream(), cudaStreamCaptureModeRelaxed)); }
  std::unique_ptr<Graph> end() override {
    cudaGraph_t captured = nullptr;
    check(cudaStreamEndCapture(device_.stream(), &captured));
    const std::unique_ptr<CUgraph_st, void (*)(cudaGraph_t)> owner(
        captured, [](cudaGraph_t graph) { cudaGraphDestroy(graph); });
    return std::make_unique<CudaGraph>(captured, device_);
  }
  void abandon() noexcept override {
    if (is_capturing(device_.stream())) {
      cudaGraph_t broken = nullptr;
      cudaStreamEndCapture(device_.stream(), &broken);
      if (broken) cudaGraphDestroy(broken);
    }
    cudaGetLastError();
  }
  void copy(void* to, const void* from, size_t bytes) override {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, device_.stream()));
  }

 private:
  Device device_;
};
#endif

std::unique_ptr<GraphRecorder> recorder_of([[maybe_unused]] Device device) {
#if defined(TESSERA_WITH_CUDA)
  if (device.is_cuda()) return std::make_unique<CudaRecorder>(device);
#endif
  return nullptr;
}

void call(const std::function<void()>& function) {
  if (function) function();
}

}  // namespace

CaptureSession::CaptureSession(Device device) : device_(device) {
  check(!t_session,
        "graph capture: a capture is already in progress on this thread; captured steps do not nest");
  check(!device.context_->capturing.exchange(true), "graph capture: another thread is capturing on ",
        device.name(), "; capture one graph after the other");
  const StreamScope* const scope = StreamScope::current(device);
  device.context_->captured = scope ? scope->stream() : device.context_->stream;
  t_session = this;
}

CaptureSession::~CaptureSession() {
  t_session = nullptr;
  device_.context_->capturing = false;
}

CaptureSession* CaptureSession::current() {
  return t_session;
}

bool CaptureSession::add(CaptureHook hook) {
  for (const CaptureHook& known : hooks_)
    if (known.key == hook.key) return false;
  hooks_.push_back(std::move(hook));
  return true;
}

void CaptureSession::keep(std::shared_ptr<const void> thing) {
  kept_.push_back(std::move(thing));
}

struct Captured::State {
  /// The body as captured for one state on entry (see CaptureHook::still_matches).
  struct Variant {
    std::vector<std::shared_ptr<const void>> kept;
    std::vector<CaptureHook> hooks;
    std::vector<KeptBlock> results;  // tensors that the body left in handles outside
    struct Copy {
      void* to;
      const void* from;
      size_t bytes;
    };
    std::vector<Copy> copies;  // results to copy to the handles of a later variant
    std::unique_ptr<Graph> graph;
    uint64_t launched = 0;

    bool matches() const {
      return std::ranges::all_of(
          hooks, [](const CaptureHook& hook) { return !hook.still_matches || hook.still_matches(); });
    }
  };

  State(Device device, std::function<void()> body, std::unique_ptr<GraphRecorder> recorder)
      : device(device), body(std::move(body)), recorder(std::move(recorder)) {}

  Device device;
  std::function<void()> body;
  std::unique_ptr<GraphRecorder> recorder;  // null: every call runs the body
  uint64_t calls = 0;
  std::shared_ptr<MemoryPool> pool;
  std::vector<std::unique_ptr<Variant>> variants;
  const Variant* last = nullptr;  // launched

  void drop() {
    last = nullptr;
    variants.clear();
    pool.reset();
  }

  /// The copies that move an earlier variant's results to the tensors of a new one: the body leaves the same
  /// results in the same order. First assumes that only handles replaced by the new capture count; if that
  /// does not fit (copies of old handles keep memory in use), all of them.
  std::vector<Variant::Copy> copies(const Variant& from, const Variant& to) const {
    for (const bool replaced : {true, false}) {
      std::vector<KeptBlock> results;
      for (const KeptBlock& result : from.results)
        if (!replaced || !device.allocator().in_use(result)) results.push_back(result);
      const auto same = [](const KeptBlock& a, const KeptBlock& b) { return a.bytes == b.bytes; };
      if (!std::ranges::equal(results, to.results, same)) continue;
      std::vector<Variant::Copy> copies;
      for (size_t i = 0; i < results.size(); ++i)
        copies.push_back({to.results[i].data, results[i].data, results[i].bytes});
      return copies;
    }
    fail_at(Site::here(), "graph capture: the body leaves ", to.results.size(),
            " tensors in handles outside with the gradients as they are now; with those that it was captured "
            "with before it left ",
            from.results.size(),
            ", or others. Make tensors for the results before the first call, and copy into them "
            "(result.copy_from(...)) in the body");
  }

  Variant& capture() {
    device.synchronize();
    device.allocator().release_cached();  // what eager work cached, the graph's pool may need, and cannot use
    if (!pool) pool = device.allocator().make_pool();
    auto made = std::make_unique<Variant>();
    std::vector<std::vector<Variant::Copy>> copies_of_others;
    CaptureSession session(device);
    try {
      recorder->begin();
      device.allocator().activate_pool(pool);
      body();
      for (const CaptureHook& hook : session.hooks_) call(hook.capture_end);
      device.allocator().activate_pool(nullptr);
      made->graph = recorder->end();
      made->results = device.allocator().keep(pool);
      for (const auto& other : variants) copies_of_others.push_back(copies(*other, *made));
    } catch (...) {
      device.allocator().activate_pool(nullptr);
      if (!made->graph) recorder->abandon();
      for (const CaptureHook& hook : session.hooks_) call(hook.failed);
      if (variants.empty()) pool.reset();
      throw;
    }
    for (size_t i = 0; i < variants.size(); ++i) variants[i]->copies = std::move(copies_of_others[i]);
    made->hooks = std::move(session.hooks_);
    made->kept = std::move(session.kept_);
    if (variants.size() == kMostGraphs)
      variants.erase(std::ranges::min_element(variants, {}, [](const auto& one) { return one->launched; }));
    variants.push_back(std::move(made));
    return *variants.back();
  }

  void launch(Variant& variant) {
    for (const CaptureHook& hook : variant.hooks) call(hook.before_launch);
    variant.graph->launch();
    for (const Variant::Copy& copy : variant.copies) recorder->copy(copy.to, copy.from, copy.bytes);
    for (const CaptureHook& hook : variant.hooks) call(hook.after_launch);
    variant.launched = calls;
    last = &variant;
  }
};

Captured::Captured(Device device, std::function<void()> body)
    : Captured(device, std::move(body), recorder_of(device)) {}

Captured::Captured(Device device, std::function<void()> body, std::unique_ptr<GraphRecorder> recorder)
    : state_(std::make_unique<State>(device, std::move(body), std::move(recorder))) {
  check(state_->body != nullptr, "Captured: the body is empty");
}

Captured::Captured(Captured&&) noexcept = default;

Captured::~Captured() {
  if (state_) reset();
}

void Captured::reset() {
  state_->calls = 0;
  state_->drop();
}

void Captured::operator()() {
  check(state_ != nullptr, "Captured: it was moved from; call the one that it moved to");
  State& state = *state_;
  if (EagerScope::active()) reset();
  if (!state.recorder || state.calls == 0) {
    state.body();
    state.calls += 1;
    return;
  }
  state.device.activate();
  const auto found = std::ranges::find_if(state.variants, [](const auto& one) { return one->matches(); });
  state.launch(found != state.variants.end() ? **found : state.capture());
  state.calls += 1;
}

bool Captured::is_graph() const {
  return !state_->variants.empty();
}

size_t Captured::graphs() const {
  return state_->variants.size();
}

size_t Captured::nodes() const {
  return state_->last ? state_->last->graph->nodes() : 0;
}

}  // namespace tessera
