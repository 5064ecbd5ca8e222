#include <cuda.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ops/gemm/gemm_sm90_plan.h"
#include "ops/variant.h"
#include "ops/verify.h"
#include "runtime/capture.h"
#include "runtime/stream_scope.h"
#include "tests/errors.h"
#include "tests/ops/busy_gpu.h"
#include "tests/ops/example_op.h"
#include "tests/ops/guarded.h"

/// Operators next to other users of the GPU: with few free SMs, on two streams at once, on a stream that
/// another program captures; and inputs whose row padding stays as it is.

namespace tessera::ops {
namespace {

constexpr uint64_t kSeed = 20261122;

bool same_bits(const Tensor& a, const Tensor& b) {
  const Tensor x = a.packed().to(Device::cpu()).packed(), y = b.packed().to(Device::cpu()).packed();
  return x.bytes() == y.bytes() && (x.bytes() == 0 || std::memcmp(x.raw(), y.raw(), x.bytes()) == 0);
}

void expect_same_bits(const OpSpec& op, const Results& a, const Results& b) {
  ASSERT_EQ(a.outputs.size(), b.outputs.size());
  for (size_t n = 0; n < a.outputs.size(); ++n)
    EXPECT_TRUE(same_bits(a.outputs[n], b.outputs[n])) << "output " << op.outputs[n].name;
  for (size_t i = 0; i < a.gradients.size(); ++i) {
    if (a.gradients[i].defined())
      EXPECT_TRUE(same_bits(a.gradients[i], b.gradients[i])) << "d_" << op.inputs[i].name;
  }
}

constexpr int kWgmma = 2, kNarrow = 3;  // of gemm_variants()

/// One problem on one variant of the operator, its inputs on the GPU.
struct Work {
  const OpSpec* op;
  Attrs attrs;
  int row;  // -1: the operator's choice
  std::vector<Tensor> inputs, grads;
  std::string name;

