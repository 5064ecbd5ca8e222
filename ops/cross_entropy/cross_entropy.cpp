#include "ops/cross_entropy/cross_entropy.h"

#include "autograd/tape.h"
#include "ops/cross_entropy/cross_entropy_kernels.h"
#include "runtime/has_cuda.h"

namespace tessera::ops {
namespace {

void check_arguments(const Tensor& logits, const Tensor& targets, const CrossEntropyOptions& options) {
  check(logits.defined() && targets.defined(), "cross_entropy: ", logits.defined() ? "targets" : "logits",
        " is undefined");
  check(logits.rank() > 0, "cross_entropy: logits is ", describe(logits), ", of rank 0; expected [..., V]");
  check(logits.shape().without(-1) == targets.shape(), "cross_entropy: targets is ", describe(targets),
        ", but logits is ", describe(logits), "; expected targets of shape ", logits.shape().without(-1));
  check(targets.dtype() == DType::i64 || targets.dtype() == DType::i32, "cross_entropy: targets is ",
        describe(targets), "; expected i64 or i32");
  check(targets.device() == logits.device(), "cross_entropy: targets is ", describe(targets),
        ", but logits is ", describe(logits), "; move one of them with to(device)");
  check(logits.size(-1) > 0 || targets.count() == 0, "cross_entropy: logits is ", describe(logits),
        ", without classes; expected [..., V] with V >= 1");
  check(0 <= options.label_smoothing && options.label_smoothing <= 1, "cross_entropy: label_smoothing is ",
        options.label_smoothing, "; expected 0 to 1");
  if (!options.overwrite_logits) return;
  check(options.reduction != Reduction::none,
        "cross_entropy: overwrite_logits with the reduction none; expected mean or sum");
  check(logits.has_rows() && !logits.layout().is_expanded(), "cross_entropy: overwrite_logits, but logits ",
        describe(logits), " has no rows (it is transposed or expanded); clone() it");
  const GradState* memory = logits.grad_state().get();
  while (memory && memory->view) memory = memory->view->base.get();
  check(!memory || memory->tape != 0, "cross_entropy: overwrite_logits, but logits ", describe(logits),
        " is a leaf, or a view of one; expected a result of the tape with memory of its own");
}

/// cross_entropy with overwrite_logits while a tape records.
Tensor in_place(Tape& tape, const Tensor& logits, const Tensor& targets, const CrossEntropyOptions& options) {
  const DType dtype = sum_dtype(logits.dtype());
  const Device device = logits.device();
  Tensor loss = Tensor::empty_packed(Shape{}, dtype, device);
  const Tensor scale = tape.initial_gradient(dtype, device);
  {
    const Tensor count = Tensor::empty({}, dtype, device), none, labels = targets.packed();
    const CrossEntropyForward args{loss, none, none, count, logits, labels, options};
    if (device.is_cpu()) {
      cross_entropy_in_place_cpu(args, scale);
    } else if constexpr (kCuda) {
      cross_entropy_in_place_cuda(args, scale);
    }
  }
  logits.bump_version();
  tape.record("cross_entropy", {&logits, &targets}, {&loss}, [dlogits = Saved(logits), scale](Backward& b) {
    const Tensor& gradient = dlogits.get();
    const Tensor dloss = b.grad().packed();
    if (gradient.device().is_cpu()) {
      cross_entropy_scale_cpu(gradient, dloss, scale);
    } else if constexpr (kCuda) {
      cross_entropy_scale_cuda(gradient, dloss, scale);
    }
    b.accumulate(0, gradient);
  });
  return loss;
}

}  // namespace

Tensor cross_entropy(const Tensor& logits, const Tensor& targets, const CrossEntropyOptions& options,
                     Site site) {
  const CallScope call(site);
  check_arguments(logits, targets, options);
  Tape* const tape = Tape::recording(logits);
  if (tape && options.overwrite_logits) return in_place(*tape, logits, targets, options);
  const DType dtype = sum_dtype(logits.dtype());
  const Device device = logits.device();
  const bool each = options.reduction == Reduction::none;
  Tensor loss = Tensor::empty_packed(each ? targets.shape() : Shape{}, dtype, device);
  const Tensor top = Tensor::empty({targets.count()}, dtype, device), log_sum = Tensor::empty_like(top),
               count = Tensor::empty({}, dtype, device);
  {
    const Tensor from = logits.with_rows(), labels = targets.packed();
    const CrossEntropyForward args{loss, top, log_sum, count, from, labels, options};
    if (device.is_cpu()) {
      cross_entropy_forward_cpu(args);
    } else if constexpr (kCuda) {
      cross_entropy_forward_cuda(args);
    }
  }
  if (tape) {
    tape->record("cross_entropy", {&logits, &targets}, {&loss},
                 [logits = Saved(logits), targets = Saved(targets), top = Saved(top),
                  log_sum = Saved(log_sum), count = Saved(count), options](Backward& b) {
                   const Tensor from = logits.get().with_rows(), labels = targets.get().packed(),
                                dloss = b.grad().packed();
                   Tensor dlogits = Tensor::empty_like(from);
                   const CrossEntropyBackward args{dlogits,     dloss, top.get(), log_sum.get(),
                                                   count.get(), from,  labels,    options};
                   if (from.device().is_cpu()) {
                     cross_entropy_backward_cpu(args);
                   } else if constexpr (kCuda) {
                     cross_entropy_backward_cuda(args);
                   }
                   b.give(0, std::move(dlogits));
                 });
  }
  return loss;
}

}  // namespace tessera::ops
