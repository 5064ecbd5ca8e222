#include "bench/step_ranks.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>

#include "comm/socket.h"

namespace tessera::bench {
namespace {

using Clock = std::chrono::steady_clock;

std::string own_name(const dist::World& world, Device device) {
  return fmt::format("rank {} on {} ({})", world.rank(), comm::host_name(), device.name());
}

/// Milliseconds of each of `times` steps on this rank.
std::vector<double> times_of(Device device, const std::function<void()>& step, int times) {
  std::vector<double> all;
  if (device.is_cpu()) {
    for (int i = 0; i < times; ++i) {
      const Clock::time_point start = Clock::now();
      step();
      all.push_back(std::chrono::duration<double, std::milli>(Clock::now() - start).count());
    }
    return all;
  }
  std::vector<Event> marks;
  for (int i = 0; i <= times; ++i) marks.emplace_back(device);
  marks[0].record();
  for (int i = 0; i < times; ++i) step(), marks[size_t(i + 1)].record();
  for (int i = 0; i < times; ++i) all.push_back(marks[size_t(i + 1)].milliseconds_since(marks[size_t(i)]));
  return all;
}

}  // namespace

optim::Sharding StepRanks::sharding() const {
  if (!several() || zero == 0) return {};
  return {.part = world->rank(),
          .parts = world->size(),
          .bucket_mb = bucket_mb > 0 ? bucket_mb : optim::Sharding().bucket_mb,
          .gradients = zero > 1};
}

std::string StepRanks::description(dist::Exchange exchange) const {
  if (!several()) return "";
  std::string how = bucket_mb > 0 ? fmt::format("buckets of {:g} MiB", bucket_mb) : "one sum";
  if (exchange == dist::Exchange::peer) how += ", peer";
  return zero > 0 ? fmt::format("zero {}, {}", zero, how) : how;
}

void time_on_ranks(const dist::World& world, Device device, const std::function<void()>& step,
                   const TimerOptions& timer, Record& record) {
  for (int i = 0; i < timer.warmups; ++i) step();
  device.synchronize();
  // As many steps on all ranks: what the slowest one took says how many.
  const Clock::time_point start = Clock::now();
  step();
  device.synchronize();
  const int64_t own = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
  const double once = std::max(1e-9, double(world.host().largest(own)) * 1e-9);
  const int times = int(std::clamp(timer.seconds / once, double(timer.least), double(timer.most)));
  world.host().barrier();
  const Timing ms = percentiles(times_of(device, step, times));
  const nlohmann::json said = {
      {"p10", ms.p10}, {"p50", ms.p50}, {"p90", ms.p90}, {"name", own_name(world, device)}};
  double worst = -1;
  for (const std::string& text : world.host().gather_texts(said.dump())) {
    const nlohmann::json rank = nlohmann::json::parse(text);
    if (rank.at("p50").get<double>() <= worst) continue;
    worst = rank.at("p50");
    record.ms = {rank.at("p10"), rank.at("p50"), rank.at("p90"), times};
    record.ranks.slowest = rank.at("name");
  }
}

}  // namespace tessera::bench
