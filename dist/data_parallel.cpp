#include "dist/data_parallel.h"

#include <algorithm>
#include <sstream>

#include "ops/pointwise/pointwise.h"
#include "runtime/allocator.h"
#include "tensor/kernels.h"

namespace tessera::dist {
namespace {

/// Elements that are divided at a time: the scratch memory of a mean.
constexpr int64_t kBlock = int64_t{1} << 24;

void check_same_parameters(const optim::Optimizer& optimizer, const World& world) {
  std::ostringstream list;
  for (const auto& [name, tensor] : optimizer.parameters())  // without the device, which is each rank's own
    list << name << ' ' << tensor.dtype() << tensor.shape() << '\n';
  const std::string text = list.str();
  std::ostringstream own;
  own << optimizer.parameters().size() << " parameters, digest " << std::hash<std::string>()(text) << ", of "
      << optimizer.gradients().count() << " elements";
  const std::vector<std::string> all = world.host().gather_texts(own.str());
  for (size_t r = 1; r < all.size(); ++r)
    check(all[r] == all[0], "data parallel: rank ", r, " has ", all[r], "; rank 0 has ", all[0],
          ": all ranks must have the same model");
}

}  // namespace

DataParallel::DataParallel(optim::Optimizer& optimizer, const World& world,
                           const DataParallelOptions& options) {
  if (world.size() == 1) return;
  const Device device = optimizer.gradients().device();
  const comm::Communicator data = world.data(device);
  check_same_parameters(optimizer, world);
  for (const nn::NamedParameter& parameter : optimizer.parameters()) {
    const Tensor weight = parameter.tensor.detach(), dense = weight.packed();
    data.broadcast(dense, 0);
    if (!dense.shares_storage(weight)) weight.copy_from(dense);
  }
  optimizer.sync_masters();
  const double factor = options.mean ? 1.0 / world.size() : 1.0;
  optimizer.on_gradients([data, factor](const Tensor& gradients) {
    data.all_reduce(gradients);
    if (factor == 1) return;
    const NoTape off;
    for (int64_t begin = 0; begin < gradients.count(); begin += kBlock) {
      const Tensor block = gradients.slice(0, begin, std::min(begin + kBlock, gradients.count()));
      block.copy_from(ops::scale(block, factor));
    }
  });
}

Share share_of(int micro_batches, int rank, int ranks) {
  check(micro_batches >= ranks && micro_batches % ranks == 0, "a step of ", micro_batches,
        " micro-batches on ", ranks, " ranks; expected a multiple of the ranks");
  const int count = micro_batches / ranks;
  return {rank * count, count};
}

void GradientTree::add(int index, int count) {
  const Tensor& gradients = optimizer_->gradients();
  optimizer_->complete_gradients();
  // A binary counter: bit i of `index` says that sums_[i] holds 2^i micro-batches that wait for their
  // neighbours.
  size_t level = 0;
  for (; index >> level & 1; ++level) accumulate(gradients, sums_[level]);
  if (index + 1 < count) {
    if (level == sums_.size()) {
      const MemoryTag tag("optimizer");
      sums_.push_back(Tensor::empty_packed(gradients.shape(), gradients.dtype(), gradients.device()));
    }
    sums_[level].copy_from(gradients);
    return optimizer_->zero_grad();
  }
  // A number of micro-batches that is no power of two leaves sums waiting, the smaller ones last.
  for (++level; level <= sums_.size(); ++level)
    if (index >> level & 1) accumulate(gradients, sums_[level]);
}

}  // namespace tessera::dist
