#include "train/step.h"

#include "autograd/tape.h"
#include "ops/pointwise/pointwise.h"
#include "runtime/allocator.h"
#include "runtime/error.h"

namespace tessera::train {

Step::Step(Job& job, const StepOptions& options)
    : job_(job),
      options_(options),
      micro_batches_(job.info().micro_batches),
      graph_(options.graph && !options.check_finite && job.device().is_cuda() && job.info().fixed_shapes),
      loss_(Tensor::zeros({}, DType::f32, job.device())),
      captured_(job.device(),
                [this] {
                  micro_batch();
                  if (micro_batches_ == 1) update();
                }),
      captured_update_(job.device(), [this] { update(); }) {
  check(micro_batches_ >= 1, "train: a step of ", micro_batches_, " micro-batches; expected at least 1");
  job.trained_by().zero_grad();
}

void Step::operator()(const std::function<void(int micro)>& load) {
  if (micro_batches_ > 1) loss_.fill(0);
  for (int micro = 0; micro < micro_batches_; ++micro) {
    load(micro);
    if (graph_) {
      captured_();
    } else {
      micro_batch();
      if (micro_batches_ == 1) update();
    }
  }
  if (micro_batches_ > 1) graph_ ? captured_update_() : update();
}

void Step::micro_batch() {
  const MemoryTag tag("activations");
  Tape tape({.check_finite = options_.check_finite, .loss_scale = job_.trained_by().loss_scale()});
  const Tensor loss = job_.loss();
  if (micro_batches_ == 1) {
    loss_.copy_from(loss.detach());
    tape.backward(loss);
  } else {
    const Tensor share = ops::scale(loss, 1.0 / micro_batches_);
    loss_.copy_from(ops::add(loss_, share.detach().to(DType::f32)));
    tape.backward(share);
  }
}

void Step::update() {
  const OptimizerRef& optimizer = job_.trained_by();
  optimizer.step();
  job_.updated();
  if (micro_batches_ == 1)
    optimizer.zero_grad();
  else
    optimizer.clear_gradients();
}

}  // namespace tessera::train
