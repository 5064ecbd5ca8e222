#include "sparsity/measure.h"

#include <algorithm>
#include <chrono>
#include <map>

#include "autograd/tape.h"
#include "models/generate.h"
#include "nn/observe.h"
#include "runtime/interrupt.h"
#include "sparsity/modules.h"

namespace tessera::sparsity {
namespace {

using Clock = std::chrono::steady_clock;

double milliseconds(Clock::time_point begin, Clock::time_point end) {
  return std::chrono::duration<double, std::milli>(end - begin).count();
}

}  // namespace

void compress_layers(models::LanguageRef model, ops::SparseFormat format) {
  std::map<nn::Linear*, nn::Compressed> forms;
  for (const pretrained::LinearModule& module : block_modules(model)) {
    check_interrupt();
    nn::Compressed& form = forms[module.layer];
    const auto* const before = std::get_if<nn::Compressed>(&module.layer->form);
    const ops::SparseWeight* const part = before ? &before->parts.at(form.parts.size()).weight : nullptr;
    const Device device = part ? part->device() : module.layer->weight.device();
    const Tensor dense = part ? ops::to_dense(part->to(Device::cpu())) : weight_of(module);
    form.parts.push_back({ops::compress(dense, format).to(device), {}});
  }
  for (auto& [layer, form] : forms) layer->weight = Tensor(), layer->form = std::move(form);
}

LayerBytes bytes_of_layers(models::LanguageRef model) {
  LayerBytes result;
  double all = 0, stored = 0;
  std::map<nn::Linear*, size_t> next;
  for (const pretrained::LinearModule& module : block_modules(model)) {
    const double elements = double(module.rows) * double(module.layer->in);
    all += elements;
    if (const auto* const form = std::get_if<nn::Compressed>(&module.layer->form)) {
      const ops::SparseWeight& weight = form->parts.at(next[module.layer]++).weight;
      result.bytes += weight.bytes(), result.dense_bytes += weight.dense_bytes();
      stored += double(weight.stored);
    } else {
      const uint64_t bytes = uint64_t(elements) * size_of(module.layer->weight.dtype());
      result.bytes += bytes, result.dense_bytes += bytes;
      stored += elements;
    }
  }
  result.weight_sparsity = all > 0 ? 1 - stored / all : 0;
  return result;
}

DecodeTimes time_generation(const models::LanguageModel& model, std::span<const int64_t> prompt,
                            const TimingOptions& options) {
  check(options.new_tokens >= 2, "timing: ", options.new_tokens, " new tokens; expected 2 or more");
  check(options.repeats >= 1 && options.warmups >= 0, "timing: ", options.repeats, " repeats after ",
        options.warmups);
  const int64_t given = int64_t(prompt.size());
  check(given >= 1 && given + options.new_tokens - 1 <= model.longest(), "timing: ", given, " tokens and ",
        options.new_tokens, " new ones; the model takes ", model.longest());
  const Device device = model.device();
  models::Generator generator(model, 1, given + options.new_tokens - 1);
  const models::Generator::Texts prompts{{prompt.begin(), prompt.end()}};
  DecodeTimes times;
  for (int repeat = 0; repeat < options.warmups + options.repeats; ++repeat) {
    check_interrupt();
    device.synchronize();
    const auto begin = Clock::now();
    auto first = begin, last = begin;
    generator(prompts, {.most_tokens = options.new_tokens, .sampling = {.temperature = 0}},
              [&](int64_t, int64_t) {
                last = Clock::now();
                if (first == begin) first = last;
                return true;
              });
    if (repeat < options.warmups) continue;
    times.ttft_ms.push_back(milliseconds(begin, first));
    times.tpot_ms.push_back(milliseconds(first, last) / double(options.new_tokens - 1));
  }
  return times;
}

std::vector<std::pair<std::string, double>> time_layers(models::LanguageRef model,
                                                        std::span<const int64_t> prompt, int64_t steps) {
  const NoTape no_tape;
  const Device device = model.device();
  std::vector<std::pair<std::string, double>> layers;
  std::map<std::string, size_t> places;
  Clock::time_point before;
  const auto count = [&](const nn::LinearCall& call) {
    device.synchronize();
    const auto now = Clock::now();
    const auto [found, is_new] = places.try_emplace(call.name, layers.size());
    if (is_new) layers.emplace_back(call.name, 0);
    layers[found->second].second += milliseconds(before, now) / double(steps);
    before = Clock::now();
  };
  model.visit([&](const auto& held) {
    const int64_t given = int64_t(prompt.size());
    nn::KvCache cache = held.make_cache(1, given + steps);
    held.prefill(Tensor::from(prompt, {given}, device), nn::Sequences::uniform(1, given), cache);
    const Tensor next = Tensor::from(prompt.last(1), {1, 1}, device);
    const nn::Observe scope(held, {.forward = count});
    for (int64_t step = 0; step < steps; ++step) {
      check_interrupt();
      device.synchronize();
      before = Clock::now();
      held.decode(next, cache);
    }
  });
  return layers;
}

}  // namespace tessera::sparsity
