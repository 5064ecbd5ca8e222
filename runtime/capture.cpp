#include "runtime/capture.h"

#include <algorithm>
#include <utility>

#include "runtime/allocator.h"
#include "runtime/device_context.h"
#include "runtime/error.h"

#if defined(TESSERA_WITH_CUDA)
#include "runtime/cuda.h"
#endif

namespace tessera {
namespace {

thread_local CaptureSession* t_session = nullptr;

}  // namespace

CaptureSession::CaptureSession(Device device) : device_(device) {
  check(!t_session,
        "graph capture: a capture is already under way on this thread; captured steps do not nest");
  t_session = this;
  device.context_->capturing = true;
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

struct Captured::State {
  State(Device device, std::function<void()> body) : device(device), body(std::move(body)) {}

  Device device;
  std::function<void()> body;
  int calls = 0;
#if defined(TESSERA_WITH_CUDA)
  cudaGraphExec_t graph = nullptr;
  size_t nodes = 0;
  std::shared_ptr<MemoryPool> pool;
  std::vector<CaptureHook> hooks;

  void drop() {
    if (graph) {
      cudaStreamSynchronize(device.stream());  // a replay may still be running
      cudaGraphExecDestroy(graph);
    }
    graph = nullptr;
    nodes = 0;
    hooks.clear();
    pool.reset();
  }

  void capture() {
    device.synchronize();
    device.allocator().release_cached();  // what the eager call cached, the graph's pool will hold
    pool = device.allocator().make_pool();
    CaptureSession session(device);
    check(cudaStreamBeginCapture(device.stream(), cudaStreamCaptureModeRelaxed));
    device.allocator().activate_pool(pool);
    try {
      body();
      for (const CaptureHook& hook : session.hooks_) hook.capture_end();
    } catch (...) {
      device.allocator().activate_pool(nullptr);
      cudaGraph_t broken = nullptr;
      cudaStreamEndCapture(device.stream(), &broken);
      if (broken) cudaGraphDestroy(broken);
      cudaGetLastError();
      for (const CaptureHook& hook : session.hooks_)
        if (hook.failed) hook.failed();
      pool.reset();
      throw;
    }
    device.allocator().activate_pool(nullptr);
    cudaGraph_t captured = nullptr;
    check(cudaStreamEndCapture(device.stream(), &captured));
    check(cudaGraphGetNodes(captured, nullptr, &nodes));
    const cudaError_t code = cudaGraphInstantiate(&graph, captured, 0);
    cudaGraphDestroy(captured);
    check(code);
    hooks = std::move(session.hooks_);
  }

  void launch() {
    for (const CaptureHook& hook : hooks) hook.before_launch();
    check(cudaGraphLaunch(graph, device.stream()));
    for (const CaptureHook& hook : hooks) hook.after_launch();
  }
#endif
};

Captured::Captured(Device device, std::function<void()> body)
    : state_(std::make_unique<State>(device, std::move(body))) {}

Captured::Captured(Captured&&) noexcept = default;

Captured::~Captured() {
  if (state_) reset();
}

void Captured::reset() {
  state_->calls = 0;
#if defined(TESSERA_WITH_CUDA)
  state_->drop();
#endif
}

void Captured::operator()() {
  State& state = *state_;
  if (state.device.is_cpu() || state.calls == 0) {
    state.body();
    state.calls += 1;
    return;
  }
#if defined(TESSERA_WITH_CUDA)
  state.device.activate();
  if (!state.graph) state.capture();
  state.launch();
  state.calls += 1;
#endif
}

bool Captured::is_graph() const {
#if defined(TESSERA_WITH_CUDA)
  return state_->graph != nullptr;
#else
  return false;
#endif
}

size_t Captured::nodes() const {
#if defined(TESSERA_WITH_CUDA)
  return state_->nodes;
#else
  return 0;
#endif
}

}  // namespace tessera
