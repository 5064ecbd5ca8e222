#pragma once

#include <functional>

#include "runtime/capture.h"
#include "train/job.h"

namespace tessera::train {

struct StepOptions {
  bool graph = true;          // capture the step on a GPU, where the job's batches have fixed shapes
  bool check_finite = false;  // TapeOptions::check_finite; turns the graph off
};

/// One training step of a job: forward, backward, update, and gradients ready for the next one; eager or
/// captured. The only place that drives these; the trainer, benchmarks and searches for the largest batch run
/// it. The job must outlive it.
///
/// With one micro-batch per step the whole step is one graph. With several, one graph is a micro-batch and
/// another the update: a graph either overwrites the gradients or adds to them, so all micro-batches add (but
/// for the very first, which finds nothing), and the update leaves zeros.
class Step {
 public:
  explicit Step(Job& job, const StepOptions& options = {});
  Step(const Step&) = delete;
  /// Runs all micro-batches and the update; load(k) brings micro-batch k before it is used.
  void operator()(const std::function<void(int micro)>& load);
  /// The same on the batch that the job holds.
  void operator()() {
    (*this)([](int) {});
  }
  /// The mean of the micro-batches' losses of the last step: f32, rank 0, on the device, the same memory
  /// after every step.
  const Tensor& loss() const { return loss_; }
  /// Whether steps are captured.
  bool is_captured() const { return graph_; }

 private:
  void micro_batch();
  void update();

  Job& job_;
  const StepOptions options_;
  const int micro_batches_;
  const bool graph_;
  Tensor loss_;
  Captured captured_, captured_update_;
};

}  // namespace tessera::train
