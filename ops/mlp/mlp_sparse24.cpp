#include "ops/mlp/mlp_sparse24.h"

#include <algorithm>
#include <numeric>

#include "autograd/tape.h"
#include "ops/gather/gather.h"
#include "ops/gemm/gemm.h"
#include "ops/linear/linear_activation_kernels.h"
#include "ops/linear/linear_kernels.h"
#include "ops/mlp/hidden_gradient24.h"
#include "ops/mlp/linear_activation24_kernels.h"
#include "ops/mlp/mlp_sparse24_kernels.h"
#include "ops/mlp/move_columns.h"
#include "ops/pointwise/pointwise.h"
#include "ops/reduce/reduce.h"
#include "ops/select/select.h"
#include "ops/sparse24/weight_gradient24_internal.h"
#include "runtime/has_cuda.h"
#include "runtime/integers.h"
#include "runtime/philox.h"
#include "runtime/text.h"
#include "tensor/pads.h"

namespace tessera::ops {
namespace {

constexpr const char* kForms[] = {"dense", "sparse", "split"};

bool changes_values(Method24 method) {
  return method == Method24::mvue || method == Method24::soft_threshold || method == Method24::soft_dynamic;
}

/// Why variant "fused" cannot run; empty if it can.
std::string fused_lacks(const MlpSparse24& how, const Tensor& x, const Tensor& up) {
  if (how.y == Gemm24::dense || how.dx != how.y || how.dup != how.y || how.ddown != how.y)
    return "four GEMMs that are alike and not dense";
  if (how.method != Method24::naive || how.token_method != Method24::naive)
    return "method and token_method naive";
  if (!how.masks_gradient) return "masks_gradient";
  if (how.order.defined()) return "tokens in their own order";
  return linear_activation24_epilogue_lacks(x, up, Gpu(x.device())).str();
}

/// While it lives, the parts of mlp_sparse24 run as its forced variant says, "fused" or "composed". A forced
/// variant of GEMMs is PassVariant's.
class ForceParts {
 public:
  explicit ForceParts(Device device) {
    const std::string* const forced = ForceVariant::forced("mlp_sparse24");
    if (!forced || device.is_cpu() || variant_internal::has_part(kGemmVariants, *forced)) return;
    fused_ = *forced == "fused";
    check(fused_ || *forced == "composed", "mlp_sparse24: there is no variant \"", *forced,
          "\"; expected fused, composed or one of the GEMMs'");
    parts_[0].emplace("linear_activation24", fused_ ? "epilogue" : "separate");
    parts_[1].emplace("hidden_gradient24", fused_ ? "fused" : "separate");
  }
  bool fused() const { return fused_; }

 private:
  bool fused_ = false;
  std::optional<ForceVariant> parts_[2];
};

Tensor scratch(int64_t rows, int64_t columns, const Tensor& like) {
  return as_scratch(Tensor::empty({rows, columns}, like.dtype(), like.device()));
}

Tensor columns_of(const Tensor& x, const Tensor& indices, bool clears = false) {
  const Tensor part = scratch(x.size(0), indices.count(), x);
  take_columns(part, x, indices, clears);
  return part;
}
Tensor rows_of(const Tensor& x, const Tensor& indices) {
  const Tensor part = scratch(indices.count(), x.size(1), x);
  take_columns(part.transpose(0, 1), x.transpose(0, 1), indices, false);
  return part;
}

/// The columns of the largest counts: i32 [n], ascending.
Tensor densest_columns(const MlpSparse24& how, int64_t hidden, Device device) {
  const Tensor counts = how.previous.defined() ? how.previous.detach().to(DType::f32)
                                               : Tensor::zeros({hidden}, DType::f32, device);
  return Selection::top_norm(counts, how.dense_columns(hidden)).indices;
}

void multiply_required(const MlpSparse24& how, const char* gemm, const Tensor& d, const Sparse24& a,
                       const Tensor& b, const Multiply24Options& options = {}) {
  if (how.required) {
    const std::string variant = multiply24_variant(d, a, b, options);
    check(variant.starts_with("wgmma"), "mlp_sparse24: sparse tensor cores are required, but the GEMM of ",
          gemm, " would run as \"", variant, "\"; make it dense, or do not require them");
  }
  multiply24(d, a, b, options);
}

/// What forward leaves to backward. a: without its dense columns if y is split.
struct Hidden {
  Tensor counts;
  Tensor a;         // if kept
  Sparse24 kept;    // S(a) along features, unless y is dense
  Sparse24 slopes;  // S'(a) f'(h) at its places, of methods that change values
  Tensor columns;   // i32 [n]: the densest, if a GEMM is split
  Tensor dense;     // a in these columns, if y is split

