#include "bench/collective_bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>

#include "report/facts.h"
#include "runtime/capture.h"

namespace tessera::bench {
namespace {

using Clock = std::chrono::steady_clock;
using comm::Communicator;

/// One call of `size` elements in all, as nccl-tests count them.
struct Collective {
  const char* name;
  bool divided;                 // the size is of all ranks' parts together
  double (*bus)(double ranks);  // bytes that the bus carries for each of the size
  std::function<void()> (*make)(const Communicator& c, int64_t size, DType dtype, Device device);
};

Tensor zeros(int64_t count, DType dtype, Device device) {
  return Tensor::zeros({count}, dtype, device);
}

double around(double ranks) {
  return (ranks - 1) / ranks;
}

const Collective kCollectives[] = {
    {"all_reduce", false, [](double ranks) { return 2 * around(ranks); },
     [](const Communicator& c, int64_t size, DType dtype, Device device) -> std::function<void()> {
       return [c, x = zeros(size, dtype, device)] { c.all_reduce(x); };
     }},
    {"reduce_scatter", true, around,
     [](const Communicator& c, int64_t size, DType dtype, Device device) -> std::function<void()> {
       return [c, in = zeros(size, dtype, device), out = zeros(size / c.size(), dtype, device)] {
         c.reduce_scatter(in, out);
       };
     }},
    {"reduce_parts", true, around,
     [](const Communicator& c, int64_t size, DType dtype, Device device) -> std::function<void()> {
       std::vector<int64_t> ends;
       for (int r = 0; r < c.size(); ++r) ends.push_back(size * (r + 1) / c.size());
       return [c, x = zeros(size, dtype, device), ends] { c.reduce_parts(x, ends); };
     }},
    {"all_gather", true, around,
     [](const Communicator& c, int64_t size, DType dtype, Device device) -> std::function<void()> {
       return [c, in = zeros(size / c.size(), dtype, device), out = zeros(size, dtype, device)] {
         c.all_gather(in, out);
       };
     }},
    {"broadcast", false, [](double) { return 1.0; },
     [](const Communicator& c, int64_t size, DType dtype, Device device) -> std::function<void()> {
       return [c, x = zeros(size, dtype, device)] { c.broadcast(x, 0); };
     }},
    {"all_to_all", true, around,
     [](const Communicator& c, int64_t size, DType dtype, Device device) -> std::function<void()> {
       return
           [c, in = zeros(size, dtype, device), out = zeros(size, dtype, device)] { c.all_to_all(in, out); };
     }},
};

/// Measures on all ranks at once.
class Meter {
 public:
  Meter(const dist::World& world, Device device, double seconds)
      : host_(world.host()), device_(device), seconds_(seconds) {}

  /// Sets ms and, of eager calls, host_us.
  void measure(const std::function<void()>& call, bool graph, Record& record) const {
    constexpr int kWarmups = 3, kRounds = 7;
    call();  // makes what the first call needs
    double once = slowest(call).done;
    for (int i = 1; i < kWarmups && i * once < seconds_; ++i) once = slowest(call).done;
    // All ranks make the same numbers of rounds and calls: they agree on `once`.
    const double most_calls = seconds_ / std::max(once, 1e-7);
    const int rounds_made = int(std::clamp(most_calls, 1.0, double(kRounds)));
    const int calls = int(std::clamp(most_calls / rounds_made, 1.0, 200.0));
    const std::function<void()> some = [&call, calls] {
      for (int i = 0; i < calls; ++i) call();
    };
    Captured captured(device_, some);
    for (int i = 0; graph && i < 2; ++i) captured();  // eager, then captured
    std::vector<double> rounds, issued;
    for (int round = 0; round < rounds_made; ++round) {
      const Seconds seconds = graph ? slowest([&] { captured(); }) : slowest(some);
      rounds.push_back(1e3 * seconds.done / calls);
      issued.push_back(1e6 * seconds.issued / calls);
    }
    record.ms = percentiles(std::move(rounds));
    if (!graph) record.host_us = percentiles(std::move(issued)).p50;
  }

