#pragma once

#include "gpu/pack.cuh"
#include "ops/gather/gather_kernels.h"
#include "tensor/elementwise.h"

/// How kernels that move whole rows walk the elements of one.

namespace tessera::ops {

/// How the elements of one row (of y and x) are walked in packs.
struct RowWalk {
  StridedLoop<2> loop;
  int64_t packs_per_run;  // packs of the innermost dimension
  int64_t packs;          // of a whole row
  bool aligned;           // in both, packs are aligned words
  int log_lanes;          // of the lanes of a warp that share a row: as many as it has packs, if not more
};

struct RowPack {
  int64_t y, x;  // offsets of its first element
  int count;     // elements, fewer at the end of a run
};

template <int kPack>
__device__ __forceinline__ RowPack find_pack(const RowWalk& walk, int64_t pack) {
  const int inner = walk.loop.rank - 1;
  int64_t run = inner == 0 ? 0 : pack / walk.packs_per_run;  // a 64-bit division costs more than the move
  const int64_t at = (pack - run * walk.packs_per_run) * kPack, left = walk.loop.sizes[inner] - at;
  RowPack found{at * walk.loop.strides[0][inner], at * walk.loop.strides[1][inner],
                left < kPack ? int(left) : kPack};
  for (int dim = inner - 1; dim >= 0; --dim) {
    const int64_t outer = run / walk.loop.sizes[dim], index = run - outer * walk.loop.sizes[dim];
    run = outer;
    found.y += index * walk.loop.strides[0][dim];
    found.x += index * walk.loop.strides[1][dim];
  }
  return found;
}

template <class T>
RowWalk walk_rows(const Tensor& y, const Tensor& x) {
  constexpr int kPack = gpu::kPackOf<T>;
  RowWalk walk{};
  const Layout to = row_layout(y), from = row_layout(x);
  walk.loop = make_loop<2>(to.shape, {&to, &from});
  const int inner = walk.loop.rank - 1;
  walk.packs_per_run = gpu::ceil_div(walk.loop.sizes[inner], kPack);
  walk.packs = walk.loop.count / walk.loop.sizes[inner] * walk.packs_per_run;
  while (walk.log_lanes < 5 && (1 << walk.log_lanes) < walk.packs) ++walk.log_lanes;
  const auto fits = [&](int n, const Tensor& tensor) {
    bool good = walk.loop.strides[n][inner] == 1 && reinterpret_cast<uintptr_t>(tensor.raw()) % 16 == 0 &&
                (tensor.size(0) <= 1 || tensor.layout().stride(0) % kPack == 0);
    for (int dim = 0; dim < inner; ++dim) good = good && walk.loop.strides[n][dim] % kPack == 0;
    return good;
  };
  walk.aligned = fits(0, y) && fits(1, x);
  return walk;
}

}  // namespace tessera::ops
