#pragma once

#include <functional>

#include "dist/data_parallel.h"
#include "runtime/capture.h"
#include "train/job.h"

namespace tessera::train {

struct StepOptions {
  bool graph = true;          // capture the step on a GPU, where the job's batches have fixed shapes
  bool check_finite = false;  // TapeOptions::check_finite; turns the graph off
  /// The ranks that make the step together; null: this process alone. The job's optimizer must be one of
  /// optim/, on which Step puts a dist::DataParallel.
  const dist::World* world = nullptr;
  /// The gradients of a step's micro-batches are added in the order of a binary tree over all of them, and
  /// each draws random numbers by its index: the same bits on any number of ranks. Else each rank adds to its
  /// gradients in place, which needs no further arenas. Throws for a job with several ranks per micro-batch,
  /// whose gradients are sums of shares that depend on their number.
  bool global_order = false;
  /// MiB of gradients that are summed over the ranks at once next to the last backward pass of a step; 0: all
  /// of them after it. No bits depend on it. Throws for a job with several ranks per micro-batch, whose
  /// backward pass makes calls of its own.
  double bucket_mb = 0;
  dist::Exchange exchange = dist::Exchange::automatic;  // who sums gradients over the ranks
};

/// One training step of a job: forward, backward, update, and gradients ready for the next one; eager or
/// captured, on one rank or several. The only place that drives these; the trainer, benchmarks and searches
/// for the largest batch run it. The job must outlive it.
///
/// With one micro-batch per step (of this rank) the whole step is one graph. With several, one graph is a
/// micro-batch and another the update: a graph either overwrites the gradients or adds to them, so all
/// micro-batches add (but for the very first, which finds nothing), and the update leaves zeros. In the
/// global order all overwrite, and their sums are formed between them (dist::GradientTree). Where gradients
/// travel next to the backward pass, the last micro-batch and the update are one graph: branches of a graph
/// end in it. Gradients that are spread over the ranks (optim::Sharding::gradients) travel in every
/// micro-batch: all of them are one graph, after each of which the rank's parts are added by the tree.
class Step {
 public:
  explicit Step(Job& job, const StepOptions& options = {});
  Step(const Step&) = delete;
  /// Runs this rank's micro-batches and the update; load(k) brings micro-batch k of the step before it is
  /// used.
  void operator()(const std::function<void(int micro)>& load);
  /// The same on the batch that the job holds.
  void operator()() {
    (*this)([](int) {});
  }
  /// The mean of the micro-batches' losses of the last step: f32, rank 0, on the device, the same memory
  /// after every step. Of several ranks, or in the global order, only a share of it: call mean_loss().
  const Tensor& loss() const { return loss_.sum; }
  /// The same as a number, of all ranks, which all call it; waits for the device.
  double mean_loss() const;
  /// The same of Job::penalties()[i].
  double mean_penalty(size_t i) const;
  /// Milliseconds of the last step in which only the communication ran; waits for the device. -1
  /// on one rank.
  double exposed_ms() const { return reduce_ ? reduce_->exposed_ms() : -1; }
  /// How gradients are summed over the ranks.
  dist::Exchange exchange() const { return reduce_ ? reduce_->exchange() : dist::Exchange::communicator; }
  /// Whether a Step of this job with these options captures its steps.
  static bool captures(const Job& job, const StepOptions& options);
  /// DataParallel::kept(), of the steps so far.
  std::vector<std::string> kept() const { return reduce_ ? reduce_->kept() : std::vector<std::string>(); }

 private:
  void run(const std::function<void(int micro)>& load);
  void body();
  void micro_batch();
  void update();
  void replay(Captured& captured, bool updates);
  bool ends_with_update() const { return share_.count == 1 || (overlaps_ && last_ && !spreads_); }
  void add_to_tree(int index);
  /// A number per micro-batch: their sum and, where they are added by the tree, the numbers themselves.
  struct Logged {
    Tensor sum, each;
  };
  void note(const Logged& logged, const Tensor& share);
  double mean_of(const Logged& logged) const;

  Job& job_;
  const StepOptions options_;
  const int micro_batches_;  // on all ranks
  const int ranks_each_;     // JobInfo::ranks_per_micro_batch
  const bool spreads_;       // the gradients over the ranks: every pass sends its own
  const dist::Share share_;  // this rank's
  const bool tree_, graph_, overlaps_;
  bool last_ = true;        // the micro-batch in progress, of the share
  bool connected_ = false;  // a step has been made: the ranks' connections are
  Logged loss_;
  std::vector<Logged> penalties_;
  std::optional<dist::DataParallel> reduce_;
  std::optional<dist::GradientTree> sums_;
  Captured captured_, captured_update_;
};

}  // namespace tessera::train
