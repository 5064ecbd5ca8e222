#include <gtest/gtest.h>

#include "train/step.h"
#include "train/tnp_job.h"

/// A training loop asks the driver for memory in its first two steps only: the first fills the caches, the
/// second, on a GPU, captures into the graph's own pool.

namespace tessera::train {
namespace {

TEST(Allocation, NothingReachesTheDriverAfterTheSecondStep) {
  TnpSettings job;
  job.model = {
      .features = 1, .d_model = 32, .d_ff = 85, .heads = 2, .layers = 2, .components = 3, .embed_hidden = 32};
  job.context = 20;
  job.targets = 12;
  job.batch = 8;
  const Device device = Device::best();
  TnpJob session(job, device);
  const datasets::Prior prior = make_prior(job);
  Step step(session);
  uint64_t calls = 0;
  for (uint64_t i = 0; i < 10; ++i) {
    step([&](int) { session.load(prior.batch(i)); });
    if (i == 1) calls = device.allocator().stats().driver_calls;
  }
  device.synchronize();
  EXPECT_GT(calls, 0u);
  EXPECT_EQ(device.allocator().stats().driver_calls, calls);
}

}  // namespace
}  // namespace tessera::train
