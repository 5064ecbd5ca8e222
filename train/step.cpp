#include "train/step.h"

#include <bit>

#include "autograd/tape.h"
#include "ops/pointwise/pointwise.h"
#include "ops/shape/shape.h"
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

/// The micro-batches of a rank, which it shares with the others of its group.
dist::Share own_share(int micro_batches, int ranks_each, const StepOptions& options, bool spread) {
  const int ranks = ranks_of(options);
  check(ranks % ranks_each == 0, "train: each micro-batch is computed by ", ranks_each,
        " ranks together, and there ", ranks == 1 ? "is " : "are ", ranks,
        "; expected a multiple, by a launcher such as tessera launch -n ", ranks_each);
  return dist::share_of(micro_batches, rank_of(options) / ranks_each, ranks / ranks_each, spread);
}

optim::Optimizer& divisible(const Job& job) {
  optim::Optimizer* const optimizer = job.trained_by().counted();
  check(optimizer != nullptr,
        "train: several ranks, and sums in the global order, need an optimizer of optim/");
  check(optimizer->missing() == optim::MissingGrad::zero,
        "train: several ranks, and sums in the global order, take missing gradients as zero; make the "
        "optimizer with MissingGrad::zero");
  return *optimizer;
}

/// Whether the ranks hold parts of the gradients alone.
bool spreads(const Job& job, const StepOptions& options) {
  const optim::Optimizer* const optimizer = job.trained_by().counted();
  return ranks_of(options) > 1 && optimizer && optimizer->ring();
}