  Results run() const {
    std::optional<ForceVariant> force;
    if (row >= 0) force.emplace(op->name, op->variants[size_t(row)]);
    return run_with_gradients(*op, inputs, attrs, grads);
  }
};

std::string name_of_case(const OpSpec& op, const Case& c, DType dtype, int row) {
  std::ostringstream name;
  name << op.name << " " << dtype << (row < 0 ? " chosen" : " variant " + op.variants[size_t(row)]);
  for (const auto& [key, value] : c.dims) name << " " << key << "=" << value;
  return name.str();
}

/// Fills `work`; false if the variant refuses the problem or its gradients.
bool make_work(const OpSpec& op, const Case& c, DType dtype, int row, Device gpu, Work& work) {
  work = {&op, complete(op, c.attrs), row, {}, {}, name_of_case(op, c, dtype, row)};
  work.inputs = make_inputs(op, op.problem(c.dims, work.attrs), work.attrs, c.placement, dtype, gpu, kSeed);
  try {
    work.grads = make_gradients(op, work.run().outputs, gpu, kSeed);
    work.run();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("needs"), std::string::npos) << error.what();
    return false;
  }
  return true;
}

/// The problems of an operator that these tests run: its small cases, and of its benchmark shapes those that
/// eight SMs do in some milliseconds.
std::vector<Case> problems(const OpSpec& op, bool benches) {
  std::vector<Case> some;
  // The small cases are those of gradcheck. An operator that none of them suits (its gradient is straight
  // through by definition, say) has small ones alone.
  const bool has_gradients = std::ranges::any_of(op.inputs, &InputSpec::has_gradient);
  const bool is_checked = has_gradients && std::ranges::any_of(op.cases, &Case::gradcheck);
  for (const Case& c : op.cases)
    if (c.gradcheck || !is_checked) some.push_back(c);
  if (!benches) return some;
  for (const Case& c : op.benches) {
    const Problem problem = op.problem(c.dims, complete(op, c.attrs));
    if (problem.forward_elements < 5e6 && problem.forward_flops < 6e10) some.push_back(c);
  }
  return some;
}

class OpStreams : public testing::TestWithParam<size_t> {
 protected:
  void SetUp() override {
    if (Device::cuda_count() == 0 || gpu().info().major != 9)
      GTEST_SKIP() << "skipped: no GPU of compute capability 9.0";
  }
  static Device gpu() { return Device::cuda(0); }
  const OpSpec& op() const { return tested_ops()[GetParam()]; }
};

/// A wait that never ends fails the test instead of hanging it.
struct WaitLimit {
  double before = wait_limit();
  WaitLimit() { set_wait_limit(90); }
  ~WaitLimit() { set_wait_limit(before); }
};

TEST_P(OpStreams, FinishesOnEightSmsWithTheBitsOfAnIdleGpu) {
  constexpr int kFree = 8;
  // All blocks of this one must run at once: it is told how many SMs there are.
  std::optional<StreamScope> scope;
  if (op().name.ends_with("decoder_layers"))
    scope.emplace(gpu(), gpu().stream(), StreamOptions{.multiprocessors = kFree});
  std::vector<std::pair<Work, Results>> idle;
  for (const Case& c : problems(op(), true))
    for (const DType dtype : op().cuda_dtypes)
      for (int row = -1; row < int(op().variants.size()); ++row) {
        Work work;
        if (!make_work(op(), c, dtype, row, gpu(), work)) continue;
        Results results = work.run();
        // Twice, so that the memory is there that the third run takes.
        expect_same_bits(op(), work.run(), results);
        idle.emplace_back(std::move(work), std::move(results));
      }
  gpu().synchronize();
  ASSERT_FALSE(idle.empty());
  const WaitLimit limit;
  const BusyGpu busy(gpu(), kFree);
  for (const auto& [work, expected] : idle) {
    SCOPED_TRACE(work.name);
    const Results results = work.run();
    gpu().synchronize();
    expect_same_bits(op(), results, expected);
  }
}

/// The bytes of a tensor's whole storage, padding included.
Tensor whole_storage(const Tensor& x) {
  return Tensor::view_of(x.storage(), Layout::packed({int64_t(x.storage()->bytes)}), DType::u8);
}
std::vector<uint8_t> bytes_of(const Tensor& x) {
  return whole_storage(x).to_vector<uint8_t>();
}

TEST_P(OpStreams, LeavesItsInputsAndTheirPaddingAsTheyAre) {
  std::vector<Precision> precisions(op().cuda_dtypes.begin(), op().cuda_dtypes.end());
  if (op().honours_f32_math) precisions.push_back({DType::f32, F32Math::tf32});
  for (const Case& c : problems(op(), false))
    for (const Precision precision : precisions)
      for (int row = -1; row < int(op().variants.size()); ++row) {
        const F32MathScope math(precision.math);
        gpu().allocator().set_guard(256);  // fresh memory, padding with it, is NaN
        Work work;
        const bool takes = make_work(op(), c, precision.dtype, row, gpu(), work);
        gpu().allocator().set_guard(0);
        if (!takes) continue;
        SCOPED_TRACE(work.name);
        std::vector<Tensor> read = work.inputs;
        read.insert(read.end(), work.grads.begin(), work.grads.end());
        // Padding that an earlier reader could have changed is poisoned again.
        std::vector<Tensor> copies;
        std::vector<std::vector<uint8_t>> before;
        for (const Tensor& x : read) {
          copies.push_back(x.defined() ? x.clone() : Tensor());
          if (x.defined() && x.storage()->pitch_bytes > 0) {
            whole_storage(x).fill(0xFF);
            x.copy_from(copies.back());
          }
          before.push_back(x.defined() ? bytes_of(x) : std::vector<uint8_t>());
        }
        work.run();
        for (size_t i = 0; i < read.size(); ++i) {
          // An operator that is given its input writes it, padding included.
          if (!read[i].defined() || !same_bits(read[i], copies[i])) continue;
          EXPECT_EQ(bytes_of(read[i]), before[i])
              << "tensor " << i << " of the inputs and gradients, " << describe(read[i]);
        }
      }
}

INSTANTIATE_TEST_SUITE_P(All, OpStreams, testing::Range<size_t>(0, tested_ops().size()),
                         [](const auto& info) { return tested_ops()[info.param].name; });

/// Problems whose blocks meet by counters.
std::vector<Work> meetings(Device gpu) {
  struct Chosen {
    const char* op;
    Dims dims;
    Attrs attrs;
    DType dtype;
    int row;
  };
  const std::vector<Chosen> list = {
      // Split-K with the sums of dy, and of a pair (mlp); narrow GEMMs; losses; dQ in the order of key tiles.
      {"linear", {{"B", 0}, {"T", 8192}, {"in", 512}, {"out", 384}, {"bias", 1}}, {}, DType::bf16, kWgmma},
      {"mlp", {{"B", 0}, {"T", 4000}, {"D", 512}, {"F", 1365}, {"E", 512}, {"bias", 0}}, {}, DType::bf16, -1},
      {"matmul",
       {{"A", 0}, {"B", 0}, {"M", 41}, {"N", 3}, {"K", 17920}},
       {{"transpose_a", true}},
       DType::bf16,
       kNarrow},
      {"matmul",
       {{"A", 0}, {"B", 0}, {"M", 41}, {"N", 3}, {"K", 17920}},
       {{"transpose_a", true}},
       DType::f32,
       kNarrow},
      {"cross_entropy", {{"R", 512}, {"V", 5003}}, {}, DType::bf16, -1},
      {"gmm_nll", {{"T", 8000}, {"K", 10}}, {}, DType::bf16, -1},
      {"attention", {{"B", 2}, {"Lq", 1024}, {"Lk", 1536}, {"H", 8}, {"D", 64}}, {}, DType::bf16, -1},
      {"attention",
       {{"B", 1}, {"Lq", 1024}, {"Lk", 1024}, {"H", 4}, {"D", 128}},
       {{"causal", true}},
       DType::bf16,
       -1},
  };
  std::vector<Work> works;
  for (const Chosen& chosen : list) {
    const OpSpec& op = find_op(chosen.op);
    const Case c{.dims = chosen.dims, .attrs = chosen.attrs};
    Work work;
    if (make_work(op, c, chosen.dtype, chosen.row, gpu, work)) works.push_back(std::move(work));
  }
  return works;
}

class Streams : public GuardedCuda<9> {
 protected:
  void SetUp() override {
    GuardedCuda<9>::SetUp();
    if (IsSkipped()) return;
    gpu().allocator().set_guard(0);  // bands are filled and read on the device's own stream
  }
  struct Stream {
    cudaStream_t handle = nullptr;
    Stream() { check(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking)); }
    ~Stream() {
      cudaStreamSynchronize(handle);
      cudaStreamDestroy(handle);
    }
  };
};

