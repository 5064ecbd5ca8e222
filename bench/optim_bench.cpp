#include "bench/optim_bench.h"

#include "autograd/tape.h"
#include "bench/default_sizes.h"
#include "nn/module.h"
#include "ops/pointwise/pointwise.h"
#include "ops/random/random.h"
#include "optim/adamw.h"
#include "report/facts.h"

namespace tessera::bench {
namespace {

constexpr int64_t kWidth = 2048;

Record describe_step(Device device, DType dtype) {
  Record record;
  record.dtype = name_of(dtype);
  record.device = device.name();
  record.gpu = device.info().name;
  record.build = report::kRevision;
  record.time = report::utc_now();
  return record;
}

std::vector<nn::NamedParameter> random_parameters(int64_t count, DType dtype, Device device, const Rng& rng) {
  std::vector<nn::NamedParameter> list;
  for (int64_t left = count; left > 0;) {
    const int64_t rows = std::max<int64_t>(1, std::min(left, kWidth * kWidth) / kWidth);
    const Shape shape{rows, std::min(left, kWidth)};
    Tensor weight = Tensor::empty(shape, dtype, device);
    ops::fill_normal(weight, 0, 0.02, rng);
    nn::make_parameter(weight);
    list.push_back({"weight" + std::to_string(list.size()), weight});
    left -= shape.count();
  }
  return list;
}

}  // namespace

std::vector<Record> bench_optim(const OptimBenchOptions& options) {
  const int64_t count =
      options.parameters > 0 ? options.parameters : default_optim_parameters(options.device);
  std::vector<Record> records;
  for (const DType dtype : options.dtypes) {
    for (const bool clip : options.clip) {
      options.listener.begin(std::string("adamw ") + name_of(dtype));
      Rng rng(1);
      optim::AdamW adamw(random_parameters(count, dtype, options.device, rng),
                         {.lr = 1e-4, .max_grad_norm = clip ? 1.0 : 0.0});
      // Gradients arrive once and stay: no zero_grad between the steps.
      for (const nn::NamedParameter& parameter : adamw.parameters()) {
        Tape tape;
        const std::vector<Tensor> y{ops::scale(parameter.tensor, 1.0)};
        const std::vector<Tensor> dy{Tensor::empty_like(y[0].detach())};
        ops::fill_normal(dy[0], 0, 0.01, rng);
        tape.backward(y, dy);
      }
      Record record = describe_step(options.device, dtype);
      record.op = "adamw";
      record.mode = "step";
      record.shape = {{"P", count}};
      record.attrs["clip"] = clip ? "on" : "off";
      record.ms = measure(
          options.device, [&] { adamw.step(); }, options.timer);
      const double states = 2 * 2 * 4, master = size_of(dtype) == 2 ? 2 * 4 + 2 : 2 * 4;
      record.bytes = double(count) * (states + master + 4 + (clip ? 4 : 0));
      record.copy_gbs = ceilings(options.device, DType::bf16).copy_gbs;
      record.ceiling_share = record.gbs() / record.copy_gbs;
      options.listener.add(record, records);
    }
  }
  return records;
}

std::vector<Record> bench_copy(Device device, const Listener& listener, const TimerOptions& timer) {
  const int64_t mib = default_copy_mib(device), count = mib << 18;
  const Tensor from = Tensor::empty({count}, DType::f32, device), to = Tensor::empty_like(from);
  Rng rng(1);
  ops::fill_normal(from, 0, 1, rng);
  Record record = describe_step(device, DType::f32);
  record.op = "copy";
  record.mode = "fwd";
  record.shape = {{"MiB", mib}};
  record.bytes = 8.0 * double(count);
  record.copy_gbs = ceilings(device, DType::bf16).copy_gbs;
  std::vector<Record> records;
  for (const bool driver : {false, true}) {
    if (driver && device.is_cpu()) break;
    record.implementation = driver ? "driver" : "tessera";
    record.ms = measure(
        device, [&] { driver ? copy_at_best(to, from) : to.copy_from(from); }, timer);
    record.ceiling_share = record.gbs() / record.copy_gbs;
    listener.add(record, records);
  }
  return records;
}

}  // namespace tessera::bench
