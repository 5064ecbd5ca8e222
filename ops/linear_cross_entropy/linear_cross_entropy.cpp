#include "ops/linear_cross_entropy/linear_cross_entropy.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "autograd/tape.h"
#include "ops/cross_entropy/cross_entropy_kernels.h"
#include "ops/gemm/gemm.h"
#include "ops/gemm/gemm_fused_internal.h"
#include "ops/linear/linear_kernels.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_kernels.h"
#include "ops/variant.h"
#include "runtime/has_cuda.h"
#include "runtime/integers.h"
#include "tensor/kernels.h"
#include "tensor/pads.h"

namespace tessera::ops {
namespace {

void check_arguments(const Tensor& x, const Tensor& weight, const Tensor& targets, const Tensor& bias,
                     const LinearCrossEntropyOptions& options) {
  const char* const op = "linear_cross_entropy";
  check_operand(op, "x", x, x);
  check(x.rank() >= 1, op, ": x is a scalar; expected [..., d]");
  check_linear(op, "weight", x, x.size(-1), weight, bias);
  check(targets.defined(), op, ": targets is undefined");
  check(x.shape().without(-1) == targets.shape(), op, ": targets is ", describe(targets), ", but x is ",
        describe(x), "; expected targets of shape ", x.shape().without(-1));
  check(targets.dtype() == DType::i64 || targets.dtype() == DType::i32, op, ": targets is ",
        describe(targets), "; expected i64 or i32");
  check(targets.device() == x.device(), op, ": targets is ", describe(targets), ", but x is ", describe(x),
        "; move one of them with to(device)");
  check(weight.size(0) > 0 || targets.count() == 0, op, ": weight is ", describe(weight),
        ", without classes; expected [V, d] with V >= 1");
  check(0 <= options.label_smoothing && options.label_smoothing <= 1, op, ": label_smoothing is ",
        options.label_smoothing, "; expected 0 to 1");
  check(options.chunk >= 0, op, ": chunk is ", options.chunk, "; expected 0 or more tokens");
}

/// The gradients that are wanted, made for a call; the others are undefined.
struct Gradients {
  Tensor dx, dweight, dbias;
};

Gradients make_gradients(const Head& head, bool x, bool weight, bool bias) {
  const DType wide = sum_dtype(head.x.dtype());
  const Device device = head.x.device();
  return {x ? Tensor::empty(head.x.shape(), head.x.dtype(), device) : Tensor(),
          weight ? Tensor::empty(head.weight.shape(), wide, device) : Tensor(),
          bias ? Tensor::zeros(head.bias.shape(), wide, device) : Tensor()};
}

/// Variant "composed": a chunk's logits by a product, rounded nowhere but to f32, what cross_entropy does to
/// them, dl rounded to the dtype of x, and the products of the gradients.
void composed(const Head& head, const Tensor& losses, const Tensor& dloss, const Tensor& count,
              const Gradients* gradients) {
  const Device device = head.x.device();
  const DType wide = sum_dtype(head.x.dtype());
  const int64_t chunk = head.chunk(wide);
  const CrossEntropyOptions each{.ignore_index = head.options.ignore_index,
                                 .label_smoothing = head.options.label_smoothing,
                                 .reduction = Reduction::none};
  CrossEntropyOptions reduced = each;
  reduced.reduction = head.options.reduction;
  const Tensor unused = Tensor::empty({}, wide, device), &counted = count.defined() ? count : unused;
  for (int64_t begin = 0; begin < head.tokens(); begin += chunk) {
    const int64_t end = std::min(begin + chunk, head.tokens());
    const Tensor x = head.x.slice(0, begin, end), targets = head.targets.slice(0, begin, end),
                 own_losses = losses.slice(0, begin, end),
                 logits = Tensor::empty({end - begin, head.classes()}, wide, device),
                 top = Tensor::empty({end - begin}, wide, device), log_sum = Tensor::empty_like(top);
    linear_forward(logits, x, head.weight, head.bias);
    const CrossEntropyForward forward{own_losses, top, log_sum, unused, logits, targets, each};
    if (device.is_cpu()) {
      cross_entropy_forward_cpu(forward);
    } else if constexpr (kCuda) {
      cross_entropy_forward_cuda(forward);
    }
    if (!gradients) continue;
    const Tensor own_dloss = dloss.rank() ? dloss.slice(0, begin, end) : dloss;
    const CrossEntropyBackward backward{logits, own_dloss, top, log_sum, counted, logits, targets, reduced};
    if (device.is_cpu()) {
      cross_entropy_backward_cpu(backward);
    } else if constexpr (kCuda) {
      cross_entropy_backward_cuda(backward);
    }
    const Tensor dlogits = as_scratch(logits.to(x.dtype()));
    if (gradients->dx.defined()) multiply(gradients->dx.slice(0, begin, end), dlogits, head.weight);
    if (gradients->dweight.defined())
      multiply(gradients->dweight, dlogits.transpose(0, 1), x, {.accumulate = begin > 0});
    if (gradients->dbias.defined()) accumulate(gradients->dbias, column_sums(dlogits));
  }
}

/// Variant "wgmma": see linear_cross_entropy_sm90.cu.
void exponential(const Head& head, const Tensor& losses, const Tensor& dloss, const Tensor& count,
                 const Gradients* gradients) {
  const Device device = head.x.device();
  const int64_t chunk = head.chunk(DType::bf16), classes = head.classes(), width = head.x.size(1),
                tiles = ceil_div(classes, kExponentialColumns);
  for (int64_t begin = 0; begin < head.tokens(); begin += chunk) {
    const int64_t end = std::min(begin + chunk, head.tokens()), rows = end - begin;
    ExponentialChunk part{.x = head.x.slice(0, begin, end),
                          .bases = Tensor::empty_packed({rows}, DType::f32, device),
                          .own = Tensor::empty_packed({rows}, DType::i32, device),
                          .partials = Tensor::empty_packed({rows, tiles}, DType::i64, device)};
    const bool wants_dweight = gradients && gradients->dweight.defined();
    if (gradients) {
      part.exponentials = as_scratch(Tensor::empty({rows, classes}, DType::bf16, device));
      part.scales = Tensor::empty_packed({rows}, DType::f32, device);
      if (wants_dweight) part.scaled = Tensor::empty({rows, width}, DType::bf16, device);
    }
    if constexpr (kCuda) {
      target_logits_cuda(part, head.weight, head.targets, begin, head.options.ignore_index);
      exponential_product_cuda(part, head.weight);
      finish_exponentials_cuda(part, losses.slice(0, begin, end), classes,
                               dloss.rank() ? dloss.slice(0, begin, end) : dloss, count);
      if (gradients && gradients->dx.defined()) {
        const Tensor sums = Tensor::empty({rows, width}, DType::f32, device);
        multiply(sums, part.exponentials, head.weight);
        scale_rows_cuda(gradients->dx.slice(0, begin, end), sums, part.scales);
      }
      if (wants_dweight && begin == 0) {
        multiply(gradients->dweight, part.exponentials.transpose(0, 1), part.scaled);
      } else if (wants_dweight) {
        add_weight_gradient_cuda(gradients->dweight, part);
      }
    }
  }
}

/// What variant "wgmma" needs and the problem lacks.
Reason wgmma_lacks(const Head& head, const Gpu& gpu) {
  if (gpu.major != 9) return "a GPU of compute capability 9.0";
  if (head.x.dtype() != DType::bf16) return "bf16";
  if (head.bias.defined() || head.options.label_smoothing != 0) return "no bias and no label_smoothing";
  // Shorter rows of x, dweight and the exponentials are dense, which TMA cannot read.
  if (head.tokens() == 0 || head.x.size(1) < 8 || head.classes() < 8)
    return "tokens, of 8 features or more, and 8 classes or more";
  if (!is_tma_readable(head.x) || !is_tma_readable(head.weight))
    return "x and weight with rows that start on 16-byte boundaries";
  return {};
}

using Run = void(const Head& head, const Tensor& losses, const Tensor& dloss, const Tensor& count,
                 const Gradients* gradients);

/// How it runs on a GPU.
constexpr Variant<Head, Run> kVariants[] = {{"wgmma", wgmma_lacks, is_preferred<Head>, exponential},
                                            {"composed", lacks_nothing<Head>, is_otherwise<Head>, composed}};

/// The losses of all tokens, and the gradients for dloss (of rank 0, or [tokens]) if they are wanted.
void run(const Head& head, const Tensor& losses, const Tensor& dloss, const Tensor& count,
         const Gradients* gradients) {
  if (gradients && gradients->dweight.defined() && head.tokens() == 0) gradients->dweight.fill(0);
  Run* const run = head.x.device().is_cpu()
                       ? composed
                       : choose("linear_cross_entropy", kVariants, head, Gpu(head.x.device())).launch;
  run(head, losses, dloss, count, gradients);
}

/// A gradient that was made for a gradient of the loss of `made_for` (undefined: 1) becomes the one for
/// dloss, in place, and is given to an input of the entry.
void hand_over(Backward& b, int input, Tensor gradient, const Tensor& dloss, const Tensor& made_for) {
  if (!gradient.defined()) return;
  if (gradient.count() > 0) {
    const Tensor rows = gradient.rank() >= 2 ? gradient : gradient.reshape({1, gradient.count()});
    if (gradient.device().is_cpu()) {
      cross_entropy_scale_cpu(rows, dloss, made_for);
    } else if constexpr (kCuda) {
      cross_entropy_scale_cuda(rows, dloss, made_for);
    }
  }
  b.give(input, std::move(gradient));
}

/// The loss of mean or sum, with the gradients made on the way for a gradient of the loss of `made_for`.
void record_made(Tape& tape, const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& targets,
                 Tensor& loss, Gradients gradients, const Tensor& made_for) {
  tape.record("linear_cross_entropy", {&x, &weight, &bias, &targets}, {&loss},
              [made = std::move(gradients), shape = x.shape(), made_for](Backward& b) mutable {
                const Tensor dloss = b.grad().packed();
                if (made.dx.defined()) made.dx = made.dx.reshape(shape);
                hand_over(b, 0, std::move(made.dx), dloss, made_for);
                hand_over(b, 1, std::move(made.dweight), dloss, made_for);
                hand_over(b, 2, std::move(made.dbias), dloss, made_for);
              });
}

/// Reduction::none: backward recomputes the logits.
void record_remade(Tape& tape, const Tensor& x, const Tensor& weight, const Tensor& bias,
                   const Tensor& targets, Tensor& loss, const LinearCrossEntropyOptions& options) {
  tape.record("linear_cross_entropy", {&x, &weight, &bias, &targets}, {&loss},
              [x = Saved(x), weight = Saved(weight), bias = Saved(bias), targets = Saved(targets),
               options](Backward& b) {
                const Head head(x.get(), weight.get(), bias.get(), targets.get(), options);
                const Tensor dloss = b.grad().packed().reshape({head.tokens()});
                Gradients made = make_gradients(head, b.needs(0), b.needs(1), b.needs(2));
                run(head, Tensor::empty_packed({head.tokens()}, dloss.dtype(), dloss.device()), dloss, {},
                    &made);
                if (b.needs(0)) b.give(0, made.dx.reshape(x.get().shape()));
                b.give(1, std::move(made.dweight));
                b.give(2, std::move(made.dbias));
              });
}

}  // namespace

std::string describe_problem(const Head& head) {
  return text_of("x ", describe(head.x), " and weight ", describe(head.weight));
}

std::vector<std::string> linear_cross_entropy_variants() {
  return names_of(kVariants);
}

std::string_view linear_cross_entropy_variant(const Head& head, const Gpu& gpu) {
  return choose("linear_cross_entropy", kVariants, head, gpu).name;
}

Head::Head(const Tensor& x_given, const Tensor& weight_given, const Tensor& bias_given,
           const Tensor& targets_given, const LinearCrossEntropyOptions& given)
    : x(flatten_leading(x_given, 1)),
      weight(weight_given.detach()),
      bias(bias_given.defined() ? bias_given.detach() : Tensor()),
      targets(targets_given.packed().reshape({targets_given.count()})),
      options(given) {}

int64_t linear_cross_entropy_chunk(int64_t classes, DType dtype) {
  constexpr uint64_t kMost = uint64_t{1} << 30, kLeast = 128;
  const uint64_t bytes = uint64_t(row_pitch(std::max<int64_t>(classes, 1), dtype)) * size_of(dtype);
  return int64_t(std::max(kLeast, std::bit_floor(kMost / bytes)));
}

Tensor linear_cross_entropy(const Tensor& x, const Tensor& weight, const Tensor& targets, const Tensor& bias,
                            const LinearCrossEntropyOptions& options, Site site) {
  const CallScope call(site);
  check_arguments(x, weight, targets, bias, options);
  const Head head(x, weight, bias, targets, options);
  const Device device = x.device();
  const DType wide = sum_dtype(x.dtype());
  const bool each = options.reduction == Reduction::none, mean = options.reduction == Reduction::mean;
  const Tensor count = Tensor::empty({}, wide, device);
  if (device.is_cpu()) {
    count_targets_cpu(count, head.targets, head.classes(), options.ignore_index);
  } else if constexpr (kCuda) {
    if (mean) count_targets_cuda(count, head.targets, options.ignore_index);
  }
  const Tensor losses = Tensor::empty_packed({head.tokens()}, wide, device);
  Tape* const tape = Tape::recording(x, weight, bias);
  Gradients gradients;
  if (tape && !each)
    gradients = make_gradients(head, requires_grad(x), requires_grad(weight), requires_grad(bias));
  // Rounded to 16 bits before they are scaled, small gradients would be lost.
  const Tensor scale = tape ? tape->initial_gradient(wide, device) : Tensor();
  run(head, losses, scale.defined() ? scale : Tensor::full({}, 1.0, wide, device), mean ? count : Tensor(),
      tape && !each ? &gradients : nullptr);
  if (each) {
    Tensor loss = losses.reshape(targets.shape());
    if (tape) record_remade(*tape, x, weight, bias, targets, loss, options);
    return loss;
  }
  Tensor loss = Tensor::empty_packed(Shape{}, wide, device);
  if (device.is_cpu()) {
    sum_losses_cpu(loss, losses, mean ? count : Tensor());
  } else if constexpr (kCuda) {
    sum_losses_cuda(loss, losses, mean ? count : Tensor());
  }
  if (tape) record_made(*tape, x, weight, bias, targets, loss, std::move(gradients), scale);
  return loss;
}

}  // namespace tessera::ops
