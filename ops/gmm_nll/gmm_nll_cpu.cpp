#include <algorithm>
#include <vector>

#include "ops/gmm_nll/gmm_nll_kernels.h"
#include "ops/gmm_nll/gmm_nll_math.h"
#include "runtime/integers.h"
#include "runtime/parallel.h"

namespace tessera::ops {
namespace {

constexpr int64_t kChunk = 1024;  // elements whose losses are added to one partial sum

/// y, or its gradient, in the parameters' dtype T or in f32.
template <class T>
struct Targets {
  explicit Targets(const Tensor& y)
      : own(y.defined() && y.dtype() == dtype_of<T> ? y.data<T>() : nullptr),
        single(y.defined() && !own ? y.data<float>() : nullptr) {}
  Compute<T> operator[](int64_t i) const { return own ? Compute<T>(own[i]) : Compute<T>(single[i]); }
  void set(int64_t i, Compute<T> value) const {
    if (own) own[i] = T(value);
    if (single) single[i] = float(value);
  }

  T* own;
  float* single;
};

}  // namespace

void gmm_nll_forward_cpu(const Tensor& loss, const Tensor& params, const Tensor& y, Reduction reduction) {
  dispatch_floating(params.dtype(), "gmm_nll", [&]<class T>() {
    using C = Compute<T>;
    const int64_t count = y.count(), components = params.size(-2);
    const T* const theta = params.data<T>();
    const Targets<T> target(y);
    C* const to = loss.data<C>();
    const bool each = reduction == Reduction::none;
    const int64_t pieces = ceil_div(count, kChunk);
    std::vector<double> sums(size_t(pieces), 0.0);  // of fixed pieces: the same for any number of threads
    parallel_for(pieces, 4, [&](int64_t begin, int64_t end) {
      for (int64_t piece = begin; piece < end; ++piece)
        for (int64_t t = piece * kChunk; t < std::min(count, (piece + 1) * kChunk); ++t) {
          const C value = mix<C>(theta + 3 * components * t, components, target[t]).loss();
          sums[size_t(piece)] += double(value);
          if (each) to[t] = value;
        }
    });
    if (each) return;
    double total = 0;
    for (const double sum : sums) total += sum;
    *to = C(reduction == Reduction::mean ? total / double(count) : total);
  });
}

void gmm_nll_backward_cpu(const Tensor& dparams, const Tensor& dy, const Tensor& dloss, const Tensor& params,
                          const Tensor& y, Reduction reduction) {
  dispatch_floating(params.dtype(), "gmm_nll", [&]<class T>() {
    using C = Compute<T>;
    const int64_t count = y.count(), components = params.size(-2);
    const T* const theta = params.data<T>();
    const Targets<T> target(y);
    T* const dtheta = dparams.defined() ? dparams.data<T>() : nullptr;
    const Targets<T> dtarget(dy);
    const C* const grads = dloss.data<C>();
    const C share = reduction == Reduction::mean ? C(1) / C(count) : C(1);
    parallel_for(count, 4 * kChunk, [&](int64_t begin, int64_t end) {
      std::vector<T> unwanted(size_t(3 * components));
      for (int64_t t = begin; t < end; ++t) {
        const C g = reduction == Reduction::none ? grads[t] : *grads * share;
        const C slope = mix_backward<C>(dtheta ? dtheta + 3 * components * t : unwanted.data(),
                                        theta + 3 * components * t, components, target[t], g);
        dtarget.set(t, slope);
      }
    });
  });
}

}  // namespace tessera::ops
