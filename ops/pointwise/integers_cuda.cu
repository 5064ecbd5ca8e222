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

}  // namespace

void integer_binary_cuda(const Tensor& y, const Tensor& a, const Tensor& b, Binary kind) {
  dispatch_integers(a.dtype(), [&]<class T>() {
    dispatch_binary(kind, [&]<Binary kKind>() {
      if constexpr (kOfIntegers<kKind, T>) gpu::elementwise<T, T, T>(y, Apply<kKind, T>{}, a, b);
    });
  });
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
