#include "ops/reduce/reduce.h"

#include <bit>
#include <limits>
#include <span>
#include <vector>

#include "autograd/tape.h"
#include "ops/pointwise/pointwise.h"
#include "ops/reduce/logsumexp_kernels.h"
#include "ops/reduce/reduce_integers.h"
#include "ops/reduce/reduce_kernels.h"
#include "ops/sum_dtype.h"
#include "runtime/has_cuda.h"

namespace tessera::ops {

const char* name_of(ReduceKind kind) {
  constexpr const char* kNames[] = {"sum", "mean", "max", "min", "norm"};
  return kNames[size_t(kind)];
}

namespace {

/// Which dimensions of x are reduced.
class Reduced {
 public:
  static Reduced all(const Tensor& x) { return Reduced(x.rank(), (1u << x.rank()) - 1); }
  Reduced(const char* name, const Tensor& x, std::span<const int> dims) : Reduced(x.rank(), 0) {
    check(!dims.empty(), name, ": no dimension of ", describe(x),
          " is named; name one, or leave them out to "
          "reduce all");
    for (const int dim : dims) {
      check(dim >= -rank_ && dim < rank_, name, ": dimension ", dim, " is outside ", describe(x));
      const int at = dim < 0 ? dim + rank_ : dim;
      check(!has(at), name, ": dimension ", dim, " of ", describe(x), " is named twice");
      bits_ |= 1u << at;
    }
  }

  bool has(int dim) const { return bits_ >> dim & 1u; }
  bool is_one() const { return std::has_single_bit(bits_); }
  int first() const { return std::countr_zero(bits_); }
  /// x's shape without these dimensions or, with `keep`, with sizes of 1.
  Shape result(const Shape& x, bool keep) const {
    std::vector<int64_t> sizes;
    for (int dim = 0; dim < rank_; ++dim)
      if (!has(dim)) {
        sizes.push_back(x[dim]);
      } else if (keep) {
        sizes.push_back(1);
      }
    return Shape(sizes);
  }
  int64_t length(const Shape& x) const {
    int64_t product = 1;
    for (int dim = 0; dim < rank_; ++dim) product *= has(dim) ? x[dim] : 1;
    return product;
  }
  /// The dimensions that stay, then these; and the way back.
  std::vector<int> order() const {
    std::vector<int> all;
    for (const bool reduced : {false, true})
      for (int dim = 0; dim < rank_; ++dim)
        if (has(dim) == reduced) all.push_back(dim);
    return all;
  }
  std::vector<int> inverse_order() const {
    std::vector<int> back(size_t(rank_), 0);
    const std::vector<int> all = order();
    for (int at = 0; at < rank_; ++at) back[size_t(all[size_t(at)])] = at;
    return back;
  }

