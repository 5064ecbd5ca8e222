#include "optim/muon.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "ops/gemm/gemm.h"
#include "optim/bundled.h"
#include "optim/muon_kernels.h"
#include "optim/options_internal.h"
#include "runtime/has_cuda.h"
#include "runtime/integers.h"

namespace tessera::optim {
namespace {

/// The odd polynomial a s + b s^3 + c s^5, iterated: its slope at 0 is large, so that small singular values
/// grow fast, and above some size it keeps them in a band around 1 instead of meeting 1 (Jordan et al.,
/// 2024).
constexpr double kA = 3.4445, kB = -4.7750, kC = 2.0315;

/// Elements of a batch, at most: 128 MiB of bf16, enough to fill a GPU. More would only take more scratch.
constexpr int64_t kMostElements = int64_t(1) << 26;
/// Matrices of a batch, at most: blocks along a grid's second dimension.
constexpr int64_t kMostMatrices = 65535;

int64_t most_of_batch(int64_t rows, int64_t columns) {
  return std::clamp<int64_t>(kMostElements / (rows * columns), 1, kMostMatrices);
}

/// Elements of a row in scratch: rows start on 128-byte lines.
int64_t padded(int64_t columns, DType dtype) {
  const int64_t line = 128 / int64_t(size_of(dtype));
  return round_up(columns, line);
}

/// Matrices of one shape at equal distances in the arena of directions.
struct Batch {
  Tensor direction;  // [B, rows, columns]
  double scale;
};

/// Muon as a rule. The scratch does not count as state: begin() makes it once, no step allocates.
class MuonRule : public Rule {
 public:
  explicit MuonRule(const MuonOptions& options) : options_(options) {}
  const char* name() const override { return "muon"; }
  bool batches() const override { return true; }

  void begin() override {
    momentum_ = arena("momentum");
    direction_ = scratch_arena();
    x_dtype_ = options_.compute.value_or(muon_compute(compute_dtype(), device()));
    check(x_dtype_ == compute_dtype() || (compute_dtype() == DType::f32 && size_of(x_dtype_) == 2), name(),
          ": compute is ", x_dtype_, "; expected ", compute_dtype(),
          compute_dtype() == DType::f32 ? ", bf16 or f16" : "");
    for (size_t i = 0; i < parameters().size(); ++i) add(i);
    MuonScratch most;
    for (const Batch& batch : batches_)
      most.fit(batch.direction.size(0), batch.direction.size(1), batch.direction.size(2), x_dtype_);
    x_ = scratch(most.matrices, x_dtype_), y_ = scratch(most.matrices, x_dtype_);
    gram_ = scratch(most.squares, x_dtype_), polynomial_ = scratch(most.squares, x_dtype_);
    partials_ = scratch(most.parts, DType::f64);
  }

  void step() override {
    apply(DirectionRule{options_.momentum, options_.nesterov}, {momentum_, direction_});
    for (const Batch& batch : batches_) orthogonalize(batch);
    descend(direction_);
  }

 private:
  /// Takes parameter i into the last batch, if its matrix continues that one, or into new ones.
  void add(size_t i) {
    const Tensor matrix = view(direction_, i);
    check(matrix.rank() >= 2 && matrix.size(-1) >= 1 && matrix.size(-2) >= 1, name(), ": ",
          parameters()[i].name, " ", describe(parameters()[i].weight),
          " is no matrix; put it into a group with the rule adamw");
    const int64_t rows = matrix.size(-2), columns = matrix.size(-1), row_stride = matrix.row_stride(),
                  most = most_of_batch(rows, columns);
    if (matrix.rank() == 2 && !batches_.empty()) {
      Tensor& batch = batches_.back().direction;
      Layout layout = batch.layout();
      const int64_t count = batch.size(0), distance = matrix.layout().offset - layout.offset;
      const bool same = batch.size(1) == rows && batch.size(2) == columns && layout.stride(1) == row_stride;
      if (same && count < most && (count == 1 || distance == count * layout.stride(0))) {
        layout.shape = Shape{count + 1, rows, columns};
        layout.strides[0] = distance / count;
        batch = Tensor::view_of(direction_.storage(), layout, direction_.dtype());
        return;
      }
    }
    const int64_t count = matrix.count() / (rows * columns);
    for (int64_t first = 0; first < count; first += most) {
      Layout layout;
      layout.shape = Shape{std::min(most, count - first), rows, columns};
      layout.strides = {rows * row_stride, row_stride, 1};
      layout.offset = matrix.layout().offset + first * rows * row_stride;
      batches_.push_back({Tensor::view_of(direction_.storage(), layout, direction_.dtype()),
                          options_.scale == MuonScale::spectral
                              ? std::sqrt(std::max(1.0, double(rows) / double(columns)))
                              : 0.2 * std::sqrt(double(std::max(rows, columns)))});
    }
  }

