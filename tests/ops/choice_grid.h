#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "ops/gemm/gemm.h"
#include "tensor/tensor.h"

/// The problems of tests/ops/choices_test.cpp: a wide grid for each operator that has several kernels. What
/// is chosen for them, per GPU and kind of problem, was recorded in tests/ops/choices.tsv.

namespace tessera::ops::choice_grid {

/// How often each variant was chosen, and a digest of all choices with their details (tiles, splits) in
/// order.
class Tally {
 public:
  void add(const std::string& variant, std::initializer_list<int64_t> details = {}) {
    ++counts_[variant];
    for (const char c : variant) mix(uint64_t(c));
    for (const int64_t detail : details) mix(uint64_t(detail));
  }
  std::string text() const {
    std::ostringstream out;
    for (const auto& [variant, count] : counts_) out << variant << " " << count << ", ";
    out << "digest " << std::hex << digest_;
    return out.str();
  }

 private:
  void mix(uint64_t value) {  // FNV-1a over 64-bit words
    digest_ = (digest_ ^ value) * 0x100000001B3u;
    digest_ ^= digest_ >> 29;
  }
  std::map<std::string, int> counts_;
  uint64_t digest_ = 0xCBF29CE484222325u;
};

/// Lines of the table by name.
using Table = std::map<std::string, Tally>;

struct GpuCase {
  const char* name;
  int major, minor, multiprocessors;
};
inline constexpr GpuCase kGpus[] = {{"NVIDIA H200", 9, 0, 132},
                                    {"NVIDIA H100 80GB HBM3", 9, 0, 132},
                                    {"NVIDIA H100 PCIe", 9, 0, 114},
                                    {"NVIDIA A100-SXM4-80GB", 8, 0, 108}};

/// Calls body(kind, gemm) for a grid of GEMMs. No pointer is read.
template <class Body>
void for_each_gemm(Body&& body) {
  struct Types {
    const char* name;
    DType in, out;
  };
  constexpr Types kTypes[] = {{"bf16", DType::bf16, DType::bf16},
                              {"bf16 to f32", DType::bf16, DType::f32},
                              {"f16", DType::f16, DType::f16},
                              {"f32", DType::f32, DType::f32}};
  constexpr int64_t kSides[] = {1, 2, 3, 8, 16, 41, 64, 65, 257, 512, 1365, 4096, 36096};
  constexpr int64_t kDepths[] = {1, 16, 17, 32, 64, 200, 1365, 4096, 17920};
  const auto pointer = [](uintptr_t base, int style, size_t size) {
    return reinterpret_cast<char*>(base * 0x10000000 + (style == 2 ? size : style == 1 ? 64 : 0));
  };
  for (const Types& types : kTypes)
    for (const int flags : {0, 1, 2, 3})
      for (const int style : {0, 1, 2}) {  // rows on lines of 128 bytes; on 16 bytes; dense, one element off
        std::ostringstream kind;
        kind << types.name << (flags & 1 ? " t" : " n") << (flags & 2 ? "t " : "n ")
             << (style == 0   ? "lines"
                 : style == 1 ? "packs"
                              : "odd");
        uint64_t number = uint64_t(flags) * 7 + uint64_t(style);
        for (const int64_t m : kSides)
          for (const int64_t n : kSides)
            for (const int64_t k : kDepths) {
              number = number * 6364136223846793005u + 1442695040888963407u;
              const auto draw = [&](int shift, uint64_t of) { return (number >> shift) % of; };
              const auto ld = [&](int64_t width, DType dtype) {
                return style == 0   ? (width + 63) / 64 * 64
                       : style == 1 ? (width + 15) / 16 * 16 + (width > 100 ? 16 : 0)
                                    : width + int64_t(size_of(dtype) == 4);
              };
              Gemm g{.m = m, .n = n, .k = k, .in = types.in, .out = types.out};
              g.transpose_a = flags & 1, g.transpose_b = flags & 2;
              g.a = pointer(1, style, size_of(g.in)), g.b = pointer(2, style, size_of(g.in));
              g.d = pointer(3, draw(33, 4) ? style : 2, size_of(g.out));
              g.lda = ld(g.transpose_a ? m : k, g.in), g.ldb = ld(g.transpose_b ? k : n, g.in);
              g.ldd = ld(n, g.out);
              if (draw(35, 3) == 0) g.beta = 1;
              if (g.beta == 0 && draw(37, 3) == 0) g.bias = pointer(4, 0, 2);
              if (g.beta == 1 && draw(39, 3) == 0) g.c = pointer(5, style, size_of(g.out));
              g.owns_d_padding = draw(41, 2) != 0;
              if (draw(43, 5) == 0) {
                g.batch = 1 + int64_t(draw(45, 12));
                g.stride_a = draw(49, 3) == 0 ? 0 : g.lda * (g.transpose_a ? k : m);
                g.stride_b = g.ldb * (g.transpose_b ? n : k), g.stride_d = g.ldd * m;
              }
              if (draw(53, 8) == 0 && g.in != DType::f32) g.copied = double(m * k) * 2;
              g.rounds_in_place = draw(55, 3) == 0 && g.in != DType::f32 && g.copied == 0;
              body(kind.str(), g);
            }
      }
}

/// A tensor of that layout on a device, in memory that is never touched.
inline Tensor untouched(Device device, const Shape& shape, const std::vector<int64_t>& strides, DType dtype,
                        int64_t offset = 0) {
  Layout layout = Layout::packed(shape);
  layout.offset = offset;
  for (size_t dim = 0; dim < strides.size(); ++dim) layout.strides[dim] = strides[dim];
  int64_t end = offset + 1;
  for (int dim = 0; dim < shape.rank(); ++dim)
    end += std::max<int64_t>(0, shape[dim] - 1) * layout.strides[size_t(dim)];
  static std::map<std::string, std::shared_ptr<Storage>> kept;
  auto& storage = kept[device.name()];
  const size_t bytes = size_t(end) * size_of(dtype);
  if (!storage || storage->bytes < bytes)
    storage = std::make_shared<Storage>(device, Device::cpu().allocator(), std::max<size_t>(bytes, 1 << 28));
  return Tensor::view_of(storage, layout, dtype);
}

/// A matrix with rows on lines, on 16 bytes, or anywhere.
inline Tensor matrix(Device device, int64_t rows, int64_t columns, DType dtype, int style) {
  const int64_t ld = style == 0   ? (columns + 63) / 64 * 64
                     : style == 1 ? (columns + 15) / 16 * 16 + 16
                                  : columns + 1;
  return untouched(device, {rows, columns}, {ld, 1}, dtype, style == 2 ? 1 : 0);
}

/// body(kind, x, weight) for linear and linear_swiglu: x [T, in], weight [out, in].
template <class Body>
void for_each_linear(Device device, Body&& body) {
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32})
    for (const int style : {0, 1, 2})
      for (const int64_t tokens : {0, 1, 2, 5, 8, 9, 16, 17, 32, 33, 64, 65, 200})
        for (const int64_t in : {0, 8, 64, 1000, 1365, 2056, 4096})
          for (const int64_t out : {0, 2, 16, 130, 2752, 8192, 22016})
            body(std::string(name_of(dtype)) + " " + std::to_string(style),
                 matrix(device, tokens, in, dtype, style), matrix(device, out, in, dtype, style));
}

