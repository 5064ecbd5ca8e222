#include <algorithm>

#include "ops/gemm/gemm_models_internal.h"
#include "ops/sparse24/multiply24_internal.h"
#include "runtime/integers.h"
#include "tensor/pads.h"

namespace tessera::ops {
namespace {

/// Costs of the sparse kernel, in clocks, fitted on an H200 to seven products of 2048 to 16384 on each side
/// (docs/ops/sparse24.md).
struct Costs24 {
  double clock = 1.55e9;        // under this load
  double ends = 6000;           // start and end of the kernel
  double epilogue = 4500;       // of a tile, as far as no MMAs hide it
  double step = 760;            // 64 of k of a tile of 128 x 256
  double bytes_per_clock = 44;  // that an SM gets from L2
  double decompress = 3.4e12;   // bytes per second
  double launch = 4e-6;
};
constexpr Costs24 kCosts;

/// Whether rows of so many elements, `ld` apart, start on 16 bytes.
bool on_vectors(const void* data, int64_t rows, int64_t ld, DType dtype) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && (rows <= 1 || ld * int64_t(size_of(dtype)) % 16 == 0);
}

/// How a matrix [rows, columns] lies: dense rows, dense columns, or neither.
struct MatrixLayout {
  bool rows = false, columns = false;
  int64_t ld = 0;

  explicit MatrixLayout(const Tensor& x) {
    const int64_t r = x.size(0), c = x.size(1), down = x.layout().stride(0), across = x.layout().stride(1);
    rows = (c <= 1 || across == 1) && (r <= 1 || down >= c);
    columns = !rows && (r <= 1 || down == 1) && (c <= 1 || across >= r);
    // Of a single row or column the distance to the next is free.
    const int64_t next = rows ? (r > 1 ? down : 0) : (c > 1 ? across : 0);
    ld = next ? next : row_pitch(rows ? c : r, x.dtype());
  }
};

}  // namespace

Described24 describe24(const Multiply24Call& call) {
  const auto& [d, a, b, options] = call;
  const MatrixLayout of_b(b), of_d(d);
  const auto raw = [](const Tensor& x) { return x.defined() ? x.raw() : nullptr; };
  const bool by_m = options.bias.defined() && options.bias.rank() == 2;
  Described24 made;
  SparseGemm24& g = made.gemm;
  g.m = a.m(), g.n = b.size(1), g.k = a.k();
  g.dtype = a.dtype(), g.wide = d.dtype() != a.dtype(), g.a_across = a.along == Along24::tokens;
  g.values = a.values.raw(), g.metadata = a.metadata.raw();
  g.b = b.raw(), g.ldb = of_b.ld, g.b_k_major = of_b.columns;
  g.d = d.raw(), g.ldd = of_d.ld, g.transposed = of_d.columns;
  g.accumulate = options.accumulate || options.residual.defined();
  g.alpha = float(options.alpha);
  g.bias_n = by_m ? nullptr : raw(options.bias), g.bias_m = by_m ? raw(options.bias) : nullptr;
  const Tensor rows = g.transposed ? d.transpose(0, 1) : d;
  const int64_t vector = 16 / int64_t(size_of(d.dtype())), width = rows.size(1);
  g.by_threads = !on_vectors(g.d, rows.size(0), g.ldd, d.dtype()) ||
                 (width % vector != 0 && !owns_row_padding(rows, round_up(width, vector)));
  if (!of_b.rows && !of_b.columns)
    made.lacks = "b with dense rows or columns";
  else if (!on_vectors(g.b, g.b_k_major ? g.n : g.k, g.ldb, g.dtype))
    made.lacks = "b whose rows start on 16-byte boundaries";
  else if (options.bias.defined() && !options.bias.layout().is_packed())
    made.lacks = "a packed bias";
  return made;
}

Choice24 choose24(const SparseGemm24& g, const Gpu& gpu, int forced) {
  const Costs24& c = kCosts;
  Choice24 best;
  for (int index = 0; index < int(std::size(kTiles24)); ++index) {
    const Tile24& tile = kTiles24[index];
    const int64_t slots = gpu.multiprocessors / tile.cluster;
    if ((forced >= 0 && index != forced) || slots == 0) continue;
    const int64_t tiles = ceil_div(g.m, tile.rows * tile.cluster) * ceil_div(g.n, tile.columns),
                  rounds = ceil_div(tiles, slots), blocks = ceil_div(g.k, 64);
    const double share = double(tile.rows) * tile.columns / (128 * 256);
    const double loaded = tile.rows * 72.0 + tile.columns * 128.0 / tile.cluster;
    const double block = std::max(c.step * share, loaded / c.bytes_per_clock);
    const double seconds =
        (c.ends + double(rounds) * (double(blocks) * block + c.epilogue * share * (g.wide ? 2 : 1))) /
        c.clock;
    if (best.seconds == 0 || seconds < best.seconds) best = {index, seconds};
  }
  return best;
}

double decompressed24_seconds(const SparseGemm24& g, const Gpu& gpu) {
  Gemm dense{.m = g.m, .n = g.n, .k = g.k, .in = g.dtype, .out = g.wide ? DType::f32 : g.dtype};
  dense.transpose_a = g.a_across, dense.transpose_b = g.b_k_major;
  dense.lda = row_pitch(g.a_across ? g.m : g.k, g.dtype),
  dense.ldb = row_pitch(g.b_k_major ? g.k : g.n, g.dtype);
  dense.ldd = row_pitch(g.n, dense.out);
  if (g.accumulate) dense.beta = 1;
  const GemmOnGpu& problem = gemm_on_gpu(dense, gpu);
  // The model of cuBLASLt is one of narrow GEMMs, where bytes and launches count.
  const double modelled = gemm_sm90_lacks(dense, gpu).empty() ? problem.wgmma().seconds : 0,
               seconds = modelled > 0 ? modelled : problem.cublas_seconds();
  const double bytes = double(g.m) * double(g.k) * (1.5 * double(size_of(g.dtype)) + 0.125);
  return seconds + kCosts.launch + bytes / kCosts.decompress;
}

}  // namespace tessera::ops
