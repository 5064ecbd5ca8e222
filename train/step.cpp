#include "train/step.h"

#include "autograd/tape.h"
#include "ops/pointwise/pointwise.h"
#include "runtime/allocator.h"
#include "runtime/error.h"

namespace tessera::train {

namespace {

int rank_of(const StepOptions& options) {
  return options.world ? options.world->rank() : 0;
}
int ranks_of(const StepOptions& options) {
  return options.world ? options.world->size() : 1;
}

optim::Optimizer& divisible(const Job& job) {
  optim::Optimizer* const optimizer = job.trained_by().counted();
  check(optimizer != nullptr,
        "train: several ranks, and sums in the global order, need an optimizer of optim/");
  return *optimizer;
}

/// The sum by the tree of dist::GradientTree.
float sum_in_tree(std::vector<float> values) {
  for (size_t step = 1; step < values.size(); step *= 2)
    for (size_t i = 0; i + step < values.size(); i += 2 * step) values[i] += values[i + step];
  return values[0];
}

}  // namespace

Step::Step(Job& job, const StepOptions& options)
    : job_(job),
      options_(options),
      micro_batches_(job.info().micro_batches),
      share_(dist::share_of(micro_batches_, rank_of(options), ranks_of(options))),
      tree_(options.global_order && micro_batches_ > 1),
      graph_(options.graph && !options.check_finite && job.device().is_cuda() && job.info().fixed_shapes),
      loss_(Tensor::zeros({}, DType::f32, job.device())),
      captured_(job.device(),
                [this] {
                  micro_batch();
                  if (share_.count == 1) update();
                }),
      captured_update_(job.device(), [this] { update(); }) {
  check(micro_batches_ >= 1, "train: a step of ", micro_batches_, " micro-batches; expected at least 1");
  if (ranks_of(options) > 1) {
    reduce_.emplace(divisible(job), *options.world, dist::DataParallelOptions{.mean = false});
    job.divide(share_);
  }
  if (tree_) {
    sums_.emplace(divisible(job));
    losses_ = Tensor::zeros({share_.count}, DType::f32, job.device());
  }
  job.trained_by().zero_grad();
}

void Step::operator()(const std::function<void(int micro)>& load) {
  if (share_.count > 1) loss_.fill(0);
  for (int index = 0; index < share_.count; ++index) {
    load(share_.first + index);
    if (graph_) {
      run(captured_, share_.count == 1);
    } else {
      micro_batch();
      if (share_.count == 1) update();
    }
    if (tree_) add_to_tree(index);
  }
  if (share_.count > 1) graph_ ? run(captured_update_, true) : update();
}

/// Eagerly where the optimizer needs the host; the next step is captured again.
void Step::run(Captured& captured, bool updates) {
  std::optional<EagerScope> eager;
  if (updates && job_.trained_by().waits_for_host()) eager.emplace();
  captured();
}

void Step::add_to_tree(int index) {
  losses_.at({index}).copy_from(loss_);
  if (share_.count > 1) sums_->add(index, share_.count);
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
    if (tree_ || share_.count == 1)
      loss_.copy_from(share.detach());
    else
      loss_.copy_from(ops::add(loss_, share.detach().to(DType::f32)));
    tape.backward(share);
  }
}

void Step::update() {
  const OptimizerRef& optimizer = job_.trained_by();
  optimizer.step();
  job_.updated();
  if (share_.count == 1 || tree_)
    optimizer.zero_grad();
  else
    optimizer.clear_gradients();
}

double Step::mean_loss() const {
  const int ranks = ranks_of(options_);
  if (ranks == 1 && !tree_) return loss_.item<double>();
  const Tensor own = (tree_ ? losses_ : loss_.reshape({1})).to(Device::cpu());
  const Tensor all = Tensor::empty_packed({own.count() * ranks}, DType::f32, Device::cpu());
  if (ranks > 1)
    options_.world->host().all_gather(own, all);
  else
    all.copy_from(own);
  return double(sum_in_tree(all.to_vector<float>()));
}

}  // namespace tessera::train
