#include "train/data_wait.h"

#include <gtest/gtest.h>

namespace tessera::train {
namespace {

/// A device that is told how far it has come: marks are reached at times that the test says.
struct Stream {
  std::vector<double> times;  // milliseconds at which the marks are reached, in order
  size_t recorded = 0, reached = 0;
  int made = 0;
};
Stream* g_stream = nullptr;

class ScriptedMark {
 public:
  explicit ScriptedMark(Device) { g_stream->made += 1; }
  void record() { at_ = g_stream->recorded++; }
  bool done() const { return at_ < g_stream->reached; }
  double milliseconds_since(const ScriptedMark& start) const {
    g_stream->reached = std::max(g_stream->reached, at_ + 1);  // waits
    return g_stream->times.at(at_) - g_stream->times.at(start.at_);
  }

 private:
  size_t at_ = 0;
};

TEST(DataWait, CountsWhatTheDeviceSpentBetweenTheMarksOfEachLoad) {
  Stream stream{.times = {0, 3, 10, 10.5, 20, 20.25, 30, 31}};
  g_stream = &stream;
  DataWait<ScriptedMark> wait(Device::cpu());
  int loads = 0;
  for (int step = 0; step < 3; ++step) wait.around([&] { loads += 1; });  // the host runs ahead of the device
  EXPECT_EQ(loads, 3);
  EXPECT_EQ(stream.made, 6);
  EXPECT_EQ(stream.reached, 0u) << "a load waited for the device";
  EXPECT_DOUBLE_EQ(wait.take(), 3.75e-3);
  EXPECT_EQ(wait.take(), 0);
  wait.around([&] { loads += 1; });
  EXPECT_EQ(stream.made, 6) << "marks are used again";
  EXPECT_DOUBLE_EQ(wait.take(), 1e-3);
}

TEST(DataWait, KeepsNoMoreMarksThanAreOnTheWay) {
  Stream stream;
  for (int i = 0; i < 2000; ++i) stream.times.push_back(i);
  g_stream = &stream;
  DataWait<ScriptedMark> wait(Device::cpu());
  for (size_t step = 0; step < 1000; ++step) {
    stream.reached = stream.recorded;  // the device caught up
    wait.around([] {});
  }
  EXPECT_LE(stream.made, 4);
  EXPECT_DOUBLE_EQ(wait.take(), 1.0);  // a thousand loads of a millisecond
}

}  // namespace
}  // namespace tessera::train
