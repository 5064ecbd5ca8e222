#include "tensor/elementwise.h"
#include "tensor/kernels.h"

namespace tessera {

void fill_cpu(const Tensor& y, double value) {
  dispatch_any(y.dtype(), [&]<class T>() {
    T* const out = y.data<T>();
    const T filler = convert<T>(value);
    for_each_run<1>(make_loop(y.shape(), y), [&](const auto& offsets, const auto& strides, int64_t n) {
      for (int64_t i = 0; i < n; ++i) out[offsets[0] + i * strides[0]] = filler;
    });
  });
}

void copy_cpu(const Tensor& y, const Tensor& x) {
  dispatch_any(y.dtype(), [&]<class To>() {
    dispatch_any(x.dtype(), [&]<class From>() {
      To* const out = y.data<To>();
      const From* const in = x.data<From>();
      for_each_run<2>(make_loop(y.shape(), y, x), [&](const auto& offsets, const auto& strides, int64_t n) {
        To* const to = out + offsets[0];
        const From* const from = in + offsets[1];
        if (strides[0] == 1 && strides[1] == 1) {
          if constexpr (std::is_same_v<From, f16> && std::is_same_v<To, float>)
            widen(to, from, n);
          else if constexpr (std::is_same_v<From, float> && std::is_same_v<To, f16>)
            narrow(to, from, n);
          else
            for (int64_t i = 0; i < n; ++i) to[i] = convert<To>(from[i]);
        } else {
          for (int64_t i = 0; i < n; ++i) to[i * strides[0]] = convert<To>(from[i * strides[1]]);
        }
      });
    });
  });
}

void accumulate_cpu(const Tensor& y, const Tensor& x) {
  dispatch_floating(y.dtype(), "accumulate", [&]<class To>() {
    dispatch_floating(x.dtype(), "accumulate", [&]<class From>() {
      To* const out = y.data<To>();
      const From* const in = x.data<From>();
      for_each_run<2>(make_loop(y.shape(), y, x), [&](const auto& offsets, const auto& strides, int64_t n) {
        To* const to = out + offsets[0];
        const From* const from = in + offsets[1];
        using C = std::conditional_t<std::is_same_v<From, double>, double, Compute<To>>;
        // The compiler vectorises the conversions of bf16 among the additions.
        constexpr bool has_f16 = std::is_same_v<To, f16> || std::is_same_v<From, f16>;
        if constexpr (std::is_same_v<C, float> && has_f16) {
          constexpr int64_t kAtOnce = 512;
          float sums[kAtOnce], terms[kAtOnce];
          for (int64_t i = 0; i < n; i += kAtOnce) {
            const int64_t length = std::min(kAtOnce, n - i);
            widen(sums, to + i * strides[0], length, strides[0]);
            widen(terms, from + i * strides[1], length, strides[1]);
            for (int64_t j = 0; j < length; ++j) sums[j] += terms[j];
            narrow(to + i * strides[0], sums, length, strides[0]);
          }
        } else {
          for (int64_t i = 0; i < n; ++i)
            to[i * strides[0]] =
                convert<To>(C(Compute<To>(to[i * strides[0]])) + C(Compute<From>(from[i * strides[1]])));
        }
      });
    });
  });
}

}  // namespace tessera
