#include "ops/linear/sliced_rows_internal.h"

#include <algorithm>
#include <cmath>

#include "autograd/backward.h"
#include "ops/gemm/gemm.h"
#include "ops/gemm/gemm_models_internal.h"
#include "ops/gemm/gemm_scatter_internal.h"
#include "ops/linear/linear_kernels.h"
#include "ops/select/select_kernels.h"
#include "runtime/has_cuda.h"
#include "runtime/text.h"

namespace tessera::ops {
namespace {

constexpr const char* kWeightGradNames[] = {"none", "slice", "full"};

}  // namespace

// ---- the settings ----

const char* name_of(WeightGrad kind) {
  return kWeightGradNames[size_t(kind)];
}

WeightGrad parse_weight_grad(const std::string& name) {
  return parse_name<WeightGrad>("slice: there is no weight_grad", kWeightGradNames, name);
}

bool SlicedBackward::operator==(const SlicedBackward& other) const {
  return rows == other.rows && n == other.n && share == other.share && threshold == other.threshold &&
         weight_grad == other.weight_grad && rng == other.rng;
}

void SlicedBackward::validate(const std::string& what) const {
  const std::string mode = name_of(rows);
  check(!n || *n >= 1, what, ": the slice has n = ", n.value_or(0), "; expected 1 or more rows");
  check(!share || (*share > 0 && *share <= 1), what, ": the slice has a share of ", share.value_or(0),
        "; expected a number above 0, at most 1 (all rows)");
  check(!threshold || !std::isnan(*threshold), what, ": the slice's threshold is NaN; expected a number");
  if (rows == SelectMode::threshold) {
    check(threshold.has_value(), what,
          ": a slice of mode threshold needs a threshold; set SlicedBackward::threshold");
    check(!n && !share, what, ": a slice of mode threshold has no ", n ? "n" : "share",
          ", the threshold decides how many rows there are; leave it out");
    return;
  }
  check(!threshold, what, ": a slice of mode ", mode, " has no threshold; give n or share, or choose mode ",
        "threshold");
  check(!n || !share, what, ": the slice has n = ", n.value_or(0), " and a share of ", share.value_or(0),
        "; give one of the two");
  check(n || share, what, ": the slice does not say how many rows; set n or share");
  check(rng || (rows != SelectMode::random && rows != SelectMode::importance), what, ": a slice of mode ",
        mode, " draws random numbers; set SlicedBackward::rng to a generator");
}

std::string to_string(const SlicedBackward& slice) {
  std::string text = name_of(slice.rows);
  if (slice.n) text += " " + std::to_string(*slice.n);
  if (slice.share) text += text_of(" ", 100 * *slice.share, "%");
  if (slice.threshold) text += text_of(" ", *slice.threshold);
  return text + ", weight_grad " + name_of(slice.weight_grad);
}

// ---- the choice ----

SlicedRows::SlicedRows(const char* op, const SlicedBackward& slice, int64_t rows, Device device)
    : slice_(slice), rows_(rows), count_(rows), device_(device) {
  slice.validate(op);
  if (slice.valid.defined())
    check(slice.valid.dtype() == DType::i32 && slice.valid.shape() == Shape{1} &&
              slice.valid.device() == device,
          op, ": the slice's number of valid rows is ", describe(slice.valid), "; expected i32 [1] on ",
          device.name());
  if (slice.n) count_ = std::min(*slice.n, rows);
  if (slice.share) count_ = share_of_rows(rows, *slice.share);
  all_ = count_ == rows && slice.rows != SelectMode::threshold;
  is_prefix_ = !all_ && slice.rows == SelectMode::first && !slice.valid.defined();
  if (all_ || is_prefix_) return;
  if (is_drawn()) stream_ = draw();
  if (is_known()) use(select({}));
}

RandomStream SlicedRows::draw() const {
  if (!slice_.shared) return slice_.rng->reserve(device_);
  std::optional<RandomStream>& stream = slice_.shared->stream;
  if (!stream) stream = slice_.rng->reserve(device_);
  return *stream;
}

bool SlicedRows::is_known() const {
  return all_ || slice_.rows == SelectMode::first || slice_.rows == SelectMode::random;
}

bool SlicedRows::is_drawn() const {
  return slice_.rows == SelectMode::random || slice_.rows == SelectMode::importance;
}

WeightGrad SlicedRows::weight_grad() const {
  const bool arrives_sliced = !all_ && !is_prefix_ && slice_.shared && !scales_;
  return arrives_sliced && slice_.weight_grad == WeightGrad::full ? WeightGrad::slice : slice_.weight_grad;
}

/// Chosen now, or by the call that shares the rows.
Selection SlicedRows::select(const Tensor& norms) const {
  if (slice_.shared && slice_.shared->selection.indices.defined()) {
    check(slice_.shared->selection.rows == rows_, "slice: calls of ", slice_.shared->selection.rows, " and ",
          rows_, " rows share their rows; only calls of the same tokens can");
    return slice_.shared->selection;
  }
  const double share = slice_.rows == SelectMode::threshold ? 1 : slice_.share.value_or(1);
  Selection chosen =
      run_selection(slice_.rows, norms, rows_, count_, device_, {.rows = slice_.valid, .share = share},
                    float(slice_.threshold.value_or(0)), stream_);
  if (slice_.shared) slice_.shared->selection = chosen;
  return chosen;
}

/// On the CPU the host knows the count, and padding entries cost time for nothing.
void SlicedRows::use(const Selection& selection) {
  selection_ = selection;
  if (!device_.is_cpu()) return;
  count_ = selection.count.item<int32_t>();
  selection_.indices = selection.indices.slice(0, 0, count_);
  selection_.scales = selection.scales.slice(0, 0, count_);
}

void SlicedRows::choose(const Tensor& dy) {
  if (all_ || is_prefix_) return;
  scales_ = !slice_.shared || !slice_.shared->scaled;
  if (slice_.shared) slice_.shared->scaled = true;
  if (!selection_.indices.defined()) use(select(row_norms(flatten_leading(dy, 1))));
}

// ---- what is done with the rows ----

Tensor SlicedRows::keep(const Tensor& x) const {
  if (all_ || !is_known()) return x.detach();
  const Tensor rows = take(x);
  return is_prefix_ ? rows.clone() : rows;  // a view would keep all of x
}

Tensor SlicedRows::take(const Tensor& x) const {
  const Tensor rows = flatten_leading(x, 1);
  if (all_) return rows;
  return is_prefix_ ? rows.slice(0, 0, count_) : gather_selected(rows, selection_);
}

Tensor SlicedRows::take_scaled(const Tensor& dy) const {
  if (all_ || is_prefix_ || !scales_ || !is_drawn()) return take(dy);
  return gather_selected(flatten_leading(dy, 1), selection_, RowScale::selection);
}

void SlicedRows::give_input_gradient(Backward& entry, int input, const Shape& shape, const Tensor& dy_rows,
                                     const Tensor& weight) const {
  if (!entry.needs(input)) return;
  if (all_)
    return linear_input_gradient(entry, input, shape, dy_rows.reshape(shape.with(-1, weight.size(0))),
                                 weight);
  GradTarget target = entry.target(input);
  if (target.grad.defined()) {
    const DType held = target.grad.dtype();
    const bool fits = held == dy_rows.dtype() || held == sum_dtype(dy_rows.dtype());
    if (!fits || !flatten_leading(target.grad, 1).shares_storage(target.grad) ||
        !writable(flatten_leading(target.grad, 1)))
      target = {};
  }
  if (!target.grad.defined()) target = {Tensor::empty(shape, dy_rows.dtype(), dy_rows.device()), false};
  write_rows(flatten_leading(target.grad, 1), dy_rows, weight, target.accumulate);
  entry.written(input, target);
}

namespace {

/// The rows that `indices` names (undefined: the first ones) of dx [M, in] = or += dy_rows weight; where they
/// are not added to, the other rows become 0.
struct RowsProduct {
  const Tensor &dx, &dy_rows, &weight, &indices;
  bool accumulate;

