#include "gpu/elementwise.cuh"
#include "ops/pointwise/integers_math.h"
#include "ops/pointwise/pointwise_math.h"

/// As pointwise_cuda.cu: the one elementwise kernel does all of it.

namespace tessera::ops {
namespace {

template <Binary kKind, class T>
struct Apply {
  __device__ T operator()(T a, T b) const { return apply_to_integers<kKind>(a, b); }
};
template <Unary kKind, class T>
struct ApplyOne {
  Numbers<T> numbers;
  __device__ T operator()(T x) const { return apply_to_integer<kKind>(x, numbers); }
};
template <class T>
struct Choose {
  __device__ T operator()(bool mask, T a, T b) const { return mask ? a : b; }
};

}  // namespace

void integer_binary_cuda(const Tensor& y, const Tensor& a, const Tensor& b, Binary kind) {
  dispatch_integers(a.dtype(), [&]<class T>() {
    dispatch_integer_binary(kind, [&]<Binary kKind>() {
      if constexpr (kOfIntegers<kKind, T>) gpu::elementwise<T, T, T>(y, Apply<kKind, T>{}, a, b);
    });
  });
}

void integer_where_cuda(const Tensor& y, const Tensor& mask, const Tensor& a, const Tensor& b) {
  dispatch_among<int64_t, int32_t, uint8_t, bool>(
      y.dtype(), [&]<class T>() { gpu::elementwise<T, bool, T, T>(y, Choose<T>{}, mask, a, b); }, [] {});
}

void integer_unary_cuda(const Tensor& y, const Tensor& x, Unary kind, Numbers<int64_t> numbers) {
  dispatch_index(x.dtype(), name_of(kind), [&]<class T>() {
    dispatch_unary(kind, [&]<Unary kKind>() {
      if constexpr (kOfInteger<kKind>)
        gpu::elementwise<T, T>(y, ApplyOne<kKind, T>{{T(numbers.a), T(numbers.b)}}, x);
    });
  });
}

}  // namespace tessera::ops
