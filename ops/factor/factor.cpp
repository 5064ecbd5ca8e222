#include "ops/factor/factor.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "autograd/tape.h"
#include "ops/factor/factor_kernels.h"
#include "ops/gemm/gemm.h"
#include "ops/random/random.h"
#include "runtime/has_cuda.h"

namespace tessera::ops {
namespace {

void check_matrix(const char* op, const Tensor& a) {
  check(a.defined(), op, ": a is undefined");
  check(a.rank() == 2 && a.size(0) >= 1 && a.size(1) >= 1, op, ": a is ", describe(a),
        "; expected a matrix with at least one row and one column");
  check(a.dtype() == DType::f32 || (a.dtype() == DType::f64 && a.device().is_cpu()), op, ": a is ",
        describe(a), "; expected f32, or f64 on the CPU");
}

void check_outcome(const char* op, const Tensor& a, int info) {
  check(info != -1, op, ": an element of a, ", describe(a), ", is not finite");
  check(info == 0, op, ": the factorisation of a, ", describe(a), ", did not converge (LAPACK's info is ",
        info, "); its elements may be too large");
}

void check_rank(const char* op, const Tensor& a, int64_t rank) {
  const int64_t most = std::min(a.size(0), a.size(1));
  check(rank >= 1 && rank <= most, op, ": the rank is ", rank, "; expected 1 to ", most, " for ",
        describe(a));
}

Tensor empty_like(const Tensor& a, const Shape& shape) {
  return Tensor::empty_packed(shape, a.dtype(), a.device());
}

/// 1 for each column of u whose element of the largest magnitude is positive (or 0), else -1: f32 or f64 [k],
/// on the CPU.
template <class T>
std::vector<T> signs_of(const Tensor& u) {
  const std::vector<T> values = u.to(Device::cpu()).packed().to_vector<T>();
  const int64_t rows = u.size(0), columns = u.size(1);
  std::vector<T> signs(static_cast<size_t>(columns)), most(static_cast<size_t>(columns), T(-1));
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) {
      const T value = values[size_t(i * columns + j)];
      if (std::abs(value) <= most[size_t(j)]) continue;
      most[size_t(j)] = std::abs(value);
      signs[size_t(j)] = value < 0 ? T(-1) : T(1);
    }
  return signs;
}

template <class T>
std::vector<T> diagonal_signs(const Tensor& r) {
  const int64_t k = r.size(0), n = r.size(1);
  const std::vector<T> values = r.to(Device::cpu()).packed().to_vector<T>();
  std::vector<T> signs(static_cast<size_t>(k));
  for (int64_t i = 0; i < k; ++i) signs[size_t(i)] = std::signbit(values[size_t(i * n + i)]) ? T(-1) : T(1);
  return signs;
}

/// Multiplies the columns of `columns` and the rows of `rows` by the signs. In place, packed, on any device:
/// by a round trip over the host, which waits for these results anyway.
template <class T>
void apply_signs(const std::vector<T>& signs, const Tensor& columns, const Tensor& rows) {
  const int64_t k = int64_t(signs.size());
  if (std::all_of(signs.begin(), signs.end(), [](T sign) { return sign > 0; })) return;
  const auto flip = [&](const Tensor& matrix, bool by_row) {
    std::vector<T> values = matrix.to(Device::cpu()).packed().to_vector<T>();
    const int64_t width = matrix.size(1);
    for (int64_t i = 0; i < int64_t(values.size()); ++i)
      values[size_t(i)] *= signs[size_t(by_row ? i / width : i % k)];
    matrix.copy_from(Tensor::from(values, matrix.shape(), matrix.device()));
  };
  flip(columns, false);
  flip(rows, true);
}

template <class F>
void with_type(const Tensor& a, F&& f) {
  a.dtype() == DType::f64 ? f.template operator()<double>() : f.template operator()<float>();
}

Tensor product(const Tensor& a, const Tensor& b) {
  const Tensor c = empty_like(a, {a.size(0), b.size(1)});
  multiply(c, a, b);
  return c;
}

}  // namespace

QrFactors qr(const Tensor& given, Site site) {
  const CallScope call(site);
  check_matrix("qr", given);
  const Tensor a = given.detach().packed();
  const int64_t k = std::min(a.size(0), a.size(1));
  QrFactors made{empty_like(a, {a.size(0), k}), empty_like(a, {k, a.size(1)})};
  int info = 0;
  if (a.device().is_cpu()) {
    info = qr_cpu(made.q, made.r, a);
  } else {
    if constexpr (kCuda) info = qr_cuda(made.q, made.r, a);
  }
  check_outcome("qr", a, info);
  with_type(a, [&]<class T>() { apply_signs(diagonal_signs<T>(made.r), made.q, made.r); });
  return made;
}

SvdFactors svd(const Tensor& given, Site site) {
  const CallScope call(site);
  check_matrix("svd", given);
  const Tensor a = given.detach().packed();
  const int64_t k = std::min(a.size(0), a.size(1));
  SvdFactors made{empty_like(a, {a.size(0), k}), empty_like(a, {k}), empty_like(a, {k, a.size(1)})};
  int info = 0;
  if (a.device().is_cpu()) {
    info = svd_cpu(made.u, made.s, made.vt, a);
  } else {
    if constexpr (kCuda) info = svd_cuda(made.u, made.s, made.vt, a);
  }
  check_outcome("svd", a, info);
  with_type(a, [&]<class T>() { apply_signs(signs_of<T>(made.u), made.u, made.vt); });
  return made;
}

Tensor range_finder(const Tensor& given, int64_t rank, const Rng& rng, const SketchOptions& options,
                    Site site) {
  const CallScope call(site);
  check_matrix("range_finder", given);
  check_rank("range_finder", given, rank);
  check(options.oversample >= 0 && options.iterations >= 0, "range_finder: oversample is ",
        options.oversample, " and iterations ", options.iterations, "; they must not be negative");
  const NoTape no_tape;
  const Tensor a = given.detach();
  const int64_t columns = std::min(rank + options.oversample, std::min(a.size(0), a.size(1)));
  const Tensor w = empty_like(a, {a.size(1), columns});
  fill_uniform(w, -1, 1, rng);
  Tensor q = qr(product(a, w)).q;
  for (int i = 0; i < options.iterations; ++i) q = qr(product(a, qr(product(a.transpose(0, 1), q)).q)).q;
  return q;
}

namespace {

SvdFactors leading(const SvdFactors& all, int64_t rank) {
  return {all.u.slice(1, 0, rank).clone(), all.s.slice(0, 0, rank).clone(), all.vt.slice(0, 0, rank).clone()};
}

}  // namespace

SvdFactors truncated_svd(const Tensor& a, int64_t rank, Site site) {
  const CallScope call(site);
  check_matrix("truncated_svd", a);
  check_rank("truncated_svd", a, rank);
  return leading(svd(a), rank);
}

SvdFactors truncated_svd(const Tensor& given, int64_t rank, const Rng& rng, const SketchOptions& options,
                         Site site) {
  const CallScope call(site);
  check_matrix("truncated_svd", given);
  const NoTape no_tape;
  const Tensor a = given.detach(), q = range_finder(a, rank, rng, options);
  SvdFactors inner = svd(product(q.transpose(0, 1), a));
  SvdFactors made{product(q, inner.u), inner.s, inner.vt};
  with_type(a, [&]<class T>() { apply_signs(signs_of<T>(made.u), made.u, made.vt); });
  return leading(made, rank);
}

}  // namespace tessera::ops
