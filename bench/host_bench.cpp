#include "bench/host_bench.h"

#include <chrono>

#include "autograd/tape.h"
#include "ops/pointwise/pointwise.h"
#include "report/facts.h"

namespace tessera::bench {
namespace {

using Clock = std::chrono::steady_clock;

double milliseconds(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double, std::milli>(to - from).count();
}

Record make_record(Device device, int64_t count, const char* mode, std::vector<double> times) {
  Record record;
  record.op = "host chain";
  record.shape = {{"count", count}};
  record.dtype = "f32";
  record.device = device.name();
  record.gpu = device.info().name;
  record.mode = mode;
  record.ms = percentiles(std::move(times));
  record.build = report::kRevision;
  record.time = report::utc_now();
  return record;
}

}  // namespace

std::vector<Record> bench_host(Device device, const Listener& listener, int64_t count) {
  std::vector<double> forward, backward;
  for (int repeat = 0; repeat < 7; ++repeat) {
    Tensor x = Tensor::full({4}, 1.0, DType::f32, device);
    require_grad(x);
    Tape tape;
    device.synchronize();
    const auto begin = Clock::now();
    Tensor y = x;
    for (int64_t i = 0; i < count; ++i) y = ops::scale(y, 1.0001);
    device.synchronize();
    const auto middle = Clock::now();
    const Tensor one = Tensor::full({4}, 1.0, DType::f32, device);
    tape.backward(std::span(&y, 1), std::span(&one, 1));
    device.synchronize();
    forward.push_back(milliseconds(begin, middle));
    backward.push_back(milliseconds(middle, Clock::now()));
  }
  std::vector<Record> records;
  listener.add(make_record(device, count, "fwd", forward), records);
  listener.add(make_record(device, count, "bwd", backward), records);
  return records;
}

}  // namespace tessera::bench