  /// The mean of |S(a)| over `count` elements. Nothing is negative, and what pads `kept` is 0.
  Tensor mean_magnitude(int64_t count) const {
    const Tensor& most = kept.defined() ? kept.values : a;
    const DType wide = sum_dtype(most.dtype());
    Tensor sum = sum_to(most, {}, wide);
    if (dense.defined()) sum = add(sum, sum_to(dense, {}, wide));
    return ops::scale(sum, 1.0 / double(std::max<int64_t>(1, count)));
  }
};

Selection24 selection_of(const MlpSparse24& how, const Tensor& a) {
  Selection24 selection{.method = how.method, .scale = how.scale};
  if (how.method == Method24::mvue) selection = Selection24::mvue(*how.rng, a.device());
  if (how.method == Method24::soft_dynamic) selection.scale = how.dynamic->next(a);
  return selection;
}

/// The saved tensors of a recorded call.
struct Pass {
  MlpSparse24 how;
  Saved x, up, down, a, values, metadata, slope_values, columns, dense;
  int64_t tokens, hidden;
  Shape shape;  // of x
  Selection24 token_selection, token_selection_of_gradient;

  Sparse24 kept() const {
    return {.along = Along24::features,
            .tokens = tokens,
            .features = hidden,
            .values = values.get(),
            .metadata = metadata.get(),
            .scales = {}};
  }
  Tensor activations() const;
  Tensor activation_gradient(Backward& b, const Tensor& dy) const;
  Tensor hidden_gradient(Backward& b, const Tensor& dy, const Tensor& act) const;
  void input_gradient(Backward& b, const Tensor& act, const Tensor& dh, const Tensor& dh_sparse,
                      const Tensor& dh_dense) const;
  void weight_gradients(Backward& b, const Tensor& act, const Tensor& dy, const Tensor& dh,
                        const Tensor& dh_sparse, const Tensor& dh_dense) const;
  /// Whether all four GEMMs are alike and dh follows from what is kept: it then exists compressed only.
  bool stays_compressed(const Backward& b) const {
    return how.y != Gemm24::dense && how.dx == how.y && how.dup == how.y && how.ddown == how.y &&
           how.masks_gradient && !slope_values.defined() && how.token_method != Method24::mvue && !b.needs(3);
  }
  HiddenGradient24 compressed(const Backward& b, const Tensor& da) const;
  void run_compressed(Backward& b, const Tensor& dy) const;
  void operator()(Backward& b);
};

/// The rows of a matrix in the order in which tokens form groups.
Tensor in_order(const MlpSparse24& how, const Tensor& matrix) {
  return how.order.defined() ? gather_rows(matrix, how.order) : matrix;
}

/// S(a) with its dense columns.
Tensor Pass::activations() const {
  if (!values.defined()) return a.get();
  Tensor act = decompress24(kept());
  if (dense.defined()) add_columns(act, dense.get(), columns.get());
  return as_scratch(std::move(act));
}

/// da = dy down, and what the mean magnitude adds
Tensor Pass::activation_gradient(Backward& b, const Tensor& dy) const {
  const Tensor da = as_scratch(linear_input_gradient(dy, down.get()));
  if (!how.l1 || !b.has_grad(1) || da.count() == 0) return da;
  const double factor = 1.0 / double(da.count());
  if (da.device().is_cpu()) {
    add_to_all_cpu(da, b.grad(1), factor);
  } else if constexpr (kCuda) {
    add_to_all_cuda(da, b.grad(1), factor);
  }
  return da;
}

/// dh = da S'(a) f'(h)
Tensor Pass::hidden_gradient(Backward& b, const Tensor& dy, const Tensor& act) const {
  const Tensor dh = activation_gradient(b, dy);
  if (!how.masks_gradient && a.defined()) {
    Tensor whole = a.get();
    if (dense.defined()) {
      whole = a.get().clone();  // forward cleared these columns
      add_columns(whole, dense.get(), columns.get());
    }
    activation_gradient_of_result(dh, dh, whole, how.activation);
  } else if (slope_values.defined()) {
    Sparse24 slopes = kept();
    slopes.values = slope_values.get();
    const Tensor all = decompress24(slopes);
    if (dense.defined()) {
      const Tensor ones = Tensor::full(dense.get().shape(), 1, act.dtype(), act.device());
      activation_gradient_of_result(ones, ones, dense.get(), how.activation);
      add_columns(all, ones, columns.get());
    }
    return as_scratch(mul(dh, all));
  } else {
    activation_gradient_of_result(dh, dh, act, how.activation);
  }
  return dh;
}

void Pass::input_gradient(Backward& b, const Tensor& act, const Tensor& dh, const Tensor& dh_sparse,
                          const Tensor& dh_dense) const {
  if (!b.needs(0)) return;
  const Tensor& weight = up.get();
  if (how.dx == Gemm24::dense)
    return linear_input_gradient(b, 0, shape, dh.reshape(shape.with(-1, hidden)), weight);
  Tensor dx = Tensor::empty(shape, dh.dtype(), dh.device());
  const bool as_forward = values.defined() && (how.dx == how.y);
  const Tensor& operand = how.dx == Gemm24::split ? dh_sparse : dh;
  Sparse24 pattern;
  if (as_forward) {
    pattern = kept();
  } else if (how.dx == Gemm24::split) {
    const Tensor rest = act.clone();
    columns_of(rest, columns.get(), true);
    pattern = compress24(rest, Along24::features);
  } else {
    pattern = compress24(act, Along24::features);
  }
  Multiply24Options options;
  if (how.dx == Gemm24::split)
    options.residual = linear_input_gradient(dh_dense, rows_of(weight, columns.get()));
  multiply_required(how, "dx", flatten_leading(dx, 1), compress24_like(operand, pattern), weight, options);
  b.give(0, std::move(dx));
}

/// The columns that a split GEMM takes as they are: part [rows, n] or [n, columns] of a gradient.
Tensor empty_part(int64_t rows, int64_t columns, const Tensor& like) {
  return Tensor::empty({rows, columns}, like.dtype(), like.device());
}

void Pass::weight_gradients(Backward& b, const Tensor& act, const Tensor& dy, const Tensor& dh,
                            const Tensor& dh_sparse, const Tensor& dh_dense) const {
  const Tensor rows = b.needs(1) ? flatten_leading(x.get(), 1) : Tensor();
  const auto ordered = [&](const Tensor& matrix) { return in_order(how, matrix); };
  // S(a) of the columns that the form takes, compressed along the tokens.
  const auto by_tokens = [&](Gemm24 form) {
    Tensor operand = act;
    if (form == Gemm24::split) {
      operand = act.clone();
      columns_of(operand, columns.get(), true);
    }
    return compress24(ordered(operand), Along24::tokens, token_selection);
  };
  std::optional<Sparse24> split, sparse;
  const auto pattern = [&](Gemm24 form) -> const Sparse24& {
    std::optional<Sparse24>& one = form == Gemm24::split ? split : sparse;
    if (!one) one = by_tokens(form);
    return *one;
  };
  if (how.ddown == Gemm24::dense) {
    linear_parameter_gradients(b, 2, 4, down.get(), act, dy);
  } else if (b.needs(2)) {
    give_weight_gradient24(b, 2, down.get(), [&](const Tensor& d, bool accumulate) {
      multiply_required(how, "ddown", d.transpose(0, 1), pattern(how.ddown), ordered(dy),
                        {.accumulate = accumulate});
      if (how.ddown != Gemm24::split) return;
      const Tensor part = empty_part(d.size(0), columns.get().count(), d);
      multiply(part, dy.transpose(0, 1), columns_of(act, columns.get()));
      add_columns(d, part, columns.get());
    });
  }
  if (how.ddown != Gemm24::dense) bias_gradient(b, 4, dy);
  if (how.dup == Gemm24::dense) {
    linear_parameter_gradients(b, 1, 3, up.get(), rows, dh);
    return;
  }
  bias_gradient(b, 3, dh);
  if (!b.needs(1)) return;
  give_weight_gradient24(b, 1, up.get(), [&](const Tensor& d, bool accumulate) {
    const Tensor operand = ordered(how.dup == Gemm24::split ? dh_sparse : dh);
    const Sparse24 compressed = how.token_method == Method24::mvue
                                    ? compress24(operand, Along24::tokens, token_selection_of_gradient)
                                    : compress24_like(operand, pattern(how.dup));
    multiply_required(how, "dup", d, compressed, ordered(rows), {.accumulate = accumulate});
    if (how.dup != Gemm24::split) return;
    const Tensor part = empty_part(columns.get().count(), d.size(1), d);
    multiply(part, dh_dense.transpose(0, 1), rows);
    add_columns(d.transpose(0, 1), part.transpose(0, 1), columns.get());
  });
}

/// What the GEMMs of a pass multiply that stays compressed, as far as `b` needs it; by hidden_gradient24
/// where all of them run and groups of tokens are neighbours.
HiddenGradient24 Pass::compressed(const Backward& b, const Tensor& da) const {
  if (b.needs(0) && b.needs(1) && b.needs(2) && !how.order.defined() && how.token_method == Method24::naive)
    return hidden_gradient24(da, kept(), how.activation);
  const auto sloped = [&](const Tensor& matrix, const Sparse24& of) {
    const Sparse24 made = compress24_like(matrix, of);
    activation_gradient_of_result(made.values, made.values, of.values, how.activation);
    return made;
  };
  HiddenGradient24 made;
  if (b.needs(1) || b.needs(2))
    made.act_by_tokens = compress24(in_order(how, decompress24(kept())), Along24::tokens, token_selection);
  if (b.needs(1)) made.dh_by_tokens = sloped(in_order(how, da), made.act_by_tokens);
  if (b.needs(0)) made.dh = sloped(da, kept());
  return made;
}

/// The same results, to the bit, without dh or S(a) as a matrix but for one copy: a slope is that of a kept
/// value, wherever the value lies.
void Pass::run_compressed(Backward& b, const Tensor& dy) const {
  const bool splits = how.y == Gemm24::split, further = b.needs(0) || b.needs(1);
  Tensor da, dh_dense;
  if (further) da = activation_gradient(b, dy);
  if (further && splits) {
    dh_dense = columns_of(da, columns.get());
    activation_gradient_of_result(dh_dense, dh_dense, dense.get(), how.activation);
  }
  HiddenGradient24 hidden_parts = compressed(b, da);
  da = Tensor();
  if (b.needs(2))
    give_weight_gradient24(b, 2, down.get(), [&](const Tensor& d, bool accumulate) {
      multiply_required(how, "ddown", d.transpose(0, 1), hidden_parts.act_by_tokens, in_order(how, dy),
                        {.accumulate = accumulate});
      if (!splits) return;
      const Tensor part = empty_part(d.size(0), columns.get().count(), d);
      multiply(part, dy.transpose(0, 1), dense.get());
      add_columns(d, part, columns.get());
    });
  bias_gradient(b, 4, dy);
  hidden_parts.act_by_tokens = {};
  if (b.needs(1))
    give_weight_gradient24(b, 1, up.get(), [&](const Tensor& d, bool accumulate) {
      const Tensor rows = flatten_leading(x.get(), 1);
      multiply_required(how, "dup", d, hidden_parts.dh_by_tokens, in_order(how, rows),
                        {.accumulate = accumulate});
      if (!splits) return;
      const Tensor part = empty_part(columns.get().count(), d.size(1), d);
      multiply(part, dh_dense.transpose(0, 1), rows);
      add_columns(d.transpose(0, 1), part.transpose(0, 1), columns.get());
    });
  hidden_parts.dh_by_tokens = {};
  if (b.has_grad()) b.pass(0, {5});  // before dx: see operator()
  if (!b.needs(0)) return;
  Tensor dx = Tensor::empty(shape, dy.dtype(), dy.device());
  Multiply24Options options;
  if (splits) options.residual = linear_input_gradient(dh_dense, rows_of(up.get(), columns.get()));
  multiply_required(how, "dx", flatten_leading(dx, 1), hidden_parts.dh, up.get(), options);
  b.give(0, std::move(dx));
}

void Pass::operator()(Backward& b) {
  // y itself may be unused, where only l1 is part of a loss.
  const Tensor dy =
      b.has_grad() ? flatten_leading(b.grad(), 1)
                   : Tensor::zeros({tokens, down.get().size(0)}, down.get().dtype(), down.get().device());
  const ForceParts force(dy.device());
  if (stays_compressed(b)) return run_compressed(b, dy);
  const bool further = b.needs(0) || b.needs(1) || b.needs(3);
  const Tensor act = activations();
  Tensor dh, dh_sparse, dh_dense;
  if (further) {
    dh = hidden_gradient(b, dy, act);
    if (how.dx == Gemm24::split || how.dup == Gemm24::split) {
      // Without a GEMM that reads all columns the dense ones are taken out in place.
      const bool whole = how.dx != Gemm24::split || how.dup != Gemm24::split || b.needs(3);
      dh_sparse = whole ? as_scratch(dh.clone()) : dh;
      dh_dense = columns_of(dh_sparse, columns.get(), true);
    }
  }
  if (further) {
    weight_gradients(b, act, dy, dh, dh_sparse, dh_dense);
  } else if (b.needs(2) || b.needs(4)) {
    weight_gradients(b, act, dy, {}, {}, {});
  }
  // Before dx, which is added to dy where x is the residual, and after everything that reads dy.
  if (b.has_grad()) b.pass(0, {5});
  input_gradient(b, act, dh, dh_sparse, dh_dense);
}

/// a = f(x up^T + up_bias) as far as y and backward need it, and its counts: all but y of a forward pass.
Hidden activate(const Tensor& x, const Tensor& up, const Tensor& up_bias, const MlpSparse24& how,
                Selection24& selection) {
  Hidden hidden;
  if (how.splits()) hidden.columns = densest_columns(how, up.size(0), x.device());
  const bool splits = how.y == Gemm24::split;
  if (how.y != Gemm24::dense && how.method == Method24::naive && how.masks_gradient) {
    LinearActivation24 made =
        linear_activation24(x, up, how.activation, up_bias, splits ? hidden.columns : Tensor());
    hidden.kept = std::move(made.kept), hidden.dense = std::move(made.dense);
    hidden.counts = std::move(made.counts);
    return hidden;
  }
  hidden.counts = Tensor::empty_packed({up.size(0)}, DType::i32, x.device());
  hidden.a = scratch(x.size(0), up.size(0), x);
  linear_activation_forward(hidden.a, hidden.counts, x, up, up_bias, how.activation);
  if (how.y == Gemm24::dense) return hidden;
  if (splits) hidden.dense = columns_of(hidden.a, hidden.columns, true);
  selection = selection_of(how, hidden.a);
  hidden.kept = compress24(hidden.a, Along24::features, selection);
  return hidden;
}

/// y, and what backward needs.
Hidden forward(const Tensor& y, const Tensor& x, const Tensor& up, const Tensor& down, const Tensor& up_bias,
               const Tensor& down_bias, const Tensor& residual, const MlpSparse24& how, bool records) {
  Selection24 selection;
  Hidden hidden = activate(x, up, up_bias, how, selection);
  if (how.y == Gemm24::dense) {
    linear_forward(y, hidden.a, down, down_bias, residual);
    return hidden;
  }
  Multiply24Options options{.bias = down_bias, .residual = residual};
  if (how.y == Gemm24::split) {
    const Tensor part = scratch(y.size(0), y.size(1), y);
    linear_forward(part, hidden.dense, columns_of(down, hidden.columns), {}, residual);
    options.residual = part;
  }
  multiply_required(how, "y", y, hidden.kept, down.transpose(0, 1), options);
  if (records && changes_values(how.method) && how.masks_gradient) {
    const Tensor slopes = decompress24(hidden.kept);
    slopes24(slopes, hidden.a, slopes, selection, how.activation);
    hidden.slopes = compress24_like(slopes, hidden.kept);
  }
  if (how.masks_gradient) hidden.a = Tensor();
  return hidden;
}

void check_call(const Tensor& x, const Tensor& up, const MlpSparse24& how) {
  const int64_t hidden = up.size(0);
  const auto check_ints = [&](const char* name, const Tensor& list, int64_t count, const char* of) {
    if (!list.defined()) return;
    check(list.dtype() == DType::i32 && list.shape() == Shape{count} && list.device() == x.device(),
          "mlp_sparse24: ", name, " is ", describe(list), "; expected i32 [", count, "], ", of, ", on ",
          x.device().name());
  };
  check_ints("previous", how.previous, hidden, "a count per column of up");
  check_ints("order", how.order, flatten_leading(x, 1).size(0), "a place per token");
}

}  // namespace

const char* name_of(Gemm24 form) {
  return kForms[size_t(form)];
}

Gemm24 parse_gemm24(std::string_view name) {
  return parse_name<Gemm24>("mlp_sparse24: a GEMM is", kForms, name);
}

bool MlpSparse24::operator==(const MlpSparse24& other) const {
  return activation == other.activation && y == other.y && dx == other.dx && dup == other.dup &&
         ddown == other.ddown && dense_share == other.dense_share && method == other.method &&
         token_method == other.token_method && masks_gradient == other.masks_gradient &&
         required == other.required;
}

bool MlpSparse24::splits() const {
  return std::ranges::any_of(std::initializer_list<Gemm24>{y, dx, dup, ddown},
                             [](Gemm24 form) { return form == Gemm24::split; });
}

bool MlpSparse24::is_dense() const {
  return std::ranges::all_of(std::initializer_list<Gemm24>{y, dx, dup, ddown},
                             [](Gemm24 form) { return form == Gemm24::dense; });
}

int64_t MlpSparse24::dense_columns(int64_t hidden) const {
  return splits() && hidden > 0 ? share_of_rows(hidden, dense_share) : 0;
}

void MlpSparse24::validate(const std::string& what) const {
  check(activation == Activation::relu || activation == Activation::relu_squared, what,
        ": the activation is ", name_of(activation),
        ", whose results are not zero; 2:4 sparsity needs relu or relu_squared");
  check(dense_share >= 0 && dense_share <= 1, what, ": dense_share is ", dense_share, "; expected 0 to 1");
  check(!splits() || dense_share > 0, what,
        ": dense_share is 0, so there are no columns to split off; make the GEMMs sparse");
  check(token_method == Method24::naive || token_method == Method24::mvue || token_method == Method24::fast,
        what, ": token_method is ", name_of(token_method), "; expected naive, mvue or fast");
  if (is_dense()) return;
  const bool draws = (y != Gemm24::dense && method == Method24::mvue) || token_method == Method24::mvue;
  check(!draws || rng, what, ": mvue draws random numbers, and there is no generator; set rng");
  check(y == Gemm24::dense || method != Method24::soft_threshold || scale.defined(), what,
        ": soft_threshold needs its scale; soft_scale() fits one to a weight");
  check(y == Gemm24::dense || method != Method24::soft_dynamic || dynamic, what,
        ": soft_dynamic needs a DynamicScale24 that lives as long as the training");
}

Tensor token_order24(const std::string& kind, int64_t tokens, uint64_t seed, Device device, Site site) {
  const CallScope call(site);
  check(kind == "random" || kind == "stride", "mlp_sparse24: the order of tokens is \"", kind,
        "\"; expected random or stride");
  std::vector<int32_t> order;
  order.reserve(size_t(tokens));
  if (kind == "stride") {
    const int64_t quarter = ceil_div(tokens, 4);
    for (int64_t first = 0; first < quarter; ++first)
      for (int64_t token = first; token < tokens; token += quarter) order.push_back(int32_t(token));
  } else {
    order.resize(size_t(tokens));
    std::iota(order.begin(), order.end(), 0);
    for (int64_t i = tokens - 1; i > 0; --i) {
      const Uint4 words = philox(seed, 0, uint64_t(i));
      const uint64_t word = uint64_t(words.word[1]) << 32 | words.word[0];
      std::swap(order[size_t(i)], order[size_t(word % uint64_t(i + 1))]);
    }
  }
  return Tensor::from(order, {tokens}, device);
}

void slopes24(const Tensor& slopes, const Tensor& a, const Tensor& kept, const Selection24& selection,
              Activation kind) {
  if (a.count() == 0) return;
  if (a.device().is_cpu()) {
    slopes24_cpu(slopes, a, kept, selection, kind);
  } else if constexpr (kCuda) {
    slopes24_cuda(slopes, a, kept, selection, kind);
  }
}

MlpSparse24Result mlp_sparse24(const Tensor& x, const Tensor& up, const Tensor& down, const MlpSparse24& how,
                               const Tensor& up_bias, const Tensor& down_bias, const Tensor& residual,
                               Site site) {
  const CallScope call(site);
  check_operand("mlp_sparse24", "x", x, x);
  check(x.rank() >= 1, "mlp_sparse24: x is a scalar; expected [..., D]");
  check_linear("mlp_sparse24", "up", x, x.size(-1), up, up_bias);
  check_linear("mlp_sparse24", "down", x, up.size(0), down, down_bias);
  const Shape shape = x.shape().with(-1, down.size(0));
  check_residual("mlp_sparse24", x, shape, residual);
  how.validate("mlp_sparse24");
  check_call(x, up, how);
  const PassVariant pass("mlp_sparse24", x);
  const ForceParts force(x.device());
  if (force.fused()) {
    const std::string lacks = fused_lacks(how, flatten_leading(x, 1), up.detach());
    check(lacks.empty(), "mlp_sparse24: variant fused needs ", lacks);
  }
  Tape* const tape = Tape::recording(x, up, down, up_bias, down_bias, residual);
  MlpSparse24Result result{Tensor::empty(shape, x.dtype(), x.device()), {}};
  const Tensor added = residual.defined() ? flatten_leading(residual, 1) : residual;
  const Hidden hidden =
      forward(flatten_leading(result.y, 1), flatten_leading(x, 1), up.detach(), down.detach(),
              up_bias.detach(), down_bias.detach(), added, how, tape != nullptr);
  result.counts = hidden.counts;
  if (how.l1) result.l1 = hidden.mean_magnitude(flatten_leading(x, 1).size(0) * up.size(0));
  if (!tape) return result;
  Pass saved{.how = how,
             .x = requires_grad(up) ? Saved(x) : Saved(),
             .up = Saved(up),
             .down = Saved(down),
             .a = Saved(hidden.a),
             .values = Saved(hidden.kept.values),
             .metadata = Saved(hidden.kept.metadata),
             .slope_values = Saved(hidden.slopes.values),
             .columns = Saved(hidden.columns),
             .dense = Saved(hidden.dense),
             .tokens = flatten_leading(x, 1).size(0),
             .hidden = up.size(0),
             .shape = x.shape(),
             .token_selection = {.method = how.token_method},
             .token_selection_of_gradient = {.method = how.token_method}};
  if (how.token_method == Method24::mvue && !how.is_dense()) {
    saved.token_selection = Selection24::mvue(*how.rng, x.device());
    saved.token_selection_of_gradient = Selection24::mvue(*how.rng, x.device());
  }
  saved.how.previous = Tensor();  // belongs to the forward pass; the caller may write over it
  saved.how.dynamic = nullptr;
  if (how.l1)
    tape->record("mlp_sparse24", {&x, &up, &down, &up_bias, &down_bias, &residual}, {&result.y, &result.l1},
                 std::move(saved));
  else
    tape->record("mlp_sparse24", {&x, &up, &down, &up_bias, &down_bias, &residual}, {&result.y},
                 std::move(saved));
  return result;
}

}  // namespace tessera::ops
