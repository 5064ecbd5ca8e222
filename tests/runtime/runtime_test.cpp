#include <gtest/gtest.h>

#include <chrono>
#include <locale>
#include <sstream>

#include "runtime/allocator.h"
#include "runtime/capture.h"
#include "runtime/device.h"
#include "runtime/error.h"
#include "runtime/has_cuda.h"
#include "runtime/stream_scope.h"
#include "runtime/text.h"
#include "tests/errors.h"

namespace tessera {
namespace {

TEST(Check, CarriesMessageFileAndLine) {
  const int line = __LINE__ + 2;
  try {
    check(1 > 2, "one is ", 1, ", two is ", 2.5);
    FAIL() << "expected an error";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "one is 1, two is 2.5");
    EXPECT_NE(std::string(error.file()).find("runtime_test.cpp"), std::string::npos);
    EXPECT_EQ(error.line(), line);
  }
  EXPECT_NO_THROW(check(2 > 1, "fine"));
}

/// Numbers as "1.234.567", in every stream that does not choose its own locale, while it lives.
class GroupedDigits {
 public:
  GroupedDigits() : former_(std::locale::global(std::locale(std::locale::classic(), new Facet))) {}
  ~GroupedDigits() { std::locale::global(former_); }
  GroupedDigits(const GroupedDigits&) = delete;

 private:
  struct Facet : std::numpunct<char> {
    char do_thousands_sep() const override { return '.'; }
    char do_decimal_point() const override { return ','; }
    std::string do_grouping() const override { return "\3"; }
  };
  std::locale former_;
};

TEST(Check, MessagesReadTheSameInEveryLocale) {
  const GroupedDigits grouped;
  EXPECT_EQ((std::ostringstream() << 1234567).str(), "1.234.567");
  EXPECT_EQ(message_of([] { check(false, 1234567, " is ", 2.5); }), "1234567 is 2.5");
}

TEST(Nearest, FindsTypingErrorsAndNothingElse) {
  const std::vector<std::string> names{"softmax", "log_softmax", "silu", "gelu"};
  EXPECT_EQ(nearest("sofmax", names), "softmax");
  EXPECT_EQ(nearest("sliu", names), "silu");
  EXPECT_EQ(nearest("log_sofmtax", names), "log_softmax");
  EXPECT_EQ(nearest("convolution", names), "");
  EXPECT_EQ(nearest("gelu", std::vector<std::string>{}), "");
}

TEST(Device, ParsesNamesAndSaysWhatItExpected) {
  EXPECT_EQ(Device::parse("cpu"), Device::cpu());
  EXPECT_EQ(Device::cpu().name(), "cpu");
  EXPECT_TRUE(Device::cpu().is_cpu());
  for (const char* text : {"", "CPU", "gpu", "cuda:", "cuda:x", "cuda:1x", "cuda: 1", "cuda:0:1", " cpu",
                           "cuda:99999999999999999999"})
    EXPECT_NE(message_of([&] { Device::parse(text); }).find("expected cpu, cuda or cuda:<index>"),
              std::string::npos)
        << text;
  for (const char* text : {"cuda:-1", "cuda:1000"})
    EXPECT_NE(message_of([&] { Device::parse(text); }).find(text), std::string::npos) << text;
  if (Device::cuda_count() == 0) {
    const std::string said = message_of([] { Device::parse("cuda"); });
    EXPECT_NE(said.find(kCuda ? "driver" : "no CUDA"), std::string::npos) << said;
    EXPECT_EQ(Device::best(), Device::cpu());
  } else {
    EXPECT_EQ(Device::parse("cuda:0"), Device::cuda(0));
    EXPECT_EQ(Device::best(), Device::cuda(0));
  }
}

TEST(Device, TheCpuHasNoStreams) {
  const Device cpu = Device::cpu();
  EXPECT_EQ(cpu.multiprocessors(), cpu.info().multiprocessors);
  EXPECT_EQ(cpu.fence(), nullptr);
  EXPECT_NE(message_of([&] { cpu.counters(1); }).find("on CUDA"), std::string::npos);
  EXPECT_NE(message_of([&] { const StreamScope scope(cpu, nullptr); }).find("only CUDA devices have streams"),
            std::string::npos);
  EXPECT_EQ(StreamScope::current(cpu), nullptr) << "a scope that could not be made is not entered";
  EXPECT_NE(message_of([&] { Device::gpu_info(-1); }).find("gpu_info: GPU -1"), std::string::npos);
}

TEST(Captured, RunsItsBodyEveryTimeOnTheCpu) {
  int calls = 0;
  Captured step(Device::cpu(), [&] { calls += 1; });
  for (int i = 0; i < 5; ++i) step();
  EXPECT_EQ(calls, 5);
  EXPECT_FALSE(step.is_graph());
  EXPECT_EQ(step.nodes(), 0u);
  step.reset();
  Captured moved = std::move(step);
  moved();
  EXPECT_EQ(calls, 6);
}

TEST(Captured, AnErrorInTheBodyPassesThrough) {
  bool fail = true;
  Captured step(Device::cpu(), [&] { check(!fail, "planted"); });
  EXPECT_EQ(message_of([&] { step(); }), "planted");
  fail = false;
  EXPECT_NO_THROW(step());
}

TEST(Event, MeasuresTimeOnTheCpu) {
  using Clock = std::chrono::steady_clock;
  const auto milliseconds = [](Clock::duration time) {
    return std::chrono::duration<double, std::milli>(time).count();
  };
  // Readings of the same clock around the events bound what lies between them, however long that takes.
  Event start(Device::cpu()), stop(Device::cpu());
  const auto before_start = Clock::now();
  start.record();
  const auto after_start = Clock::now();
  while (Clock::now() == after_start) continue;
  const auto before_stop = Clock::now();
  stop.record();
  const auto after_stop = Clock::now();
  EXPECT_TRUE(stop.done());
  constexpr double kRounding = 1e-6;  // seconds since the machine started, as f64
  EXPECT_GE(stop.milliseconds_since(start), milliseconds(before_stop - after_start) - kRounding);
  EXPECT_LE(stop.milliseconds_since(start), milliseconds(after_stop - before_start) + kRounding);
  EXPECT_GT(stop.milliseconds_since(start), 0);
}

}  // namespace
}  // namespace tessera