  Gemm gemm() const {
    Gemm g{.m = dy_rows.size(0),
           .n = dx.size(1),
           .k = dy_rows.size(1),
           .in = dy_rows.dtype(),
           .out = dx.dtype(),
           .beta = accumulate ? 1.0 : 0.0};
    g.a = dy_rows.raw(), g.b = weight.raw(), g.d = dx.raw();
    g.lda = dy_rows.layout().stride(0), g.ldb = weight.layout().stride(0), g.ldd = dx.layout().stride(0);
    return g;
  }
};

std::string describe_problem(const RowsProduct& product) {
  return text_of("dx ", describe(product.dx), " of the rows ", describe(product.dy_rows), " and weight ",
                 describe(product.weight));
}

Reason scatter_lacks(const RowsProduct& product, const Gpu& gpu) {
  if (gpu.major != 9) return "a GPU of compute capability 9.0";
  if (product.dx.count() == 0 || product.dy_rows.count() == 0) return "operands that are not empty";
  if (product.dx.size(0) > int64_t{1} << 30) return "at most 2^30 rows";
  for (const Tensor* x : {&product.dx, &product.dy_rows, &product.weight})
    if (x->layout().stride(1) != 1 || x->layout().stride(0) < x->size(1)) return "matrices with dense rows";
  return gemm_scatter_lacks(product.gemm(), gpu);
}

GemmScatter scatter_of(const RowsProduct& product) {
  return {product.indices.defined() ? product.indices.data<int32_t>() : nullptr, product.dx.size(0)};
}

void run_scatter(const RowsProduct& product) {
  gemm_scatter(product.gemm(), scatter_of(product), product.dx.device());
}

/// The GEMM of the rows, and what moves them to their places and fills the others.
void run_separately(const RowsProduct& product) {
  const Tensor &dx = product.dx, &dy_rows = product.dy_rows, &indices = product.indices;
  const int64_t count = dy_rows.size(0);
  if (!indices.defined()) {
    multiply(dx.slice(0, 0, count), dy_rows, product.weight, {.accumulate = product.accumulate});
    if (!product.accumulate) dx.slice(0, count, dx.size(0)).fill(0);
    return;
  }
  const DType dtype = product.accumulate ? sum_dtype(dx.dtype()) : dx.dtype();
  const Tensor rows = Tensor::empty({count, dx.size(1)}, dtype, dx.device());
  multiply(rows, dy_rows, product.weight);
  if (dx.count() == 0) return;
  if (dx.device().is_cpu()) {
    if (product.accumulate)
      add_selected_cpu(dx, rows, indices);
    else
      scatter_selected_cpu(dx, rows, indices, {});
  } else if constexpr (kCuda) {
    if (product.accumulate)
      add_selected_cuda(dx, rows, indices);
    else
      scatter_selected_cuda(dx, rows, indices, {});
  }
}

/// The GEMM, by its model, and what comes after it: zeros, or rows that are read and written once more.
Estimate separate_estimate(const RowsProduct& product, const Gpu& gpu) {
  const Gemm g = product.gemm();
  if (g.m == 0 || g.n == 0 || g.k == 0) return Estimate::preferred();
  const PaddingCosts& c = gemm_costs(gpu).padding;
  const GemmOnGpu problem = gemm_on_gpu(g, gpu);
  double seconds = problem.cublas_estimate().seconds;
  if (gemm_sm90_lacks(g, gpu).empty()) seconds = std::min(seconds, problem.wgmma_estimate().seconds);
  const double element = double(size_of(g.out)), rows = double(g.m * g.n);
  double bytes = product.accumulate ? 0 : double(product.dx.count()) * element - rows * element;
  if (product.indices.defined()) bytes += product.accumulate ? rows * (4 + 2 * element) : 2 * rows * element;
  return {seconds + (bytes > 0 ? c.launch + bytes / c.bytes_per_second : 0)};
}

Estimate scatter_estimate(const RowsProduct& product, const Gpu& gpu) {
  return {choose_scatter(product.gemm(), scatter_of(product), gpu).seconds};
}

constexpr const char* kScatter[] = {"wgmma scatter", nullptr};

/// How dx gets its rows on a GPU.
constexpr Variant<RowsProduct> kVariants[] = {
    {"separate", lacks_nothing<RowsProduct>, separate_estimate, run_separately, kGemmVariants},
    {"scatter", scatter_lacks, scatter_estimate, run_scatter, kScatter}};

}  // namespace

std::string_view sliced_dx_variant(const Tensor& dx, const Tensor& dy_rows, const Tensor& weight,
                                   const Tensor& indices, const Gpu& gpu) {
  return choose("gemm", kVariants, RowsProduct{dx, dy_rows, weight, indices, false}, gpu).name;
}

void SlicedRows::write_rows(const Tensor& dx, const Tensor& dy_rows, const Tensor& weight,
                            bool accumulate) const {
  const Tensor indices = is_prefix_ ? Tensor() : selection_.indices;
  const Tensor rows = dy_rows.detach(), matrix = weight.detach();
  const RowsProduct product{dx, rows, matrix, indices, accumulate};
  if (dx.device().is_cpu()) return run_separately(product);
  ops::choose("gemm", kVariants, product, Gpu(dx.device())).launch(product);
}

}  // namespace tessera::ops
