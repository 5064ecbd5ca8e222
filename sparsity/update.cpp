#include "sparsity/update.h"

#include <algorithm>
#include <cmath>

#include "ops/gemm/gemm.h"
#include "ops/inverse_factor/inverse_factor.h"
#include "ops/matmul/matmul.h"
#include "ops/obs_columns/obs_columns.h"
#include "ops/pointwise/pointwise.h"
#include "ops/reduce/reduce.h"
#include "runtime/interrupt.h"
#include "sparsity/scores.h"

namespace tessera::sparsity {
namespace {

std::vector<double> diagonal_of(const Tensor& square) {
  const int64_t n = square.size(0);
  Layout diagonal = square.layout();
  diagonal.shape = Shape{n};
  diagonal.strides[0] = square.layout().strides[0] + square.layout().strides[1];
  return Tensor::view_of(square.storage(), diagonal, square.dtype()).to_vector<double>();
}

Tensor on_device_of(const Tensor& like, const std::vector<double>& values) {
  return Tensor::from(values, {int64_t(values.size())}).to(like.dtype()).to(like.device());
}

/// Per row from the smallest to the largest weight, 0 among them (SparseGPT's quantizer).
ops::RoundingGrid grid_of(const Tensor& weight, int bits) {
  if (bits == 0) return {};
  const std::vector<float> largest = ops::max(weight, 1).to_vector<float>(),
                           smallest = ops::max(ops::scale(weight, -1), 1).to_vector<float>();
  const int64_t levels = int64_t{1} << bits;
  std::vector<float> scale(largest.size()), zero(largest.size());
  for (size_t i = 0; i < largest.size(); ++i) {
    float low = std::min(-smallest[i], 0.0f), high = std::max(largest[i], 0.0f);
    if (low == 0 && high == 0) low = -1, high = 1;
    scale[i] = (high - low) / float(levels - 1);
    zero[i] = std::nearbyint(-low / scale[i]);
  }
  const Shape shape{int64_t(scale.size())};
  return {Tensor::from(scale, shape, weight.device()), Tensor::from(zero, shape, weight.device()), levels};
}

/// The mask of a block of columns by (w / U_jj)^2, in the order of |w| / U_jj.
Tensor keep_block(const Tensor& weight, const Tensor& u_block, double sparsity, const PruneOptions& options) {
  std::vector<double> inverse = diagonal_of(u_block);
  for (double& value : inverse) value = 1 / value;
  const Tensor scores = ops::mul(magnitude(weight), on_device_of(weight, inverse));
  if (options.pattern.structured())
    return ops::keep_largest(
        scores,
        {.within = ops::KeepWithin::group, .zeros = options.pattern.zeros, .group = options.pattern.group});
  const ops::KeepWithin within = options.keep_within();
  const int64_t among = within == ops::KeepWithin::row ? scores.size(1) : scores.count();
  return ops::keep_largest(scores,
                           {.within = within, .zeros = int64_t(double(among) * sparsity), .group = 0});
}

}  // namespace

Tensor keep_elements(const Tensor& x, const Tensor& keep) {
  // Adding +0 turns the -0 of a dropped negative weight into +0.
  return ops::add(ops::mul(x, keep.to(x.dtype())), Tensor::zeros({1}, x.dtype(), x.device()));
}

HessianFactor factor_hessian(const InputStatistics& inputs, int64_t samples, double damping,
                             const std::string& layer) {
  const Tensor& products = inputs.products();
  std::vector<double> diagonal = diagonal_of(products);
  const double one = double(samples) / 2;  // SparseGPT's Hessian is 2 X^T X / samples
  double mean = 0;
  for (const double value : diagonal) mean += value == 0 ? one : value;
  mean /= double(diagonal.size());
  constexpr double kMost = 1, kSteps = 10;
  HessianFactor result{.u = {}, .damping = damping};
  while (true) {
    std::vector<double> shift(diagonal.size());
    for (size_t i = 0; i < shift.size(); ++i) shift[i] = (diagonal[i] == 0 ? one : 0) + result.damping * mean;
    if (const auto u = ops::inverse_factor(products, on_device_of(products, shift))) {
      result.u = u->to(DType::f32), result.wide = *u;
      return result;
    }
    check(result.damping < kMost, "prune: X^T X of ", layer,
          " is not positive definite, even with a damping of ", result.damping,
          " times its diagonal's mean; give more samples (--samples), or look for inputs that overflow");
    result.damping = std::min(kMost, result.damping * kSteps);
    ++result.raised;
  }
}

Tensor without_dead_inputs(const Tensor& weight, const InputStatistics& inputs) {
  if (inputs.dead() == 0) return weight;
  std::vector<double> alive = inputs.squares().to_vector<double>();
  for (double& one : alive) one = one != 0;
  return keep_elements(weight, on_device_of(weight, alive));
}

Tensor update_obs(const Tensor& weight, const Tensor& keep, const Tensor& u, double sparsity,
                  const PruneOptions& options) {
  const Tensor result = weight.clone();
  const ops::RoundingGrid grid = grid_of(weight, options.bits);
  const int64_t columns = weight.size(1);
  for (int64_t begin = 0; begin < columns; begin += options.block_size) {
    check_interrupt();
    const int64_t end = std::min(begin + options.block_size, columns);
    const Tensor block = result.slice(1, begin, end), rows_of_u = u.slice(0, begin, end),
                 factor = rows_of_u.slice(1, begin, end);
    ops::ObsColumns how{.grid = grid};
    if (keep.defined()) {
      how.keep = keep.slice(1, begin, end);
    } else if (options.pattern.structured()) {
      how.zeros = options.pattern.zeros, how.group = options.pattern.group;
    } else {
      how.keep = keep_block(block, factor, sparsity, options);
    }
    const ops::ObsBlock done = ops::obs_columns(block, factor, how);
    block.copy_from(done.weight);
    if (end < columns)
      ops::multiply(result.slice(1, end, columns), done.error, rows_of_u.slice(1, end, columns),
                    {.alpha = -1, .accumulate = true});
  }
  return result;
}

Tensor keep_by_hessian(const Tensor& weight, const Tensor& u, double sparsity, const PruneOptions& options) {
  const int64_t columns = weight.size(1);
  const Tensor keep = Tensor::empty(weight.shape(), DType::u8, weight.device());
  for (int64_t begin = 0; begin < columns; begin += options.block_size) {
    const int64_t end = std::min(begin + options.block_size, columns);
    keep.slice(1, begin, end)
        .copy_from(keep_block(weight.slice(1, begin, end), u.slice(0, begin, end).slice(1, begin, end),
                              sparsity, options));
  }
  return keep;
}

Tensor update_admm(const Tensor& weight, const Tensor& keep, const InputStatistics& inputs,
                   const PruneOptions& options, const std::string& layer) {
  // Inputs scaled to norm 1, so that one penalty fits all of them (section 3.2 of the paper).
  std::vector<double> norms = diagonal_of(inputs.products()), inverse(norms.size());
  for (size_t i = 0; i < norms.size(); ++i) {
    norms[i] = norms[i] > 0 ? std::sqrt(norms[i]) : 1;
    inverse[i] = 1 / norms[i];
  }
  const Tensor products = inputs.products().to(DType::f32), by = on_device_of(weight, inverse);
  const int64_t n = weight.size(1);
  const Tensor hessian = ops::mul(ops::mul(products, by), by.reshape({n, 1}));
  const Tensor shift = Tensor::full({n}, options.damping + options.rho, DType::f32, weight.device());
  const auto u = ops::inverse_factor(hessian, shift);
  check(u.has_value(), "prune: X^T X of ", layer, " is not positive definite with a damping of ",
        options.damping, "; give more samples (--samples) or a larger --damping");
  const Tensor inverse_hessian = ops::matmul(*u, *u, true);
  const Tensor dense = ops::mul(weight, on_device_of(weight, norms)), kept = keep.to(DType::f32);
  const Tensor target = ops::add(ops::matmul(dense, hessian), ops::scale(dense, options.damping));
  Tensor w = dense, dual = Tensor::zeros(dense.shape(), DType::f32, dense.device()), z;
  for (int64_t step = 0; step < options.iterations; ++step) {
    check_interrupt();
    z = ops::mul(ops::add(w, dual), kept);
    dual = ops::add(dual, ops::sub(w, z));
    w = ops::matmul(ops::add(target, ops::scale(ops::sub(z, dual), options.rho)), inverse_hessian);
  }
  return keep_elements(ops::mul(ops::add(w, dual), by), keep);
}

double relative_output_error(const Tensor& weight, const Tensor& pruned, const InputStatistics& inputs) {
  const Tensor products = inputs.products().to(DType::f32);
  const auto energy = [&](const Tensor& w) { return ops::sum(ops::mul(ops::matmul(w, products), w)).item(); };
  const double whole = energy(weight);
  return whole > 0 ? energy(ops::sub(weight, pruned)) / whole : 0;
}

}  // namespace tessera::sparsity
