#include "bench/default_sizes.h"

#include <algorithm>

namespace tessera::bench {
namespace {

/// What a forward pass on a CPU may take: 20 ms of GEMMs on two cores, and some 10 ms of elementwise work in
/// f32.
constexpr double kMostFlops = 2e9, kMostBytes = 32e6;
/// Sizes up to here stay: heads, the width of a head, sizes of a block.
constexpr int64_t kSmall = 128;

bool fits(const ops::OpSpec& op, const ops::Case& c) {
  const ops::Problem problem = op.problem(c.dims, ops::complete(op, c.attrs));
  double bytes = 4 * problem.forward_elements + problem.forward_bytes;
  for (const ops::InputCase& input : problem.inputs)
    if (input.fill != ops::Fill::absent) bytes = std::max(bytes, 4 * double(input.shape.count()));
  return problem.forward_flops <= kMostFlops && bytes <= kMostBytes;
}

/// The sizes of a case: its dimensions, and the attributes that are numbers of rows or elements.
std::vector<int64_t*> sizes_of(ops::Case& c, std::vector<std::pair<std::string, int64_t>>& attrs) {
  std::vector<int64_t*> sizes;
  for (auto& [name, size] : c.dims) sizes.push_back(&size);
  for (auto& [name, size] : attrs) sizes.push_back(&size);
  return sizes;
}

/// Halves the largest size until the case fits, and with it every size of at least half of it: so a square
/// stays a square, and of two sizes the one that is no larger than the other remains so.
ops::Case smaller(const ops::OpSpec& op, ops::Case c) {
  std::vector<std::pair<std::string, int64_t>> attrs;
  for (const auto& [name, value] : c.attrs.values())
    if (const int64_t* const size = std::get_if<int64_t>(&value)) attrs.emplace_back(name, *size);
  const std::vector<int64_t*> sizes = sizes_of(c, attrs);
  while (!fits(op, c)) {
    int64_t largest = 0;
    for (const int64_t* const size : sizes) largest = std::max(largest, *size);
    if (largest <= kSmall) break;
    for (int64_t* const size : sizes)
      if (*size > kSmall && 2 * *size >= largest) *size /= 2;
    for (const auto& [name, size] : attrs) c.attrs.set(name, size);
  }
  return c;
}

}  // namespace

std::vector<ops::Case> default_cases(const ops::OpSpec& op, Device device) {
  if (!device.is_cpu()) return op.benches;
  if (!op.cpu_benches.empty()) return op.cpu_benches;
  std::vector<ops::Case> cases;
  for (const ops::Case& c : op.benches) {
    const ops::Case one = smaller(op, c);
    const bool known = std::ranges::any_of(cases, [&](const ops::Case& other) {
      return other.dims == one.dims && other.attrs.values() == one.attrs.values();
    });
    if (!known) cases.push_back(one);
  }
  return cases;
}

BatchSize default_language_batch(Device device) {
  return device.is_cpu() ? BatchSize{1, 128} : BatchSize{16, 1024};
}

std::vector<BatchSize> default_bert_batches(Device device) {
  if (device.is_cpu()) return {{2, 128}};
  return {{32, 128}, {16, 512}};
}

int64_t default_layers_batch(Device device) {
  return device.is_cpu() ? 2 : 16;
}

std::vector<FfnShape> default_ffn_shapes(Device device) {
  if (device.is_cpu()) return {{256, 512, 2048}};
  return {{16384, 4096, 16384}, {16384, 2048, 8192}};
}

DecodeSizes default_decode_sizes(Device device) {
  return device.is_cpu() ? DecodeSizes{"llama-130m", 32, 3, 1} : DecodeSizes{"llama-2-7b", 128, 10, 2};
}

int64_t default_optim_parameters(Device device) {
  const int64_t matrix = 2048 * 2048;
  return (device.is_cpu() ? 4 : 31) * matrix;
}

int64_t default_copy_mib(Device device) {
  return device.is_cpu() ? 64 : 1024;
}

}  // namespace tessera::bench