/// body(kind, x [rows, groups, columns]) for column sums.
template <class Body>
void for_each_sum(Device device, Body&& body) {
  for (const DType dtype : {DType::bf16, DType::f32})
    for (const int64_t rows : {0, 1, 7, 64, 1000, 4096, 36096})
      for (const int64_t groups : {1, 3, 16})
        for (const int64_t columns : {1, 3, 64, 512, 1365})
          body(std::string(name_of(dtype)), untouched(device, {rows, groups, columns}, {}, dtype));
}

struct AttentionCase {
  Tensor q, k;
  bool causal, dropout;
  int64_t sequences;  // 0: not packed
};
/// body(kind, case): q [B, Lq, H, D], k [B, Lk, Hk, D].
template <class Body>
void for_each_attention(Device device, Body&& body) {
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32})
    for (const bool dropout : {false, true})
      for (const int64_t sequences : {0, 1, 2, 3, 7, 64, 511, 512, 600})
        for (const int64_t dim : {32, 64, 128})
          for (const int64_t queries : {1, 4, 5, 15, 16, 17, 32, 48, 49, 64, 65, 100, 130, 500, 2000})
            for (const int64_t keys : {1, 16, 40, 64, 65, 128, 300, 3000})
              for (const int64_t group : {1, 2, 8})
                for (const int64_t batch : {1, 12}) {
                  if (sequences > 0 && batch > 1) continue;
                  const int64_t heads = 8, key_heads = heads / group;
                  std::ostringstream kind;
                  kind << name_of(dtype) << (dropout ? " dropout" : "") << (sequences ? " packed" : "");
                  // Now and then with a stride that a tensor map cannot have.
                  const bool still = (queries * 7 + keys) % 11 == 0 && batch > 1;
                  const std::vector<int64_t> strides =
                      still ? std::vector<int64_t>{0, heads * dim, dim, 1} : std::vector<int64_t>{};
                  body(kind.str(),
                       AttentionCase{untouched(device, {batch, queries, heads, dim}, strides, dtype),
                                     untouched(device, {batch, keys, key_heads, dim}, {}, dtype),
                                     keys % 3 == 0, dropout, sequences});
                }
}

