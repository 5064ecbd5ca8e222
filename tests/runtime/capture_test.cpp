#include "runtime/capture.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>

#include "runtime/allocator.h"
#include "runtime/capture_internal.h"
#include "tests/errors.h"

namespace tessera {
namespace {

/// Notes in `ended` that it has been destroyed.
struct Noted {
  Noted(std::string& ended, char name) : ended(ended), name(name) {}
  ~Noted() { ended += name; }
  Noted(const Noted&) = delete;
  std::string& ended;
  char name;
};

class NotedRecorder : public GraphRecorder {
 public:
  explicit NotedRecorder(std::string& ended) : ended_(ended) {}
  void begin() override {}
  std::unique_ptr<Graph> end() override {
    struct Empty : Graph {
      explicit Empty(std::string& ended) : noted(ended, 'g') {}
      void launch() override {}
      size_t nodes() const override { return 1; }
      Noted noted;
    };
    return std::make_unique<Empty>(ended_);
  }
  void abandon() noexcept override {}
  void copy(void*, const void*, size_t) override {}

 private:
  std::string& ended_;
};

// NCCL's communicators: ncclCommDestroy waits for the graphs that hold their calls.
TEST(Capture, AGraphIsDestroyedBeforeWhatItKeeps) {
  std::string ended;
  auto kept = std::make_shared<Noted>(ended, 'k');
  {
    Captured step(
        Device::cpu(),
        [&] {
          if (CaptureSession* const session = CaptureSession::current()) session->keep(std::move(kept));
        },
        std::make_unique<NotedRecorder>(ended));
    step(), step();
    EXPECT_TRUE(step.is_graph());
    EXPECT_EQ(ended, "");
  }
  EXPECT_EQ(ended, "gk");
}

TEST(Capture, RefusesToRunWithoutABody) {
  expect_error([] { Captured(Device::cpu(), {}); }, {"Captured", "the body is empty"});
  int calls = 0;
  Captured step(Device::cpu(), [&] { ++calls; });
  Captured moved = std::move(step);
  expect_error([&] { step(); }, {"moved from"});
  moved();
  EXPECT_EQ(calls, 1);
}

// The graphs' pool takes memory from the device alone.
TEST(Capture, BeforeEachGraphTheDeviceGetsBackWhatEagerWorkCached) {
  std::string ended;
  Allocator& allocator = Device::cpu().allocator();
  size_t reserved = 0;
  Captured step(
      Device::cpu(),
      [&] {
        reserved = allocator.stats().reserved;
        if (CaptureSession* const session = CaptureSession::current())
          session->add({.key = &reserved, .still_matches = [] { return false; }});
      },
      std::make_unique<NotedRecorder>(ended));
  step();
  for (size_t graphs = 1; graphs <= 3; ++graphs) {
    constexpr size_t kBytes = size_t{64} << 20;
    allocator.free(allocator.allocate(kBytes));
    const size_t cached = allocator.stats().reserved;
    step();
    EXPECT_EQ(step.graphs(), graphs);
    EXPECT_LE(reserved + kBytes, cached);
  }
}

}  // namespace
}  // namespace tessera
