#include "optim/ema.h"

#include "optim/kernels.h"
#include "runtime/allocator.h"
#include "runtime/has_cuda.h"

namespace tessera::optim {

struct Ema::Buffers {
  explicit Buffers(const Optimizer& optimizer)
      : packing("Ema", optimizer.parameters(), optimizer.arrangement(), optimizer.states() == DType::bf16),
        optimizer(optimizer.state_) {}
  Packing packing;
  std::weak_ptr<Optimizer::State> optimizer;
  Tensor arena;
  Tensor masters;  // the optimizer's
  Tensor status;   // f64 [kStatusSlots]
};

Ema::Ema(Ema&&) noexcept = default;
Ema::~Ema() {
  if (!kept_.empty()) count_applied(-1);
}

Ema::Ema(const Optimizer& optimizer, const EmaOptions& options) : options_(options) {
  check(options.decay >= 0 && options.decay < 1, "Ema: decay ", options.decay, " must be in [0, 1)");
  const MemoryTag tag("ema");
  buffers_ = std::make_unique<Buffers>(optimizer);
  for (size_t i = 0; optimizer.sharding().parts > 1 && i < optimizer.parameters().size(); ++i)
    check(!buffers_->packing.has_master(i), "Ema: the master of ", optimizer.parameters()[i].name,
          " is spread over ", optimizer.sharding().parts,
          " ranks; averages of bf16 and f16 weights need masters that are whole on each rank (--zero 0)");
  buffers_->masters = optimizer.masters();  // the same arrangement: at the same offsets
  Packing& packing = buffers_->packing;
  packing.upload();
  buffers_->arena = packing.make_arena();
  buffers_->status = Tensor::zeros({kStatusSlots}, DType::f64, packing.device());
  counts_ = Tensor::zeros({kCountSlots}, DType::i64, packing.device());
  for (size_t i = 0; i < packing.parameters().size(); ++i) {
    averages_.push_back({packing.parameters()[i].name, packing.view(buffers_->arena, i)});
    averages_.back().tensor.copy_from(packing.has_master(i) ? packing.master_view(buffers_->masters, i)
                                                            : packing.parameters()[i].tensor);
  }
}

void Ema::update() {
  check(kept_.empty(), "Ema: update() while the averages are in the weights' place; call restore() first");
  const Packing& packing = buffers_->packing;
  StepArgs args;
  args.places = packing.place_table();
  args.chunks = packing.chunk_table();
  args.chunk_count = packing.chunk_count();
  args.states[0] = buffers_->arena.raw();
  args.masters = buffers_->masters.raw();
  args.status = buffers_->status.data<double>();
  args.counts = counts_.data<int64_t>();
  if (packing.device().is_cpu()) {
    prepare_average(args.status, args.counts, options_.decay, options_.warmup);
  } else {
    if constexpr (kCuda) prepare_average_cuda(packing.device(), args, options_.decay, options_.warmup);
  }
  optim::update(packing.device(), args, AverageRule{});
}

void Ema::count_applied(int by) const {
  if (const auto optimizer = buffers_->optimizer.lock()) optimizer->averages += by;
}

void Ema::apply() {
  check(kept_.empty(), "Ema: the averages are in the weights' place already; call restore() first");
  for (size_t i = 0; i < averages_.size(); ++i) {
    const Tensor weight = buffers_->packing.parameters()[i].tensor.detach();
    kept_.push_back(weight.clone());
    weight.copy_from(averages_[i].tensor);
  }
  if (!kept_.empty()) count_applied(1);
}

void Ema::restore() {
  check(kept_.size() == averages_.size(), "Ema: restore() without apply()");
  if (!kept_.empty()) count_applied(-1);
  for (size_t i = 0; i < averages_.size(); ++i) buffers_->packing.parameters()[i].tensor.copy_from(kept_[i]);
  kept_.clear();
}

const Tensor& Ema::average(size_t parameter) const {
  check(parameter < averages_.size(), "Ema: there is no parameter ", parameter, " of ", averages_.size());
  return averages_[parameter].tensor;
}

}  // namespace tessera::optim