void check_number(const char* what, const Tensor& value) {
  check(value.defined() && value.count() == 1, "job: ", what, " is ", describe(value),
        "; it must have one element: reduce it with ops::mean or ops::sum");
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
      ranks_each_(job.info().ranks_per_micro_batch),
      spreads_(spreads(job, options)),
      share_(own_share(micro_batches_, ranks_each_, options, spreads_)),
      tree_(micro_batches_ > 1 && (options.global_order || (spreads_ && share_.count > 1))),
      graph_(captures(job, options)),
      overlaps_(ranks_of(options) > 1 && options.bucket_mb > 0),
      loss_{Tensor::zeros({}, DType::f32, job.device()), {}},
      penalties_(job.info().penalties.size()),
      captured_(job.device(), [this] { body(); }),
      captured_update_(job.device(), [this] { update(); }) {
  check(micro_batches_ >= 1, "train: a step of ", micro_batches_, " micro-batches; expected at least 1");
  check(ranks_each_ == 1 || !options.global_order,
        "train: sums in the global order are those of any number of ranks, but ", ranks_each_,
        " ranks share each micro-batch; leave the order to the world");
  check(ranks_each_ == 1 || !(overlaps_ || spreads_), "train: gradients cannot be ",
        spreads_ ? "spread over the ranks (--zero 2)" : "summed",
        " next to a backward pass that makes calls of its own (", ranks_each_,
        " ranks share each micro-batch); ",
        spreads_ ? "spread the optimizer's states alone (--zero 1)" : "sum them after it");
  check(
      !spreads_ || !options.global_order || share_.count == 1 ||
          std::has_single_bit(unsigned(ranks_of(options))),
      "train: sums of spread gradients in the global order begin with those over the ranks, which must be a "
      "power of two, or have one micro-batch each; here are ",
      ranks_of(options), " ranks with ", share_.count, " each");
  if (ranks_of(options) > 1) {
    job.connect(*options.world);
    dist::DataParallelOptions reduction{.mean = false, .exchange = options.exchange};
    if (overlaps_) reduction.bucket_mb = options.bucket_mb;
    reduce_.emplace(divisible(job), *options.world, reduction);
    job.divide(share_);
  }
  for (Logged& penalty : penalties_) penalty.sum = Tensor::zeros({}, DType::f32, job.device());
  if (tree_) {
    sums_.emplace(divisible(job));
    loss_.each = Tensor::zeros({share_.count}, DType::f32, job.device());
    for (Logged& penalty : penalties_) penalty.each = Tensor::zeros({share_.count}, DType::f32, job.device());
  }
  job.trained_by().zero_grad();
}

bool Step::captures(const Job& job, const StepOptions& options) {
  return options.graph && !options.check_finite && job.device().is_cuda() && job.info().fixed_shapes;
}

void Step::operator()(const std::function<void(int micro)>& load) {
  try {
    run(load);
  } catch (const comm::RankFailure&) {
    throw;
  } catch (const std::exception& error) {
    // At once: calls in flight next to the computation may wait for ranks that wait for this one.
    if (options_.world) options_.world->fail(message_of(error));
    throw;
  }
}

void Step::run(const std::function<void(int micro)>& load) {
  // A graph of the last micro-batch has not run as any other before: its first step is eager throughout.
  std::optional<EagerScope> eager;
  if (graph_ && (overlaps_ || spreads_) && share_.count > 1 && !connected_) eager.emplace();
  if (share_.count > 1) loss_.sum.fill(0);
  if (share_.count > 1)
    for (const Logged& penalty : penalties_) penalty.sum.fill(0);
  for (int index = 0; index < share_.count; ++index) {
    load(share_.at(index));
    last_ = index + 1 == share_.count;
    graph_ ? replay(captured_, ends_with_update()) : body();
    if (tree_) add_to_tree(index);
  }
  if (!ends_with_update()) graph_ ? replay(captured_update_, true) : update();
  connected_ = true;
}

/// Eagerly where the optimizer needs the host; the next step is captured again.
void Step::replay(Captured& captured, bool updates) {
  std::optional<EagerScope> eager;
  if (updates && job_.trained_by().waits_for_host()) eager.emplace();
  captured();
}

void Step::body() {
  // The last micro-batch is another graph, whose memory the others may use.
  if (CaptureSession* const session = CaptureSession::current())
    session->add({.key = this, .still_matches = [this, last = last_] { return spreads_ || last == last_; }});
  if (spreads_)
    reduce_->overlap();
  else if (overlaps_ && last_)
    reduce_->overlap([this](int64_t begin, int64_t end) {
      if (sums_ && share_.count > 1) sums_->finish(share_.count, begin, end);
    });
  micro_batch();
  if (spreads_ && share_.count > 1) reduce_->collect();
  if (ends_with_update()) update();
}

void Step::add_to_tree(int index) {
  loss_.each.at({index}).copy_from(loss_.sum);
  for (const Logged& penalty : penalties_) penalty.each.at({index}).copy_from(penalty.sum);
  if (share_.count > 1 && (spreads_ || !(overlaps_ && last_))) sums_->add(index, share_.count);
}

void Step::micro_batch() {
  const MemoryTag tag("activations");
  Tape tape({.check_finite = options_.check_finite, .loss_scale = job_.trained_by().loss_scale()});
  const auto share_of = [&](const Tensor& value) {
    const Tensor number = value.rank() == 0 ? value : ops::reshape(value, {});
    return micro_batches_ == 1 ? number : ops::scale(number, 1.0 / micro_batches_);
  };
  const Tensor loss = job_.loss();
  check_number("the loss", loss);
  Tensor total = share_of(loss);
  note(loss_, total);
  const std::vector<Tensor> penalties = job_.penalties();
  check(penalties.size() == penalties_.size(), "job: penalties() gave ", penalties.size(),
        " tensors, and info() names ", penalties_.size(),
        "; give one for each name, undefined where it is 0");
  for (size_t i = 0; i < penalties.size(); ++i) {
    if (penalties[i].defined()) check_number("a penalty", penalties[i]);
    const Tensor penalty = penalties[i].defined() ? share_of(penalties[i]) : Tensor();
    note(penalties_[i], penalty);
    if (penalty.defined()) total = ops::add(total, penalty);
  }
  tape.backward(total);
}

/// An undefined share is 0.
void Step::note(const Logged& logged, const Tensor& share) {
  if (!share.defined()) {
    if (tree_ || share_.count == 1) logged.sum.fill(0);
  } else if (tree_ || share_.count == 1)
    logged.sum.copy_from(share.detach());
  else
    logged.sum.copy_from(ops::add(logged.sum, share.detach().to(DType::f32)));
}

void Step::update() {
  const OptimizerRef& optimizer = job_.trained_by();
  optimizer.step();
  job_.updated();
  // Zeros would count as gradients that have arrived.
  const optim::Optimizer* const counted = optimizer.counted();
  const bool skips = counted && counted->missing() == optim::MissingGrad::skip;
  if (share_.count == 1 || tree_ || skips)
    optimizer.zero_grad();
  else
    optimizer.clear_gradients();
}

double Step::mean_loss() const {
  return mean_of(loss_);
}

double Step::mean_penalty(size_t i) const {
  return mean_of(penalties_[i]);
}

double Step::mean_of(const Logged& logged) const {
  const int ranks = ranks_of(options_);
  if (ranks == 1 && !tree_) return logged.sum.item<double>();
  const Tensor own = (tree_ ? logged.each : logged.sum.reshape({1})).to(Device::cpu());
  const Tensor all = Tensor::empty_packed({own.count() * ranks}, DType::f32, Device::cpu());
  if (ranks > 1)
    options_.world->host().all_gather(own, all);
  else
    all.copy_from(own);
  const std::vector<float> by_rank = all.to_vector<float>();
  if (!spreads_ || !tree_) return double(sum_in_tree(by_rank));
  std::vector<float> values;  // by micro-batch: the ranks take them in turn
  for (int k = 0; k < share_.count; ++k)
    for (int r = 0; r < ranks; ++r) values.push_back(by_rank[size_t(r * share_.count + k)]);
  return double(sum_in_tree(std::move(values)));
}

}  // namespace tessera::train