 private:
  /// Of the slowest rank, until it has issued the work and until the work is done.
  struct Seconds {
    double issued, done;
  };
  Seconds slowest(const std::function<void()>& work) const {
    device_.synchronize();
    host_.barrier();
    const Clock::time_point start = Clock::now();
    work();
    const Clock::time_point issued = Clock::now();
    device_.synchronize();
    const Clock::time_point done = Clock::now();
    const auto largest = [&](Clock::time_point end) {
      return double(host_.largest(std::chrono::nanoseconds(end - start).count())) * 1e-9;
    };
    return {largest(issued), largest(done)};
  }

  const Communicator host_;
  const Device device_;
  const double seconds_;
};

std::string size_text(int64_t bytes) {
  const char* const units[] = {"B", "KiB", "MiB", "GiB"};
  int unit = 0;
  for (; unit < 3 && bytes >= 1024 && bytes % 1024 == 0; ++unit) bytes /= 1024;
  return fmt::format("{} {}", bytes, units[unit]);
}

}  // namespace

std::vector<std::string> collective_names() {
  std::vector<std::string> names;
  for (const Collective& collective : kCollectives) names.emplace_back(collective.name);
  return names;
}

std::vector<Record> bench_collectives(const dist::World& world, Device device,
                                      const CollectiveOptions& options) {
  check(world.size() > 1,
        "bench collective: one rank has no other to send to; start it by a launcher, such as "
        "tessera launch -n 2 -- bench collective");
  // Sockets of one machine carry their most GB/s from 1 MiB on; 1 GiB takes them seconds.
  const int64_t usual = device.is_cuda() ? int64_t{1} << 30 : int64_t{1} << 26;
  const int64_t most = options.most.value_or(std::max(options.least, usual));
  check(options.least >= 1 && options.least <= most && options.factor >= 2, "bench collective: sizes from ",
        options.least, " to ", most, " by ", options.factor);
  const std::vector<std::string> known = collective_names();
  for (const std::string& name : options.names)
    check(std::ranges::find(known, name) != known.end(), "bench collective: there is no \"", name,
          "\"; expected ", fmt::format("{}", fmt::join(known, ", ")));
  const Communicator data = world.data(device);
  const Meter meter(world, device, options.seconds);
  const int64_t element = int64_t(size_of(options.dtype)), ranks = world.size();
  std::vector<Record> records;
  for (const Collective& collective : kCollectives) {
    if (!options.names.empty() && std::ranges::find(options.names, collective.name) == options.names.end())
      continue;
    for (int64_t bytes = options.least; bytes <= most; bytes *= options.factor) {
      const int64_t unit = element * (collective.divided ? ranks : 1),
                    elements = bytes / unit * unit / element;
      if (elements == 0) continue;
      const std::function<void()> call = collective.make(data, elements, options.dtype, device);
      for (const bool graph : device.is_cuda() ? options.graph : std::vector<bool>{false}) {
        Record record;
        record.op = collective.name;
        record.shape = {{"bytes", elements * element}, {"ranks", ranks}};
        record.dtype = name_of(options.dtype);
        record.device = device.name();
        record.gpu = device.info().name;
        record.mode = graph ? "graph" : "eager";
        meter.measure(call, graph, record);
        record.bytes = double(elements * element) * collective.bus(double(ranks));
        record.does = {{"transport", data.transport()}};
        record.build = report::kRevision;
        record.time = report::utc_now();
        records.push_back(std::move(record));
      }
    }
  }
  check(!records.empty(), "bench collective: no size from ", options.least, " to ", most,
        " bytes, by factors of ", options.factor, ", holds an element of ", name_of(options.dtype),
        " for each of ", ranks, " ranks; give a larger --max");
  return records;
}

std::string format_collectives(const std::vector<Record>& records) {
  std::vector<std::vector<std::string>> rows = {
      {"call", "size", "mode", "transport", "us", "p90", "host us", "algorithm GB/s", "bus GB/s"}};
  for (const Record& r : records) {
    const int64_t bytes = r.shape.at("bytes");
    rows.push_back({r.op, size_text(bytes), r.mode, r.does.at("transport"),
                    fmt::format("{:.1f}", r.ms.p50 * 1e3), fmt::format("{:.1f}", r.ms.p90 * 1e3),
                    r.host_us > 0 ? fmt::format("{:.1f}", r.host_us) : "-",
                    fmt::format("{:.3g}", double(bytes) / r.ms.p50 / 1e6), fmt::format("{:.3g}", r.gbs())});
  }
  return format_rows(rows, 4);
}

}  // namespace tessera::bench