TEST_F(Streams, TheProblemsOfTheseTestsMeet) {
  EXPECT_EQ(meetings(gpu()).size(), 8u);
  Gemm g{.m = 384, .n = 512, .k = 8192, .in = DType::bf16, .out = DType::f32, .transpose_a = true};
  g.lda = 384, g.ldb = g.ldd = 512;
  EXPECT_GT(choose_gemm(g, Gpu(gpu())).splits, 1);
  EXPECT_GT(choose_gemm(g, Gpu(gpu().info(), gpu().multiprocessors() / 2)).splits, 1);
}

TEST_F(Streams, MeetingsFinishOnEightSmsWithTheBitsOfAnIdleGpu) {
  const std::vector<Work> works = meetings(gpu());
  std::vector<Results> idle;
  for (const Work& work : works) {
    idle.push_back(work.run());
    expect_same_bits(*work.op, work.run(), idle.back());  // the memory that the third run takes
  }
  // Every split of k: some meet in several rounds of tiles, and in pairs of blocks.
  std::vector<std::pair<Work, Results>> gradients;
  for (const int64_t k : {1024, 4096, 65536})
    for (const int64_t m : {256, 1365, 3072}) {
      Work work;
      ASSERT_TRUE(make_work(find_op("linear"),
                            {.dims = {{"B", 0}, {"T", k}, {"in", 768}, {"out", m}, {"bias", 1}}}, DType::bf16,
                            kWgmma, gpu(), work));
      Results results = work.run();
      expect_same_bits(*work.op, work.run(), results);
      gradients.emplace_back(std::move(work), std::move(results));
    }
  gpu().synchronize();
  // Blocks of a cluster run at the same time: on one SM such a kernel never starts.
  for (const int free : {8, 60, 131}) {
    const WaitLimit limit;
    const BusyGpu busy(gpu(), free);
    for (size_t n = 0; n < works.size(); ++n) {
      SCOPED_TRACE(works[n].name + " on " + std::to_string(free) + " SMs");
      const Results results = works[n].run();
      gpu().synchronize();
      expect_same_bits(*works[n].op, results, idle[n]);
    }
    for (const auto& [work, expected] : gradients) {
      SCOPED_TRACE(work.name + " on " + std::to_string(free) + " SMs");
      const Results results = work.run();
      gpu().synchronize();
      expect_same_bits(*work.op, results, expected);
    }
  }
}