  static Shape square_of(const Tensor& batch) {
    const int64_t side = std::min(batch.size(1), batch.size(2));
    return {batch.size(0), side, side};
  }
  Tensor part(const Tensor& memory, const Shape& shape) const {
    return Tensor::view_of(memory.storage(), Layout::pitched(shape, padded(shape[2], x_dtype_)), x_dtype_);
  }

  void orthogonalize(const Batch& batch) const {
    const Tensor& direction = batch.direction;
    const bool wide = direction.size(1) <= direction.size(2);
    Tensor x = part(x_, direction.shape()), y = part(y_, direction.shape());
    const Tensor gram = part(gram_, square_of(direction)),
                 polynomial = part(polynomial_, square_of(direction));
    normalize(x, direction);
    for (int k = 1; k <= options_.iterations; ++k) {
      const bool last = k == options_.iterations;
      const Tensor transposed = x.transpose(-1, -2), &to = last ? direction : y;
      ops::multiply(gram, wide ? x : transposed, wide ? transposed : x);
      begin_polynomial(polynomial, gram);
      ops::multiply(polynomial, gram, gram, {.alpha = kC, .accumulate = true});
      ops::multiply(to, wide ? polynomial : x, wide ? x : polynomial, {.alpha = last ? batch.scale : 1.0});
      std::swap(x, y);
    }
  }

  void normalize(const Tensor& x, const Tensor& direction) const {
    if (device().is_cpu()) {
      normalize_cpu(x, direction, partials_);
    } else {
      if constexpr (kCuda) normalize_cuda(x, direction, partials_);
    }
  }
  void begin_polynomial(const Tensor& polynomial, const Tensor& gram) const {
    if (device().is_cpu()) {
      begin_polynomial_cpu(polynomial, gram, kA, kB);
    } else {
      if constexpr (kCuda) begin_polynomial_cuda(polynomial, gram, kA, kB);
    }
  }

  MuonOptions options_;
  DType x_dtype_ = DType::f32;
  Tensor momentum_, direction_;
  std::vector<Batch> batches_;
  Tensor x_, y_, gram_, polynomial_, partials_;  // scratch of the largest batch
};

}  // namespace

void MuonScratch::fit(int64_t count, int64_t rows, int64_t columns, DType compute) {
  count = std::min(count, most_of_batch(rows, columns));
  const int64_t side = std::min(rows, columns), at_once = rows_per_part(columns);
  matrices = std::max(matrices, count * rows * padded(columns, compute));
  squares = std::max(squares, count * side * padded(side, compute));
  parts = std::max(parts, count * ceil_div(rows, at_once));
}

std::shared_ptr<Rule> muon_rule(const MuonOptions& options) {
  check(options.momentum >= 0 && options.momentum < 1, "Muon: momentum = ", options.momentum,
        " must be in [0, 1)");
  check(options.iterations >= 1 && options.iterations <= 20, "Muon: iterations = ", options.iterations,
        " must be from 1 to 20");
  return std::make_shared<MuonRule>(options);
}

Muon::Muon(std::vector<nn::NamedParameter> parameters, const MuonOptions& options)
    : Optimizer("Muon", std::move(parameters), shared_options(options),
                {{.rule = muon_rule(options), .takes = is_hidden_matrix},
                 {.rule = adamw_rule(options.beta1, options.beta2, options.eps),
                  .lr_scale = options.adamw_lr_scale}}) {}

Muon Muon::from(std::vector<nn::NamedParameter> parameters, const BundledOptions& options) {
  MuonOptions own;
  copy_shared_options(own, options);
  own.scale = MuonScale::adamw;
  return Muon(std::move(parameters), own);
}

}  // namespace tessera::optim
