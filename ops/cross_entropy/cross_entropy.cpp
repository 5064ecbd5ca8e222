#include "ops/cross_entropy/cross_entropy.h"

#include "autograd/tape.h"
#include "ops/cross_entropy/cross_entropy_kernels.h"
#include "ops/op.h"
#include "ops/pointwise/pointwise.h"

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
  check(logits.has_rows(), "cross_entropy: overwrite_logits, but logits ", describe(logits),
        " has no rows (it is transposed or expanded); clone() it");
  check(!requires_grad(logits) || logits.grad_state()->tape != 0,
        "cross_entropy: overwrite_logits, but logits ", describe(logits),
        " is a leaf; expected a result of the tape");
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

CrossEntropyOptions options_of(const Attrs& attrs) {
  return {.ignore_index = attrs.integer("ignore_index"),
          .label_smoothing = attrs.number("label_smoothing"),
          .reduction = parse_reduction(attrs.word("reduction")),
          .overwrite_logits = attrs.flag("overwrite_logits")};
}

Problem problem(const Dims& d, const Attrs& attrs) {
  const int64_t rows = d.at("R"), classes = d.at("V");
  const double n = double(rows) * double(classes);
  return {.inputs = {{.shape = {rows, classes}, .scale = 2},
                     {.shape = {rows},
                      .fill = Fill::index,
                      .high = classes,
                      .ignore = attrs.integer("ignore_index")}},
          // Maximum, difference, exponential and sum; backward a difference, an exponential and a product.
          .forward_flops = 4 * n,
          .backward_flops = 4 * n,
          .forward_elements = n,
          .backward_elements = 2 * n};
}

std::vector<Case> cases() {
  const auto options = [](const char* word, double smoothing) {
    return Attrs{{"reduction", std::string(word)}, {"label_smoothing", smoothing}};
  };
  const auto over = [&](const char* word, double smoothing) {
    Attrs attrs = options(word, smoothing);
    attrs.set("overwrite_logits", true);
    return attrs;
  };
  return {{.dims = {{"R", 11}, {"V", 7}}},
          {.dims = {{"R", 5}, {"V", 13}}, .attrs = options("none", 0)},
          {.dims = {{"R", 9}, {"V", 6}}, .attrs = options("sum", 0.1)},
          {.dims = {{"R", 17}, {"V", 5}}, .attrs = options("mean", 0.3)},
          {.dims = {{"R", 4}, {"V", 3}}, .attrs = options("none", 1)},
          {.dims = {{"R", 8}, {"V", 5}}, .attrs = {{"ignore_index", int64_t{2}}}},
          {.dims = {{"R", 3}, {"V", 1}}, .attrs = options("none", 0.1)},
          {.dims = {{"R", 0}, {"V", 5}}, .attrs = options("sum", 0)},
          {.dims = {{"R", 0}, {"V", 0}}, .attrs = options("none", 0)},
          {.dims = {{"R", 9}, {"V", 17}}, .attrs = options("mean", 0.1), .placement = Placement::strided},
          {.dims = {{"R", 13}, {"V", 10}}, .placement = Placement::transposed},
          // Rows of 4 and 8 lanes, of a warp, of a block, of a large one.
          {.dims = {{"R", 33}, {"V", 1024}}, .gradcheck = false},
          {.dims = {{"R", 9}, {"V", 1025}}, .attrs = options("none", 0.1), .gradcheck = false},
          {.dims = {{"R", 3}, {"V", 50304}}, .attrs = options("sum", 0.1), .gradcheck = false},
          {.dims = {{"R", 2}, {"V", 20011}}, .attrs = options("mean", 0), .gradcheck = false},
          {.dims = {{"R", 1031}, {"V", 3}}, .attrs = options("mean", 0), .gradcheck = false},
          {.dims = {{"R", 131}, {"V", 37}}, .attrs = options("mean", 0.1), .gradcheck = false},
          {.dims = {{"R", 67}, {"V", 251}}, .attrs = options("none", 0), .gradcheck = false},
          // In place: rows of a warp and of blocks, longer than shared memory, not aligned, ignored ones.
          {.dims = {{"R", 9}, {"V", 7}}, .attrs = over("mean", 0.1)},
          {.dims = {{"R", 6}, {"V", 11}}, .attrs = over("sum", 0)},
          {.dims = {{"R", 1}, {"V", 1}}, .attrs = over("mean", 0)},
          {.dims = {{"R", 0}, {"V", 5}}, .attrs = over("sum", 0)},
          {.dims = {{"R", 301}, {"V", 1001}}, .attrs = over("mean", 0.1), .gradcheck = false},
          {.dims = {{"R", 5}, {"V", 9001}}, .attrs = over("sum", 0.1), .gradcheck = false},
          {.dims = {{"R", 3}, {"V", 50304}}, .attrs = over("mean", 0), .gradcheck = false},
          {.dims = {{"R", 2}, {"V", 130003}}, .attrs = over("mean", 0.1), .gradcheck = false},
          {.dims = {{"R", 9}, {"V", 3}},
           .attrs = {{"ignore_index", int64_t{1}}, {"overwrite_logits", true}},
           .gradcheck = false}};
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

std::vector<OpSpec> cross_entropy_specs() {
  return {{
      .name = "cross_entropy",
      .summary = "-(1 - e) log p_t - (e / V) sum_v log p_v, with p = softmax(logits), e = label_smoothing",
      .inputs = {{"logits", "[..., V]"}, {"targets", "[...]", false, false, index_dtypes()}},
      .attrs = {{"ignore_index", int64_t{-100}, "targets of this value do not count"},
                {"label_smoothing", 0.0, "probability spread evenly over the classes"},
                {"reduction", std::string("mean"), "how the losses become one", {"mean", "sum", "none"}},
                {"overwrite_logits", false, "write the gradient over the logits (here: over a copy)"}},
      .outputs = {{.name = "loss", .shape = "[] or as targets", .dtypes = sum_dtypes()}},
      .run =
          [](const std::vector<Tensor>& in, const Attrs& attrs) {
            const CrossEntropyOptions options = options_of(attrs);
            return std::vector{
                cross_entropy(options.overwrite_logits ? scale(in[0], 1.0) : in[0], in[1], options)};
          },
      .problem = problem,
      .cases = cases(),
      .benches = {{.dims = {{"R", 8192}, {"V", 50304}}}},
      .sweep =
          [](Draw& draw) {
            return Case{.dims = {{"R", draw.size(1, 65536)}, {"V", draw.size(2, 150000)}}};
          },
  }};
}

}  // namespace tessera::ops