TEST_F(Streams, TwoAtOnceGiveTheBitsOfOne) {
  const int half = gpu().multiprocessors() / 2;  // so that the kernels of both run side by side
  std::vector<Work> works = meetings(gpu());
  std::vector<Results> alone;
  {
    const StreamScope scope(gpu(), gpu().stream(), {.multiprocessors = half});
    for (const Work& work : works) alone.push_back(work.run());
  }
  gpu().synchronize();
  constexpr int kTimes = 8;
  std::vector<Results> results[2];
  {
    Stream streams[2];
    for (int time = 0; time < kTimes; ++time)
      for (size_t n = 0; n < works.size(); ++n)
        for (int which = 0; which < 2; ++which) {
          // The second one is a problem ahead: other kernels meet as well as the same.
          const size_t number = (n + size_t(which * time)) % works.size();
          const StreamScope scope(gpu(), streams[which].handle, {.multiprocessors = half});
          Results made = works[number].run();
          if (time + 1 == kTimes) {
            results[which].resize(works.size());
            results[which][number] = std::move(made);
          }
        }
  }
  for (int which = 0; which < 2; ++which)
    for (size_t n = 0; n < works.size(); ++n) {
      SCOPED_TRACE(works[n].name + ", stream " + std::to_string(which));
      expect_same_bits(*works[n].op, results[which][n], alone[n]);
    }
}

/// Another program's allocator: it hands out pieces of memory that it has, which a graph may keep.
class ForeignMemory {
 public:
  ForeignMemory() { check(cudaMalloc(&base_, kBytes)); }
  ~ForeignMemory() { cudaFree(base_); }
  MemorySource source(Device gpu) {
    return gpu.memory_of_another_program(
        [this](size_t bytes) -> void* {
          const size_t begin = used_;
          used_ += (bytes + 511) / 512 * 512;
          ++allocated;
          return used_ <= kBytes ? static_cast<char*>(base_) + begin : nullptr;
        },
        [this](void*) { ++released; });
  }
  int allocated = 0, released = 0;

 private:
  static constexpr size_t kBytes = size_t{3} << 30;
  void* base_ = nullptr;
  size_t used_ = 0;
};

/// A graph as another program captures it, in the strictest mode.
class ForeignGraph {
 public:
  template <class Body>
  ForeignGraph(cudaStream_t stream, Body&& body) {
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    body();
    cudaGraph_t captured = nullptr;
    check(cudaStreamEndCapture(stream, &captured));
    check(cudaGraphInstantiate(&graph_, captured, 0));
    check(cudaGraphDestroy(captured));
  }
  ~ForeignGraph() { cudaGraphExecDestroy(graph_); }
  void launch(cudaStream_t stream) { check(cudaGraphLaunch(graph_, stream)); }

 private:
  cudaGraphExec_t graph_ = nullptr;
};

TEST_F(Streams, AnotherProgramCapturesOperatorsAndReplaysTwoGraphsAtOnce) {
  const int half = gpu().multiprocessors() / 2;
  const std::vector<Work> works = meetings(gpu());
  std::vector<Results> alone;
  {
    const StreamScope scope(gpu(), gpu().stream(), {.multiprocessors = half});
    for (const Work& work : works) alone.push_back(work.run());
  }
  gpu().synchronize();
  ForeignMemory memory;
  {
    Allocator allocator(memory.source(gpu()));
    Stream streams[2];
    std::vector<Results> results[2];
    std::unique_ptr<ForeignGraph> graphs[2];
    for (int which = 0; which < 2; ++which)
      graphs[which] = std::make_unique<ForeignGraph>(streams[0].handle, [&] {
        const StreamScope scope(gpu(), streams[0].handle, {.allocator = &allocator, .multiprocessors = half});
        EXPECT_TRUE(gpu().capturing());
        for (const Work& work : works) results[which].push_back(work.run());
      });
    for (int time = 0; time < 4; ++time)
      for (int which = 0; which < 2; ++which) graphs[which]->launch(streams[which].handle);
    for (Stream& stream : streams) wait_for_stream(stream.handle, "graphs of another program");
    for (int which = 0; which < 2; ++which)
      for (size_t n = 0; n < works.size(); ++n) {
        SCOPED_TRACE(works[n].name + ", graph " + std::to_string(which));
        expect_same_bits(*works[n].op, results[which][n], alone[n]);
      }
  }
  EXPECT_GT(memory.allocated, 0);
  EXPECT_EQ(memory.allocated, memory.released) << "blocks are given back one by one";
}