/// body(kind, q [B, n, H, D], dim) for decode_attention.
template <class Body>
void for_each_decode(Device device, Body&& body) {
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32})
    for (const int64_t dim : {8, 64, 120, 128, 136, 256})
      body(std::string(name_of(dtype)), untouched(device, {2, 1, 4, dim}, {}, dtype), dim);
}

/// body(kind, x [rows, D], up [K, F, D], down [K, E, F]) for grouped_mlp.
template <class Body>
void for_each_grouped(Device device, Body&& body) {
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32})
    for (const int64_t offset : {0, 1})
      for (const int64_t rows : {0, 1, 500})
        for (const int64_t in : {8, 20, 512, 520})
          for (const int64_t wide : {7, 8, 165, 1365})
            for (const int64_t out : {1, 3, 4})
              for (const int64_t groups : {1, 10}) {
                const auto pitched = [&](int64_t a, int64_t b, int64_t c) {
                  const int64_t ld = (c + 7) / 8 * 8;
                  return untouched(device, {a, b, c}, {b * ld, ld, 1}, dtype, offset);
                };
                body(std::string(name_of(dtype)), pitched(1, rows, in).select(0, 0),
                     pitched(groups, wide, in), pitched(groups, out, wide));
              }
}

/// body(kind, x [N, d], weight [V, d], has_bias, smoothing) for linear_cross_entropy.
template <class Body>
void for_each_head(Device device, Body&& body) {
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32})
    for (const int style : {0, 1, 2})
      for (const int64_t tokens : {0, 1, 300})
        for (const int64_t width : {4, 8, 36, 768})
          for (const int64_t classes : {7, 8, 5003})
            for (const bool bias : {false, true})
              for (const double smoothing : {0.0, 0.1})
                body(std::string(name_of(dtype)), matrix(device, tokens, width, dtype, style),
                     matrix(device, classes, width, dtype, style), bias, smoothing);
}

/// body(kind, a [T, F], h or undefined, x [T, D], up [F, D], activation) for the first GEMM of an MLP.
template <class Body>
void for_each_mlp(Device device, Body&& body) {
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32})
    for (const int style : {0, 1, 2})
      for (const int64_t tokens : {0, 1, 300})
        for (const int64_t in : {1, 8, 20, 512, 8192})
          for (const int64_t wide : {1, 8, 165, 1365})
            for (const bool keeps : {false, true})
              for (const bool none : {false, true})
                body(std::string(name_of(dtype)), matrix(device, tokens, wide, dtype, style),
                     keeps ? matrix(device, tokens, wide, dtype, 1) : Tensor(),
                     matrix(device, tokens, in, dtype, style), matrix(device, wide, in, dtype, style), none);
}

/// body(kind, count, rows) for the gradient of an embedding's table.
template <class Body>
void for_each_embedding(Body&& body) {
  for (const int64_t count : {0, 1, 31, 255, 256, 257, 768, 2000, 8191, 8192, 8193, 65536, 1000000})
    for (const int64_t rows : {1, 100, 30000, 50257, 1 << 20, 1 << 26}) body(std::string("all"), count, rows);
}