 private:
  Reduced(int rank, unsigned bits) : rank_(rank), bits_(bits) {}
  int rank_;
  unsigned bits_;
};

/// dy or y of the whole reduction, broadcastable to x.
Tensor with_dims(const Tensor& y, const Shape& x, const Reduced& dims) {
  return y.rank() == 0 || y.rank() == x.rank() ? y : y.reshape(dims.result(x, true));
}

void max_backward(Backward& b, const Tensor& x, const Tensor& y, const Reduced& dims) {
  if (dims.is_one()) {
    Tensor dx = Tensor::empty_like(x);
    max_backward_cpu(dx, b.grad(), x, y.packed(), dims.first());
    return b.give(0, std::move(dx));
  }
  // Over several, "first" is in row-major order: as the one last dimension of a packed tensor.
  const Shape outputs = dims.result(x.shape(), false),
              rows = outputs.inserted(outputs.rank(), dims.length(x.shape()));
  const Tensor from = x.permute(dims.order());
  Tensor dx = Tensor::empty_packed(from.shape(), x.dtype(), x.device());
  max_backward_cpu(dx.reshape(rows), b.grad().reshaped(outputs), from.packed().reshape(rows),
                   y.packed().reshape(outputs), -1);
  b.give(0, dx.permute(dims.inverse_order()));
}

bool chooses(ReduceKind kind) {
  return kind == ReduceKind::max || kind == ReduceKind::min;
}

void check_choice(const char* name, const Tensor& x, const Reduced& dims) {
  check(dims.length(x.shape()) > 0, name, ": ", describe(x),
        " has no element to choose from; reduce over a dimension that is not empty");
}

/// Makes x and its results `y`, whose reduced dimensions are 1 where they have x's rank, operands of one pass
/// on a GPU: what none takes is packed first, in row-major order of the reduced dimensions.
void make_one_pass(Tensor& x, std::initializer_list<Tensor*> y, const Reduced& dims) {
  if (is_one_pass(plan_to(x.layout(), (*y.begin())->layout()))) return;
  const Shape outputs = dims.result(x.shape(), false);
  x = x.permute(dims.order()).packed().reshape(outputs.inserted(outputs.rank(), dims.length(x.shape())));
  for (Tensor* const each : y) *each = each->reshape(outputs.inserted(outputs.rank(), 1));
}

/// max and min on a GPU, which keep the indices for backward.
Tensor choose_on_gpu(Tape& tape, const Tensor& x, ReduceKind kind, const Reduced& dims, bool keep) {
  check_choice(name_of(kind), x, dims);
  Tensor y = Tensor::empty(dims.result(x.shape(), keep), x.dtype(), x.device());
  const Tensor index = Tensor::empty_packed({y.count()}, DType::i64, x.device());
  if constexpr (kCuda) {
    Tensor from = x.detach(), to = with_dims(y.detach(), x.shape(), dims);
    make_one_pass(from, {&to}, dims);
    if (y.count() > 0)
      choose_cuda(to, index, from, plan_to(from.layout(), to.layout()), kind == ReduceKind::max);
    tape.record(name_of(kind), {&x}, {&y}, [index, shape = x.shape(), dims](Backward& b) {
      const Tensor dy = with_dims(b.grad(), shape, dims);
      Tensor dx = Tensor::empty(shape, dy.dtype(), dy.device());
      choose_backward_cuda(dx, dy, index, plan_to(dx.layout(), dy.layout()));
      b.give(0, std::move(dx));
    });
  }
  return y;
}

/// Not recorded.
Tensor reduced(const char* name, const Tensor& x, ReduceKind kind, const Reduced& dims, bool keep) {
  const int64_t length = dims.length(x.shape());
  if (chooses(kind)) check_choice(name, x, dims);
  const bool whole = x.dtype() == DType::i64 || x.dtype() == DType::i32 || x.dtype() == DType::boolean;
  check(!whole || (kind != ReduceKind::mean && kind != ReduceKind::norm), name, ": dtype ", x.dtype(),
        " is not supported, as its ", name, " is no whole number; convert x with ops::cast");
  if (x.dtype() == DType::boolean && kind != ReduceKind::sum) {  // any: the count is not 0; all: it is all
    const Tensor count = reduced(name, x, ReduceKind::sum, dims, keep);
    return kind == ReduceKind::max ? greater(count, 0) : equal(count, double(length));
  }
  const bool sums = whole && kind == ReduceKind::sum;
  Tensor y = Tensor::empty(dims.result(x.shape(), keep), sums ? DType::i64 : x.dtype(), x.device());
  if (length == 0) {
    y.fill(kind == ReduceKind::mean ? std::numeric_limits<double>::quiet_NaN() : 0.0);
  } else if (y.count() > 0) {
    const ReducePlan plan = plan_to(x.layout(), with_dims(y, x.shape(), dims).layout());
    if (x.device().is_cpu()) {
      whole ? reduce_integers_cpu(y, x, plan, kind) : reduce_cpu(y, x, plan, kind);
    } else if constexpr (kCuda) {
      whole ? reduce_integers_cuda(y, x, plan, kind) : reduce_cuda(y, x, plan, kind);
    }
  }
  return y;
}

Tensor reduce(const Tensor& x, ReduceKind kind, const Reduced& dims, bool keep) {
  Tape* const tape = Tape::recording(x);
  if (tape && chooses(kind) && x.device().is_cuda()) return choose_on_gpu(*tape, x, kind, dims, keep);
  Tensor y = reduced(name_of(kind), x, kind, dims, keep);
  if (!tape) return y;
  if (kind == ReduceKind::sum || kind == ReduceKind::mean) {
    const int64_t divisor = kind == ReduceKind::mean ? dims.length(x.shape()) : 1;
    tape->record(name_of(kind), {&x}, {&y}, [shape = x.shape(), dims, divisor](Backward& b) {
      const Tensor dy = with_dims(b.grad(), shape, dims);
      Tensor dx = Tensor::empty(shape, dy.dtype(), dy.device());
      if (dx.device().is_cpu()) {
        spread_cpu(dx, dy, divisor);
      } else if constexpr (kCuda) {
        spread_cuda(dx, dy, divisor);
      }
      b.give(0, std::move(dx));
    });
  } else {
    tape->record(name_of(kind), {&x}, {&y}, [kept = Saved(x), result = Saved(y), dims, kind](Backward& b) {
      const Tensor &x = kept.get(), &y = result.get();
      if (kind != ReduceKind::norm) return max_backward(b, x, y, dims);
      const Tensor dy = with_dims(b.grad(), x.shape(), dims), whole = with_dims(y, x.shape(), dims);
      Tensor dx = Tensor::empty_like(x);
      if (dx.device().is_cpu()) {
        l2_backward_cpu(dx, dy, x, whole);
      } else if constexpr (kCuda) {
        l2_backward_cuda(dx, dy, x, whole);
      }
      b.give(0, std::move(dx));
    });
  }
  return y;
}

void record_logsumexp(Tape& tape, const Tensor& x, Tensor& y, const Tensor& largest, const Tensor& sum,
                      const Reduced& dims) {
  tape.record(
      "logsumexp", {&x}, {&y}, [x = Saved(x), largest = Saved(largest), sum = Saved(sum), dims](Backward& b) {
        Tensor dx = Tensor::empty_like(x.get());
        if (dx.count() == 0) return b.give(0, std::move(dx));
        const Tensor dy = with_dims(b.grad(), dx.shape(), dims), shares = Tensor::empty_like(sum.get());
        if (dx.device().is_cpu()) {
          shares_cpu(shares, dy, sum.get());
          share_out_cpu(dx, shares, x.get(), largest.get());
        } else if constexpr (kCuda) {
          shares_cuda(shares, dy, sum.get());
          share_out_cuda(dx, shares, x.get(), largest.get());
        }
        b.give(0, std::move(dx));
      });
}

Tensor log_sum(const Tensor& x, const Reduced& dims, bool keep) {
  check(is_floating(x.dtype()) && x.dtype() != DType::f8e4m3, "logsumexp: dtype ", x.dtype(),
        " is not supported; expected f64, f32, bf16 or f16");
  Tensor y = Tensor::empty(dims.result(x.shape(), keep), x.dtype(), x.device()), largest, sum;
  if (x.count() == 0) {
    y.fill(-std::numeric_limits<double>::infinity());
  } else {
    largest = reduced("logsumexp", x.detach(), ReduceKind::max, dims, true);
    const Tensor whole = y.reshape(largest.shape());
    const DType dtype = sum_dtype(x.dtype());
    if (x.device().is_cpu()) {
      const Tensor e = Tensor::empty(x.shape(), dtype, x.device());
      exponentials_cpu(e, x.detach(), largest);
      sum = sum_to(e, largest.shape());
      logarithms_cpu(whole, largest, sum);
    } else if constexpr (kCuda) {
      sum = Tensor::empty(largest.shape(), dtype, x.device());
      Tensor from = x.detach(), to = sum, most = largest;
      make_one_pass(from, {&to, &most}, dims);
      sum_exponentials_cuda(to, from, most);
      logarithms_cuda(whole, largest, sum);
    }
  }
  if (Tape* const tape = Tape::recording(x)) record_logsumexp(*tape, x, y, largest, sum, dims);
  return y;
}

Tensor reduce_all(const Tensor& x, ReduceKind kind, Site site) {
  const CallScope call(site);
  check(x.defined(), name_of(kind), ": x is undefined");
  return reduce(x, kind, Reduced::all(x), false);
}

Tensor reduce_dims(const Tensor& x, ReduceKind kind, std::span<const int> dims, bool keep, Site site) {
  const CallScope call(site);
  check(x.defined(), name_of(kind), ": x is undefined");
  return reduce(x, kind, Reduced(name_of(kind), x, dims), keep);
}

Tensor find_first(const char* name, const Tensor& x, ReduceKind kind, int dim, bool keep, Site site) {
  const CallScope call(site);
  check(x.defined(), name, ": x is undefined");
  const Reduced dims(name, x, std::span(&dim, 1));
  check((is_floating(x.dtype()) && x.dtype() != DType::f8e4m3) || x.dtype() == DType::i64 ||
            x.dtype() == DType::i32,
        name, ": dtype ", x.dtype(), " is not supported; expected f64, f32, bf16, f16, i64 or i32");
  check_choice(name, x, dims);
  const Tensor index = Tensor::empty_packed(dims.result(x.shape(), false), DType::i64, x.device());
  if (x.device().is_cpu()) {
    find_first_cpu(index, x, reduced(name, x.detach(), kind, dims, false).packed(), dim);
  } else if constexpr (kCuda) {
    if (index.count() > 0)
      choose_cuda({}, index, x, plan_dim(x.layout(), dim, index.layout()), kind == ReduceKind::max);
  }
  return keep ? index.reshape(dims.result(x.shape(), true)) : index;
}

}  // namespace

Tensor sum(const Tensor& x, Site site) {
  return reduce_all(x, ReduceKind::sum, site);
}
Tensor sum(const Tensor& x, int dim, bool keep, Site site) {
  return reduce_dims(x, ReduceKind::sum, std::span(&dim, 1), keep, site);
}
Tensor sum(const Tensor& x, const std::vector<int>& dims, bool keep, Site site) {
  return reduce_dims(x, ReduceKind::sum, dims, keep, site);
}
Tensor mean(const Tensor& x, Site site) {
  return reduce_all(x, ReduceKind::mean, site);
}
Tensor mean(const Tensor& x, int dim, bool keep, Site site) {
  return reduce_dims(x, ReduceKind::mean, std::span(&dim, 1), keep, site);
}
Tensor mean(const Tensor& x, const std::vector<int>& dims, bool keep, Site site) {
  return reduce_dims(x, ReduceKind::mean, dims, keep, site);
}
Tensor max(const Tensor& x, Site site) {
  return reduce_all(x, ReduceKind::max, site);
}
Tensor max(const Tensor& x, int dim, bool keep, Site site) {
  return reduce_dims(x, ReduceKind::max, std::span(&dim, 1), keep, site);
}
Tensor max(const Tensor& x, const std::vector<int>& dims, bool keep, Site site) {
  return reduce_dims(x, ReduceKind::max, dims, keep, site);
}
Tensor min(const Tensor& x, Site site) {
  return reduce_all(x, ReduceKind::min, site);
}
Tensor min(const Tensor& x, int dim, bool keep, Site site) {
  return reduce_dims(x, ReduceKind::min, std::span(&dim, 1), keep, site);
}
Tensor min(const Tensor& x, const std::vector<int>& dims, bool keep, Site site) {
  return reduce_dims(x, ReduceKind::min, dims, keep, site);
}
Tensor norm(const Tensor& x, Site site) {
  return reduce_all(x, ReduceKind::norm, site);
}
Tensor norm(const Tensor& x, int dim, bool keep, Site site) {
  return reduce_dims(x, ReduceKind::norm, std::span(&dim, 1), keep, site);
}
Tensor norm(const Tensor& x, const std::vector<int>& dims, bool keep, Site site) {
  return reduce_dims(x, ReduceKind::norm, dims, keep, site);
}
Tensor logsumexp(const Tensor& x, Site site) {
  const CallScope call(site);
  check(x.defined(), "logsumexp: x is undefined");
  return log_sum(x, Reduced::all(x), false);
}
Tensor logsumexp(const Tensor& x, int dim, bool keep, Site site) {
  const CallScope call(site);
  check(x.defined(), "logsumexp: x is undefined");
  return log_sum(x, Reduced("logsumexp", x, std::span(&dim, 1)), keep);
}
Tensor logsumexp(const Tensor& x, const std::vector<int>& dims, bool keep, Site site) {
  const CallScope call(site);
  check(x.defined(), "logsumexp: x is undefined");
  return log_sum(x, Reduced("logsumexp", x, dims), keep);
}

Tensor argmax(const Tensor& x, int dim, bool keep, Site site) {
  return find_first("argmax", x, ReduceKind::max, dim, keep, site);
}
Tensor argmin(const Tensor& x, int dim, bool keep, Site site) {
  return find_first("argmin", x, ReduceKind::min, dim, keep, site);
}

Tensor sum_to(const Tensor& x, const Shape& shape, DType dtype, Site site) {
  const CallScope call(site);
  check(x.defined(), "sum_to: x is undefined");
  if (shape == x.shape() && dtype == x.dtype()) return x;
  check(broadcast(shape, x.shape(), "sum_to") == x.shape(), "sum_to: ", shape, " does not broadcast to ",
        describe(x));
  check(dtype == x.dtype() || (dtype == DType::f32 && x.dtype() != DType::f64), "sum_to: ", describe(x),
        " to dtype ", dtype, "; expected ", x.dtype(), " or f32");
  Tensor y = Tensor::empty(shape, dtype, x.device());
  const ReducePlan plan = plan_to(x.layout(), y.layout());
  if (plan.length == 0) {
    y.fill(0);
  } else if (plan.outputs > 0) {
    if (x.device().is_cpu()) {
      reduce_cpu(y, x, plan, ReduceKind::sum);
    } else if constexpr (kCuda) {
      reduce_cuda(y, x, plan, ReduceKind::sum);
    }
  }
  return y;
}

Tensor sum_to(const Tensor& x, const Shape& shape, Site site) {
  const CallScope call(site);
  check(x.defined(), "sum_to: x is undefined");
  return sum_to(x, shape, x.dtype());
}

}  // namespace tessera::ops