TEST_F(Streams, ACaptureOfAnotherProgramNeedsItsMemory) {
  Stream stream;
  check(cudaStreamBeginCapture(stream.handle, cudaStreamCaptureModeGlobal));
  std::string said;
  {
    const StreamScope scope(gpu(), stream.handle);
    said = message_of([&] { Tensor::empty({4}, DType::f32, gpu()); });
    EXPECT_NE(message_of([&] { gpu().synchronize(); }).find("captured"), std::string::npos);
  }
  cudaGraph_t captured = nullptr;
  check(cudaStreamEndCapture(stream.handle, &captured));
  check(cudaGraphDestroy(captured));
  EXPECT_NE(said.find("StreamOptions::allocator"), std::string::npos) << said;
}

TEST_F(Streams, OurGraphsReplayOnOtherStreams) {
  std::vector<Work> works = meetings(gpu());
  std::vector<Results> alone, captured[2];
  for (const Work& work : works) alone.push_back(work.run());
  gpu().synchronize();
  std::optional<Captured> steps[2];
  for (int which = 0; which < 2; ++which) {
    steps[which].emplace(gpu(), [&, which] {
      captured[which].clear();
      for (const Work& work : works) captured[which].push_back(work.run());
    });
    for (int call = 0; call < 2; ++call) (*steps[which])();
    EXPECT_TRUE(steps[which]->is_graph());
  }
  gpu().synchronize();
  {
    Stream streams[2];
    for (int time = 0; time < 4; ++time)
      for (int which = 0; which < 2; ++which) {
        const StreamScope scope(gpu(), streams[which].handle);
        (*steps[which])();
      }
  }
  for (int which = 0; which < 2; ++which)
    for (size_t n = 0; n < works.size(); ++n) {
      SCOPED_TRACE(works[n].name + ", graph " + std::to_string(which));
      expect_same_bits(*works[n].op, captured[which][n], alone[n]);
    }
}

TEST_F(Streams, MemoryUsedByAnotherStreamIsNotReusedBeforeItsWorkEnds) {
  // A stream that waits for the host's word holds a copy of x; x is freed, and its memory asked for again.
  Stream stream;
  const int64_t count = 1 << 20;
  Tensor x = Tensor::full({count}, 3, DType::f32, gpu()), y = Tensor::empty({count}, DType::f32, gpu());
  // Memory for what is asked for meanwhile, and its kernels: for either the driver may wait for all work.
  { const Tensor spares[] = {Tensor::full({count}, 5, DType::f32, gpu()), x.clone(), Tensor::empty_like(x)}; }
  {
    const StreamScope scope(gpu(), stream.handle);
    y.copy_from(x);
    gpu().synchronize();
  }
  gpu().synchronize();
  unsigned* go = nullptr;
  check(cudaHostAlloc(reinterpret_cast<void**>(&go), sizeof(unsigned), cudaHostAllocMapped));
  *go = 0;
  check(cudaLaunchHostFunc(
      stream.handle,
      [](void* word) {
        while (*static_cast<volatile unsigned*>(word) == 0) continue;
      },
      go));
  void* at = nullptr;
  {
    const StreamScope scope(gpu(), stream.handle);
    y.copy_from(x);
    at = x.raw();
    x = Tensor();
  }
  for (const Tensor& other :
       {Tensor::full({count}, 5, DType::f32, gpu()), Tensor::full({count}, 5, DType::f32, gpu())})
    EXPECT_NE(other.raw(), at);
  gpu().synchronize();
  *static_cast<volatile unsigned*>(go) = 1;
  wait_for_stream(stream.handle, "a copy");
  EXPECT_EQ(y.to_vector<float>(), std::vector<float>(size_t(count), 3.0f));
  check(cudaFreeHost(go));
}

TEST_F(Streams, PlanForTheSmsThatTheScopeNames) {
  EXPECT_EQ(gpu().multiprocessors(), gpu().info().multiprocessors);
  const StreamScope scope(gpu(), gpu().stream(), {.multiprocessors = 20});
  EXPECT_EQ(gpu().multiprocessors(), 20);
}

TEST(Facts, OfAGpuCreateNoContextThere) {
  if (Device::cuda_count() < 2) GTEST_SKIP() << "skipped: fewer than two GPUs";
  const int last = Device::cuda_count() - 1;
  EXPECT_FALSE(Device::gpu_info(last).name.empty());
  using State = CUresult (*)(CUdevice, unsigned*, int*);
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  check(cudaGetDriverEntryPointByVersion("cuDevicePrimaryCtxGetState", &function, 12000, cudaEnableDefault,
                                         &found));
  unsigned flags = 0;
  int active = 1;
  ASSERT_EQ(reinterpret_cast<State>(function)(CUdevice(last), &flags, &active), CUDA_SUCCESS);
  EXPECT_EQ(active, 0);
}

}  // namespace
}  // namespace tessera::ops
