#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "ops/random/random.h"
#include "runtime/capture.h"
#include "tensor/kernels.h"
#include "tensor/tensor.h"
#include "tests/errors.h"

/// What needs a GPU: copies between host and device, and graphs of a step with random numbers.

namespace tessera {
namespace {

class CudaTensor : public testing::Test {
 protected:
  void SetUp() override {
    if (Device::cuda_count() == 0) GTEST_SKIP() << "skipped: no GPU";
    gpu = Device::cuda();
  }
  Device gpu = Device::cpu();
};
using CudaCaptured = CudaTensor;

Tensor counting_up_to_100(const Shape& shape, DType dtype = DType::f64) {
  std::vector<double> values(size_t(shape.count()));
  for (size_t i = 0; i < values.size(); ++i) values[i] = double(i % 101);
  return Tensor::from(values, shape).to(dtype);
}

TEST_F(CudaTensor, CopiesBothWaysInEveryDtypeAndLayout) {
  for (const DType from : {DType::f64, DType::f32, DType::bf16, DType::f16, DType::f8e4m3, DType::i64,
                           DType::i32, DType::u8, DType::boolean})
    for (const DType to : {from, DType::f32, DType::bf16, DType::i64}) {
      SCOPED_TRACE(testing::Message() << from << " to " << to);
      const Tensor x = counting_up_to_100({3, 5, 7}, from);
      const auto expected = x.to(to).to_vector<double>();
      EXPECT_EQ(x.to(gpu).to(to).to_vector<double>(), expected);
      EXPECT_EQ(x.to(to).to(gpu).to(Device::cpu()).to_vector<double>(), expected);
      const Tensor across = Tensor::empty({3, 5, 7}, to, gpu);  // converted on the way
      across.copy_from(x);
      EXPECT_EQ(across.to_vector<double>(), expected);
      // Views with gaps on both sides; what lies between stays.
      const Tensor wide = Tensor::full({7, 11, 6}, 3, to, gpu);
      const Tensor part = wide.slice(0, 0, 7).slice(1, 1, 11, 2).slice(2, 2, 5).transpose(0, 2);  // [3, 5, 7]
      part.copy_from(x);
      EXPECT_EQ(part.to_vector<double>(), expected);
      EXPECT_EQ(wide.slice(1, 0, 1).to_vector<double>(),
                Tensor::full({7, 1, 6}, 3, to, Device::cpu()).to_vector<double>());
      const Tensor back = Tensor::zeros({7, 5, 3}, from, Device::cpu()).transpose(0, 2);
      back.copy_from(x.to(gpu));
      EXPECT_EQ(back.to_vector<double>(), x.to_vector<double>());
    }
}

TEST_F(CudaTensor, BroadcastsAndEmptiesAcrossDevices) {
  const Tensor y = Tensor::empty({4, 3}, DType::f32, gpu);
  y.copy_from(counting_up_to_100({3}));
  EXPECT_EQ(y.to_vector<double>(), (std::vector<double>{0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2}));
  EXPECT_EQ(counting_up_to_100({0, 3}).to(gpu).to_vector<double>().size(), 0u);
  EXPECT_EQ(counting_up_to_100({1}).expand({5}).to(gpu).to_vector<double>(), std::vector<double>(5, 0.0));
}

TEST_F(CudaTensor, F64IsAddedToF64InF64AndToNothingElse) {
  const Tensor x = counting_up_to_100({3, 5}),
               tiny = Tensor::full({3, 5}, 0x1p-40, DType::f64, Device::cpu());
  const Tensor y = x.to(gpu), expected = x.clone();
  accumulate(y, tiny.to(gpu));
  accumulate(expected, tiny);
  EXPECT_EQ(y.to_vector<double>(), expected.to_vector<double>());
  const Tensor wide = Tensor::full({7, 5}, 3, DType::f64, gpu);  // rows with gaps, such as parts of an arena
  accumulate(wide.slice(0, 0, 6, 2), y);
  EXPECT_EQ(wide.at({2, 4}).item<double>(), 12 + 0x1p-40);
  EXPECT_EQ(wide.at({1, 4}).item<double>(), 3);
  const Tensor narrow = x.to(DType::f32).to(gpu);
  for (const auto& [to, from] : {std::pair(y, narrow), std::pair(narrow, y)})
    expect_error([&, to, from] { accumulate(to, from); }, {"accumulate: dtype f64 is not supported"});
}

TEST_F(CudaTensor, PinnedMemoryIsCopiedInStreamOrder) {
  const Tensor host = Tensor::empty_pinned({1000, 33}, DType::f32);
  const Tensor device = Tensor::empty({1000, 33}, DType::f32, gpu);
  for (int round = 0; round < 5; ++round) {
    host.fill(round);
    device.copy_from(host);
    gpu.synchronize();  // the contract: page-locked memory does not wait, so the host must before it writes
    EXPECT_EQ(device.select(0, 999).to_vector<float>(), std::vector<float>(33, float(round)));
  }
}

/// Issues `count` times a wait for the device and a copy from page-locked memory that is dropped at once, and
/// returns how many elements are not what was copied.
int64_t corrupted(Device gpu, int64_t count, int64_t elements) {
  const Tensor arrived = Tensor::empty_packed({count, elements}, DType::f32, gpu),
               busy = Tensor::empty({16 << 20}, DType::f32, gpu);
  for (int64_t i = 0; i < count; ++i) {
    busy.fill(0);  // the device is behind the host: copies are pending when their source is dropped
    const Tensor host = Tensor::empty_pinned({elements}, DType::f32);
    std::fill_n(host.data<float>(), elements, float(i));
    arrived.select(0, i).copy_from(host);
  }
  const auto values = arrived.to_vector<float>();
  int64_t wrong = 0;
  for (int64_t i = 0; i < count * elements; ++i) wrong += values[size_t(i)] != float(i / elements);
  return wrong;
}

TEST_F(CudaTensor, PinnedMemoryDroppedUnderACopyIsNotUsedAgain) {
  EXPECT_EQ(corrupted(gpu, 10'000, 4096), 0);
  EXPECT_EQ(corrupted(gpu, 32, 1 << 20), 0);
}

TEST_F(CudaTensor, PinnedMemoryIsUsedAgainOnceItsCopyIsDone) {
  const Tensor device = Tensor::empty({1000}, DType::f32, gpu);
  std::set<const void*> seen;
  for (int i = 0; i < 50; ++i) {
    const Tensor host = Tensor::empty_pinned({1000}, DType::f32);
    seen.insert(host.raw());
    host.fill(i);
    device.copy_from(host);
    gpu.synchronize();
  }
  EXPECT_EQ(seen.size(), 1u);
  const Tensor host = Tensor::empty_pinned({1000}, DType::f32);
  host.copy_from(device);  // back: it waits
  EXPECT_EQ(host.to_vector<float>(), std::vector<float>(1000, 49.0f));
}

TEST_F(CudaTensor, OverlappingCopiesReadBeforeTheyWrite) {
  const Tensor x = counting_up_to_100({100'000}, DType::f32).to(gpu);
  const auto before = x.to_vector<float>();
  x.slice(0, 1, 100'000).copy_from(x.slice(0, 0, 99'999));
  auto expected = before;
  std::copy(before.begin(), before.end() - 1, expected.begin() + 1);
  EXPECT_EQ(x.to_vector<float>(), expected);
}

TEST_F(CudaTensor, MoreThanTwoToThe31Elements) {
  const int64_t count = (int64_t{1} << 31) + 17;
  const size_t need = size_t(count) + (size_t(1) << 30);
  if (gpu.allocator().usage().first < 2 * need || Device::cpu().allocator().usage().first < need)
    GTEST_SKIP() << "skipped: not enough memory";
  {
    const Tensor x = Tensor::zeros({count}, DType::u8, gpu);
    x.slice(0, count - 3, count).fill(7);
    x.slice(0, 0, 1).fill(5);
    EXPECT_EQ(x.slice(0, count - 5, count).to_vector<int32_t>(), (std::vector<int32_t>{0, 0, 7, 7, 7}));
    const Tensor host = x.to(Device::cpu());  // more than the runtime's largest pitch
    EXPECT_EQ(host.slice(0, count - 4, count).to_vector<int32_t>(), (std::vector<int32_t>{0, 7, 7, 7}));
    const Tensor back = host.to(gpu);
    EXPECT_EQ(back.at({count - 1}).item<int32_t>(), 7);
    EXPECT_EQ(back.at({0}).item<int32_t>(), 5);
    const Tensor flags = back.to(DType::boolean);
    EXPECT_EQ(flags.slice(0, count - 4, count).to_vector<int32_t>(), (std::vector<int32_t>{0, 1, 1, 1}));
  }
  gpu.allocator().release_cached();
  Device::cpu().allocator().release_cached();
}

TEST_F(CudaTensor, SmallFloatsConvertAsOnTheCpu) {
  std::vector<double> values;
  for (int exponent = -30; exponent < 20; ++exponent)
    for (const double mantissa :
         {1.0, 1.0625, 1.09375, 1.00390625, 1.0009765625, 1.5, 1.9990234375, 1.99951171875})
      for (const double tail : {0.0, 0x1p-40, -0x1p-40}) {
        values.push_back(std::ldexp(mantissa + tail, exponent));
        values.push_back(-values.back());
      }
  for (const DType from : {DType::f64, DType::f32})
    for (const DType to : {DType::bf16, DType::f16, DType::f8e4m3}) {
      const Tensor x = Tensor::from(values, {int64_t(values.size())}).to(from);
      EXPECT_EQ(x.to(gpu).to(to).to_vector<double>(), x.to(to).to_vector<double>()) << from << " to " << to;
    }
}

// ---- graphs ----

/// A step that draws random numbers twice and adds them up.
struct Step {
  explicit Step(Device device) : sum(Tensor::zeros({64, 33}, DType::f32, device)) {}
  void operator()() {
    const Tensor a = Tensor::empty(sum.shape(), DType::f32, sum.device());
    ops::fill_uniform(a, -1, 1, rng);
    const Tensor b = Tensor::empty(sum.shape(), DType::f32, sum.device());
    ops::fill_uniform(b, 0, 4, rng);
    sum.copy_from(a.slice(0, 0, 1));
    b.slice(0, 0, 32).copy_from(a.slice(0, 32, 64));
    sum.slice(0, 1, 33).copy_from(b.slice(0, 0, 32));
  }
  Rng rng{9};
  Tensor sum;
};

TEST_F(CudaCaptured, ReplaysDrawTheNumbersThatEagerDraws) {
  Step eager(gpu), captured(gpu);
  Captured step(gpu, [&] { captured(); });
  for (int i = 0; i < 6; ++i) {
    eager();
    step();
    ASSERT_EQ(captured.sum.to_vector<float>(), eager.sum.to_vector<float>()) << "step " << i;
    ASSERT_EQ(captured.rng.state(), eager.rng.state()) << "step " << i;
    if (i == 3) {  // eager draws in between move the graph's numbers too
      captured.rng.reserve(gpu);
      eager.rng.reserve(gpu);
    }
  }
  EXPECT_TRUE(step.is_graph());
  EXPECT_GT(step.nodes(), 0u);
  // Resuming: the state set on the host reaches the replay.
  captured.rng.set_state({9, 2});
  eager.rng.set_state({9, 2});
  eager();
  step();
  EXPECT_EQ(captured.sum.to_vector<float>(), eager.sum.to_vector<float>());
}

TEST_F(CudaCaptured, WhatCannotBeCapturedThrowsAndLeavesTheStreamUsable) {
  const Tensor x = Tensor::zeros({4}, DType::f32, gpu), host = Tensor::zeros({4}, DType::f32, Device::cpu());
  const Tensor pinned = Tensor::empty_pinned({4}, DType::f64);
  pinned.fill(2);
  const std::pair<const char*, std::function<void()>> bodies[] = {
      {"while a graph is being captured", [&] { x.slice(0, 0, 1).item<float>(); }},
      {"while a graph is being captured", [&] { gpu.synchronize(); }},
      {"while a graph is being captured", [&] { x.to(Device::cpu()); }},
      {"while a graph is being captured", [&] { x.copy_from(host); }},
      {"temporary", [&] { x.copy_from(pinned); }},  // f64 to f32 would be converted on the host
      {"do not nest", [&] { CaptureSession second(gpu); }}};
  for (const auto& [part, body] : bodies) {
    Rng rng(3);
    bool capturing = false;
    Captured step(gpu, [&] {
      x.fill(5);
      ops::fill_uniform(x, 0, 1, rng);
      if (std::exchange(capturing, true)) body();
    });
    step();
    const Rng::State before = rng.state();
    const std::string said = message_of([&] { step(); });
    EXPECT_NE(said.find(part), std::string::npos) << part << " in: " << said;
    EXPECT_FALSE(gpu.capturing());
    EXPECT_FALSE(step.is_graph());
    EXPECT_EQ(rng.state(), before) << "a failed capture draws nothing";
    x.fill(2);
    EXPECT_EQ(x.to_vector<float>(), std::vector<float>(4, 2.0f));
    EXPECT_NO_THROW(gpu.synchronize());
  }
}

TEST_F(CudaCaptured, AsksTheDriverForNothingAfterTheSecondStep) {
  Step work(gpu);
  Captured step(gpu, [&] { work(); });
  step();
  step();
  const uint64_t calls = gpu.allocator().stats().driver_calls;
  for (int i = 0; i < 10; ++i) step();
  gpu.synchronize();
  EXPECT_EQ(gpu.allocator().stats().driver_calls, calls);
}

TEST_F(CudaCaptured, ItsPoolIsFreedWithIt) {
  gpu.allocator().release_cached();
  const size_t before = gpu.allocator().stats().reserved;
  Tensor kept;
  {
    Captured step(gpu, [&] {
      kept = Tensor::empty({3 << 20}, DType::f32, gpu);
      kept.fill(1);
    });
    step();
    step();
    EXPECT_GT(gpu.allocator().stats().reserved, before);
  }
  EXPECT_EQ(kept.at({5}).item<float>(), 1.0f) << "a block of the pool outlives the graph";
  kept = Tensor();
  gpu.allocator().release_cached();
  EXPECT_EQ(gpu.allocator().stats().reserved, before);
}

TEST_F(CudaCaptured, AHundredCapturesDoNotGrow) {
  size_t reserved = 0, free_bytes = 0;
  for (int cycle = 0; cycle < 100; ++cycle) {
    Step work(gpu);
    Captured step(gpu, [&] { work(); });
    for (int i = 0; i < 3; ++i) step();
    gpu.synchronize();
    if (cycle == 10) reserved = gpu.allocator().stats().reserved, free_bytes = gpu.allocator().usage().first;
  }
  EXPECT_LE(gpu.allocator().stats().reserved, reserved);
  // The driver keeps books of its own in pieces of 2 MiB; ninety graphs that leaked theirs would show.
  EXPECT_GE(gpu.allocator().usage().first + (size_t(16) << 20), free_bytes);
}

TEST_F(CudaCaptured, APinnedSourceBelongsToTheGraph) {
  Tensor source = Tensor::empty_pinned({4096}, DType::f32);
  source.fill(3);
  const Tensor x = Tensor::zeros({4096}, DType::f32, gpu);
  {
    Captured step(gpu, [&] { x.copy_from(source); });
    step();
    step();
    const void* const address = source.raw();
    source = Tensor();
    for (int i = 0; i < 4; ++i) {
      const Tensor other = Tensor::empty_pinned({4096}, DType::f32);
      EXPECT_NE(other.raw(), address);
      other.fill(9);
      x.fill(0);
      step();
      EXPECT_EQ(x.to_vector<float>(), std::vector<float>(4096, 3.0f));
    }
  }
}

TEST_F(CudaCaptured, OtherThreadsAllocateOutsideItsPool) {
  const Tensor x = Tensor::zeros({1 << 20}, DType::f32, gpu);
  Tensor other, host;
  std::string refused;
  int calls = 0;
  Captured step(gpu, [&] {
    calls += 1;
    Tensor::full({1 << 20}, 5, DType::f32, gpu);  // freed: a block of the graph's pool to be had
    if (calls == 2)
      std::thread([&] {
        other = Tensor::empty({1 << 20}, DType::f32, gpu);
        host = Tensor::empty_pinned({1 << 20}, DType::f32);
        refused = message_of([&] { other.fill(1); });
      }).join();
    x.copy_from(Tensor::full({1 << 20}, 7, DType::f32, gpu));
  });
  step();
  step();
  EXPECT_TRUE(step.is_graph());
  EXPECT_NE(refused.find("another thread is capturing"), std::string::npos) << refused;
  other.fill(3);
  for (int i = 0; i < 3; ++i) {
    x.fill(0);
    step();
    EXPECT_EQ(other.to_vector<float>(), std::vector<float>(1 << 20, 3.0f));
    EXPECT_EQ(x.to_vector<float>(), std::vector<float>(1 << 20, 7.0f));
  }
}

TEST_F(CudaCaptured, AThreadThatKeepsAllocatingDoesNotBreakCaptures) {
  std::atomic<bool> stop = false;
  std::atomic<int> rounds = 0;
  std::thread other([&] {
    while (!stop) {
      std::vector<Tensor> some;
      for (int i = 1; i < 20; ++i) some.push_back(Tensor::empty({i * 50'000}, DType::f32, gpu));
      const Tensor host = Tensor::empty_pinned({1000}, DType::f32);
      rounds += 1;
    }
  });
  Step eager(gpu), work(gpu);
  for (int cycle = 0; cycle < 20; ++cycle) {
    Captured step(gpu, [&] { work(); });
    for (int i = 0; i < 4; ++i) {
      step();
      eager();
      EXPECT_EQ(work.sum.to_vector<float>(), eager.sum.to_vector<float>());
    }
    EXPECT_TRUE(step.is_graph());
  }
  while (rounds == 0) std::this_thread::yield();
  stop = true;
  other.join();
}

TEST_F(CudaCaptured, ResetCapturesAnew) {
  Step eager(gpu), work(gpu);
  Captured step(gpu, [&] { work(); });
  for (int i = 0; i < 7; ++i) {
    if (i == 4) step.reset();
    step();
    eager();
    EXPECT_EQ(step.is_graph(), i % 4 != 0) << i;
    ASSERT_EQ(work.sum.to_vector<float>(), eager.sum.to_vector<float>()) << i;
  }
}

}  // namespace
}  // namespace tessera