/// An operand of a product for cuBLASLt: [rows, columns] or its transposed, in rows with padding of their
/// own.
inline Tensor pitched_operand(Device device, int64_t rows, int64_t columns, bool transposed, DType dtype,
                              int style, bool scratch) {
  const int64_t r = transposed ? columns : rows, c = transposed ? rows : columns;
  const int64_t pitch = style == 2 ? c : row_pitch(c, dtype), size = int64_t(size_of(dtype));
  auto storage = std::make_shared<Storage>(device, Device::cpu().allocator(), size_t((r * pitch + 8) * size));
  if (style == 0) storage->row_bytes = c * size, storage->pitch_bytes = pitch * size;
  storage->is_scratch = scratch;
  Layout layout = Layout::packed({r, c});
  layout.strides[0] = pitch, layout.strides[1] = 1;
  const Tensor x = Tensor::view_of(storage, layout, dtype);
  return transposed ? x.transpose(0, 1) : x;
}

/// body(kind, d, a, b, accumulate, bias) for products of cuBLASLt, with extents rounded up or not.
template <class Body>
void for_each_padded(Device device, Body&& body) {
  for (const DType dtype : {DType::bf16, DType::f32})
    for (const int flags : {0, 1, 2, 3})
      for (const int style : {0, 1, 2})
        for (const int64_t m : {1, 8, 300, 1001})
          for (const int64_t n : {2, 3, 64, 171, 1365})
            for (const int64_t k : {2, 8, 33, 512, 1365}) {
              const bool ta = flags & 1, tb = flags & 2, scratch = (m + n + k) % 3 == 0;
              const int other = int((m + n) % 3);
              body(std::string(name_of(dtype)), pitched_operand(device, m, n, false, dtype, other, false),
                   pitched_operand(device, m, k, ta, dtype, style, scratch),
                   pitched_operand(device, k, n, tb, dtype, style, scratch), (m + k) % 2 == 1,
                   (m + k) % 4 == 0 ? untouched(device, {n}, {}, dtype) : Tensor());
            }
}

/// body(kind, d, a, b, accumulate) for f32 products in TF32.
template <class Body>
void for_each_tf32(Device device, Body&& body) {
  for (const int flags : {0, 1, 2})
    for (const int64_t m : {8, 768, 1368, 2304, 3072, 4096})
      for (const int64_t n : {8, 512, 768, 1368, 3072})
        for (const int64_t k : {64, 512, 3072, 8192, 16384, 36096}) {
          if (m * k > (1 << 27) || n * k > (1 << 27)) continue;
          const bool ta = flags & 1, tb = flags & 2;
          const auto operand = [&](int64_t rows, int64_t columns, bool transposed) {
            const Tensor x =
                untouched(device, {transposed ? columns : rows, transposed ? rows : columns}, {}, DType::f32);
            return transposed ? x.transpose(0, 1) : x;
          };
          body(ta   ? std::string("gradient")
               : tb ? std::string("forward")
                    : std::string("input"),
               operand(m, n, false), operand(m, k, ta), operand(k, n, tb), (m + k) % 3 == 0);
        }
}

/// body(rows) for select.
template <class Body>
void for_each_selection(Body&& body) {
  for (const int64_t rows : {0, 1, 50, 2048, 8192, 8193, 16384, 36096, 131072, 131073, 1 << 20}) body(rows);
}

/// body(kind, x) for row_norms.
template <class Body>
void for_each_norms(Device device, Body&& body) {
  for (const DType dtype : {DType::bf16, DType::f32})
    for (const int style : {0, 1, 2})
      for (const int64_t rows : {1, 50, 16384})
        for (const int64_t columns : {1, 64, 255, 256, 768, 3072})
          body(std::string(name_of(dtype)) + " " + std::to_string(style),
               matrix(device, rows, columns, dtype, style));
}

/// body(kind, dx [M, in], dy_rows [N, out], weight [out, in]) for dx of a sliced layer.
template <class Body>
void for_each_sliced_dx(Device device, Body&& body) {
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32})
    for (const int style : {0, 1, 2})
      for (const int64_t rows : {1, 50, 1638})
        for (const auto& [in, out] : {std::pair<int64_t, int64_t>{5, 3}, {768, 3072}, {3072, 768}})
          body(std::string(name_of(dtype)) + " " + std::to_string(style),
               matrix(device, 10 * rows, in, dtype, style), matrix(device, rows, out, dtype, style),
               matrix(device, out, in, dtype, style));
}

}  // namespace tessera::ops::choice_grid
