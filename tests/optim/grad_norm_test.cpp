#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "gradients.h"
#include "optim/kernels.h"
#include "runtime/has_cuda.h"

/// The order in which the squares of the gradients are added.

namespace tessera::optim {
namespace {

class GradNormOn : public OnDevice {};
INSTANTIATE_TEST_SUITE_P(Device, GradNormOn, testing::Values("cpu", "cuda"));

/// Several blocks in one parameter, one that is not full, less than one, rows with padding, nothing.
const std::vector<Shape> kNormShapes{{3, 16384}, {70000}, {5}, {40, 1365}, {}, {0, 7}, {513, 1025}, {16384}};

std::vector<nn::NamedParameter> parameters_on(Device device, DType dtype) {
  std::vector<nn::NamedParameter> list;
  for (size_t i = 0; i < kNormShapes.size(); ++i)
    list.push_back({"p" + std::to_string(i), new_parameter(i, kNormShapes[i], dtype, device)});
  return list;
}

template <class T>
Tensor table_on(Device device, const std::vector<T>& table) {
  std::vector<uint8_t> bytes(table.size() * sizeof(T));
  std::memcpy(bytes.data(), table.data(), bytes.size());
  return Tensor::from(bytes, {int64_t(bytes.size())}, device);
}

double norm_of(Device device, const Tensor& arena, const std::vector<NormBlock>& blocks) {
  const Tensor table = table_on(device, blocks);
  const Tensor partials = Tensor::empty({int64_t(blocks.size())}, DType::f64, device),
               status = Tensor::zeros({kStatusSlots}, DType::f64, device),
               counts = Tensor::zeros({kCountSlots}, DType::i64, device);
  StepArgs args;
  args.gradients = arena.raw();
  args.norm_blocks = static_cast<const NormBlock*>(table.raw());
  args.norm_block_count = args.norm_slots = int64_t(blocks.size());
  args.status = status.data<double>();
  args.counts = counts.data<int64_t>();
  if (device.is_cpu()) {
    measure_cpu(arena.dtype(), args, partials.data<double>(), PrepareOptions());
  } else {
    if constexpr (kCuda) measure_cuda(device, args, partials.data<double>(), PrepareOptions());
  }
  return status.at({kNorm}).item<double>();
}

/// The blocks of each parameter, moved to other places in the arena: parameters lie in the order `order`.
std::vector<NormBlock> moved(const Packing& packing, const std::vector<size_t>& order) {
  std::vector<int64_t> sizes(order.size()), starts(order.size());
  size_t next = 0;
  std::vector<size_t> owner;
  for (const NormBlock& block : packing.norm_blocks()) {
    while (next + 1 < order.size() && packing.places()[next + 1].offset <= block.offset) ++next;
    owner.push_back(next), sizes[next] += block.elements;
  }
  int64_t at = 0;
  for (const size_t i : order) starts[i] = at, at += sizes[i];
  std::vector<NormBlock> blocks = packing.norm_blocks();
  for (size_t b = 0; b < blocks.size(); ++b)
    blocks[b].offset += starts[owner[b]] - packing.places()[owner[b]].offset;
  return blocks;
}

TEST_P(GradNormOn, DoesNotDependOnWhereParametersLieInTheArena) {
  const Packing packing("test", parameters_on(device(), DType::f32));
  const Tensor arena = packing.make_arena();
  const std::vector<double> values = numbers(77, arena.count());
  arena.copy_from(Tensor::from(values, arena.shape()));
  const double norm = norm_of(device(), arena, packing.norm_blocks());
  std::vector<size_t> order(kNormShapes.size());
  std::iota(order.begin(), order.end(), size_t{0});
  for (int turn = 0; turn < 3; ++turn) {
    std::rotate(order.begin(), order.begin() + 3, order.end());
    if (turn == 1) std::reverse(order.begin(), order.end());
    const std::vector<NormBlock> blocks = moved(packing, order);
    std::vector<double> elsewhere(values.size());
    for (size_t b = 0; b < blocks.size(); ++b)
      std::copy_n(values.begin() + packing.norm_blocks()[b].offset, blocks[b].elements,
                  elsewhere.begin() + blocks[b].offset);
    ASSERT_NE(elsewhere, values);
    EXPECT_EQ(norm_of(device(), Tensor::from(elsewhere, arena.shape()).to(DType::f32).to(device()), blocks),
              norm)
        << turn;
  }
  // The sum is right, too: the plain one in another order, in f64, of a quarter of a million squares.
  double sum = 0;
  for (const double value : values) sum += double(float(value)) * double(float(value));
  EXPECT_NEAR(norm / std::sqrt(sum), 1, 1e-12);
}

TEST_P(GradNormOn, BlocksCoverEveryParameterOnceAndNoneHoldsTwo) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    Packing packing("test", parameters_on(device(), dtype));
    const auto& blocks = packing.norm_blocks();
    size_t b = 0;
    for (size_t i = 0; i < kNormShapes.size(); ++i) {
      const int64_t begin = packing.places()[i].offset, end = i + 1 < kNormShapes.size()
                                                                  ? packing.places()[i + 1].offset
                                                                  : packing.make_arena().count();
      for (int64_t at = begin; at < end; at += blocks[b].elements, ++b) {
        ASSERT_LT(b, blocks.size());
        EXPECT_EQ(blocks[b].offset, at);
        EXPECT_EQ(blocks[b].elements, std::min(kNormBlockElements, end - at));
      }
    }
    EXPECT_EQ(b, blocks.size());
  }
}

}  // namespace
}  // namespace tessera::optim
