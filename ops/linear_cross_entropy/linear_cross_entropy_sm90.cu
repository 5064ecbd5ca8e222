#include "gpu/row.cuh"
#include "ops/gemm/gemm.h"
#include "ops/indices.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_sm90.cuh"

/// Variant "wgmma": no pass over the logits but those of the three GEMMs.
///
/// The softmax needs the whole row before the first probability is known, and the gradient the probability:
/// that is why the plain way writes the logits, reads them, and writes dl over them before two products read
/// them. But a row's factor may be put in later. With c the logit of the row's target (one dot product, made
/// first) and E = exp(l - c), S = the sum of E over the other classes,
///   p = E / (1 + S),   loss = log(1 + S),   dl = g / (1 + S) (E with -S in the target's place)
/// so dl is a row factor s = g / (1 + S) times a matrix that the product's epilogue can write at once, except
/// for one element of each row. dx = s (E W) takes s after its product, dW = E^T (s x) before, on x. c is
/// what cross-entropy makes small: l - c exceeds 44 only in rows whose loss does. A tile with such a logit
/// uses an offset of its own, and the row is put right by the kernel that adds up its sums: no input
/// overflows. Where the target is nearly certain, log1p(S) and -S keep all their digits.
///
/// Rounding: E to bf16 (relative, its range is that of f32), the target's element -S from f32 as well; s x to
/// bf16; dx and dweight are summed in f32 and rounded once.
///
/// A chunk of N tokens: 2 N V d FLOPs and 2 N V bytes written, then twice the FLOPs and the bytes read twice:
/// at d = 768 some 768 FLOPs per byte in each, bound by the tensor cores. dweight is read and written once a
/// chunk, 8 V d bytes: that is what makes chunks large.

namespace tessera::ops {
namespace {

using gpu::ceil_div;
using gpu::kWarp;

constexpr int kBlock = 256, kRowsOfBlock = kBlock / kWarp;
constexpr int kPack = gpu::kPackOf<bf16>;

struct RowArgs {
  const bf16 *x, *weight;
  Indices targets;
  int64_t x_stride, weight_stride, first, rows, width, classes, ignored;  // tokens first ... of targets
};

/// A warp per token: bases = the target's logit, own = the target. An ignored token gets +inf, which makes
/// all its exponentials 0, a target that is no class NaN.
__global__ void __launch_bounds__(kBlock) target_logits(RowArgs args, float* bases, int* own) {
  const int64_t row = blockIdx.x * int64_t(kRowsOfBlock) + threadIdx.x / kWarp;
  const int lane = int(threadIdx.x) % kWarp;
  if (row >= args.rows) return;
  const int64_t target = args.targets[args.first + row];
  const bool ignored = target == args.ignored, valid = !ignored && 0 <= target && target < args.classes;
  float sum = 0;
  if (valid) {
    const bf16 *const x = args.x + row * args.x_stride, *const weight =
                                                            args.weight + target * args.weight_stride;
    for (int64_t at = int64_t(lane) * kPack; at < args.width; at += kWarp * kPack) {
      float a[kPack], b[kPack];
      gpu::load_row(a, x, at, args.width, true, 0.0f);
      gpu::load_row(b, weight, at, args.width, true, 0.0f);
#pragma unroll
      for (int i = 0; i < kPack; ++i) sum = fmaf(a[i], b[i], sum);
    }
    sum = gpu::warp_reduce<gpu::Sum>(sum);
  }
  if (lane != 0) return;
  bases[row] = valid ? sum : ignored ? INFINITY : __int_as_float(0x7FC00000);
  own[row] = valid ? int(target) : -1;
}

struct FinishArgs {
  const float* bases;
  const int* own;
  const float2* partials;
  float* losses;
  // For gradients:
  bf16* exponentials;
  const bf16* x;
  bf16* scaled;  // s x
  float* scales;
  const float *dloss, *count;  // count: null for a sum
  int64_t exponentials_stride, x_stride, scaled_stride, rows, width, classes;
  int tiles;
  bool each;  // dloss is one number per token
};

/// A warp per token: its loss from the sums of its tiles, and with kGradients its factor s, s x, and the
/// target's element. A row with an offset other than its base is rewritten, as p.
template <bool kGradients>
__global__ void __launch_bounds__(kBlock) finish_rows(FinishArgs args) {
  const int64_t row = blockIdx.x * int64_t(kRowsOfBlock) + threadIdx.x / kWarp;
  const int lane = int(threadIdx.x) % kWarp;
  if (row >= args.rows) return;
  const float base = args.bases[row];
  const int own = args.own[row];
  const float2* const partials = args.partials + row * args.tiles;
  float sum = 0, top = base;
  for (int tile = lane; tile < args.tiles; tile += kWarp) {
    const float2 part = partials[tile];
    top = gpu::Max{}(top, part.x);
    sum += part.y;
  }
  top = gpu::warp_reduce<gpu::Max>(top);
  const bool plain = !(top > base);
  float loss, factor, target;
  if (plain) {  // also if base is NaN
    sum = gpu::warp_reduce<gpu::Sum>(sum);
    loss = log1pf(sum), factor = 1 / (1 + sum), target = -sum;
  } else {
    sum = 0;
    for (int tile = lane; tile < args.tiles; tile += kWarp)
      sum += partials[tile].y * expf(partials[tile].x - top);
    sum = gpu::warp_reduce<gpu::Sum>(sum);
    const float whole = sum + expf(base - top);
    loss = (top - base) + logf(whole), factor = 1, target = -sum / whole;
    if constexpr (kGradients) {
      const float all = top + logf(whole);
      bf16* const to = args.exponentials + row * args.exponentials_stride;
      for (int64_t at = lane; at < args.classes; at += kWarp)
        to[at] = bf16(float(to[at]) * expf(partials[at / kExponentialColumns].x - all));
    }
  }
  if (own < 0) loss = base == INFINITY ? 0.0f : base;
  if (lane == 0) args.losses[row] = loss;
  if constexpr (kGradients) {
    float scale = (args.each ? args.dloss[row] : *args.dloss) * factor;
    if (args.count) scale /= *args.count;
    if (own < 0) scale = base == INFINITY ? 0.0f : base;
    __syncwarp();
    if (lane == 0) {
      args.scales[row] = scale;
      if (own >= 0) args.exponentials[row * args.exponentials_stride + own] = bf16(target);
    }
    if (!args.scaled) return;
    const bf16* const x = args.x + row * args.x_stride;
    bf16* const to = args.scaled + row * args.scaled_stride;
    for (int64_t at = int64_t(lane) * kPack; at < args.width; at += kWarp * kPack) {
      float values[kPack];
      gpu::load_row(values, x, at, args.width, true, 0.0f);
#pragma unroll
      for (int i = 0; i < kPack; ++i) values[i] *= scale;
      gpu::store_row(to, at, args.width, true, values);
    }
  }
}

/// dx = scales * sums, a row at a time.
__global__ void __launch_bounds__(kBlock)
    scale_rows(bf16* dx, int64_t stride, const float* sums, int64_t sums_stride, const float* scales,
               int64_t rows, int64_t width) {
  const int64_t packs = ceil_div(width, kPack);
  for (int64_t at = blockIdx.x * int64_t(kBlock) + threadIdx.x; at < rows * packs;
       at += int64_t(gridDim.x) * kBlock) {
    const int64_t row = at / packs, first = (at - row * packs) * kPack;
    const float scale = scales[row];
    float values[kPack], more[4];
    const float* const from = sums + row * sums_stride;
    float some[4];
    gpu::load_row(some, from, first, width, true, 0.0f);
    gpu::load_row(more, from, first + 4, width, true, 0.0f);
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // an ignored row has 0, whatever its x is
      values[i] = scale == 0 ? 0 : scale * some[i];
      values[i + 4] = scale == 0 ? 0 : scale * more[i];
    }
    gpu::store_row(dx + row * stride, first, width, true, values);
  }
}

template <bool kStores>
void multiply_exponentials(const ExponentialChunk& chunk, const Tensor& weight) {
  using Tile = LmHeadTile;
  using Epilogue = ExponentialEpilogue<Tile, kStores>;
  const Tensor &x = chunk.x, &exponentials = chunk.exponentials;
  const int64_t rows = x.size(0), classes = weight.size(0), width = x.size(1);
  const GemmMaps maps{
      operand_map<bf16, Tile::kA>({x.data<bf16>(), x.row_stride(), 0}, rows, width, 1, Tile::kM),
      operand_map<bf16, Tile::kB>({weight.data<bf16>(), weight.row_stride(), 0}, classes, width, 1,
                                  Tile::kN)};
  typename Epilogue::Params params{};
  if constexpr (kStores)
    params.exponentials = gpu::tensor_map<bf16, 2>(exponentials.data<bf16>(), {classes, rows},
                                                   {exponentials.row_stride()}, {64, 64}, gpu::Swizzle::k128);
  params.bases = chunk.bases.data<float>();
  params.own = chunk.own.data<int32_t>();
  params.partials = static_cast<float2*>(chunk.partials.raw());
  params.rows = int(rows), params.classes = int(classes), params.tiles = int(chunk.partials.size(1));
  launch_gemm<Tile, Epilogue>(x.device(), maps, gemm_plan<Tile>(rows, classes, width, 1, 1), params);
}

}  // namespace

void exponential_product_cuda(const ExponentialChunk& chunk, const Tensor& weight) {
  if (chunk.exponentials.defined())
    multiply_exponentials<true>(chunk, weight);
  else
    multiply_exponentials<false>(chunk, weight);
}

void add_weight_gradient_cuda(const Tensor& dweight, const ExponentialChunk& chunk) {
  using Tile = TokenTile;
  const Tensor &exponentials = chunk.exponentials, &scaled = chunk.scaled;
  const int64_t classes = exponentials.size(1), width = scaled.size(1), rows = scaled.size(0);
  const GemmMaps maps{
      operand_map<bf16, Tile::kA>({exponentials.data<bf16>(), exponentials.row_stride(), 0}, classes, rows, 1,
                                  Tile::kM),
      operand_map<bf16, Tile::kB>({scaled.data<bf16>(), scaled.row_stride(), 0}, width, rows, 1, Tile::kN)};
  const auto map = gpu::tensor_map<float, 2>(dweight.data<float>(), {width, classes}, {dweight.row_stride()},
                                             {32, 64}, gpu::Swizzle::k128);
  launch_gemm<Tile, TmaReduceAddEpilogue<Tile>>(scaled.device(), maps,
                                                gemm_plan<Tile>(classes, width, rows, 1, 1), {map});
}

void target_logits_cuda(const ExponentialChunk& chunk, const Tensor& weight, const Tensor& targets,
                        int64_t first, int64_t ignored) {
  const int64_t rows = chunk.x.size(0);
  const RowArgs args{chunk.x.data<bf16>(),
                     weight.data<bf16>(),
                     Indices(targets),
                     chunk.x.row_stride(),
                     weight.row_stride(),
                     first,
                     rows,
                     chunk.x.size(1),
                     weight.size(0),
                     ignored};
  gpu::launch(chunk.x.device(), {dim3(unsigned(ceil_div(rows, kRowsOfBlock))), kBlock}, target_logits, args,
              chunk.bases.data<float>(), chunk.own.data<int32_t>());
}

void finish_exponentials_cuda(const ExponentialChunk& chunk, const Tensor& losses, int64_t classes,
                              const Tensor& dloss, const Tensor& count) {
  const int64_t rows = chunk.x.size(0);
  FinishArgs args{};
  args.bases = chunk.bases.data<float>();
  args.own = chunk.own.data<int32_t>();
  args.partials = static_cast<const float2*>(chunk.partials.raw());
  args.losses = losses.data<float>();
  args.rows = rows, args.width = chunk.x.size(1), args.classes = classes;
  args.tiles = int(chunk.partials.size(1));
  const gpu::LaunchShape shape{dim3(unsigned(ceil_div(rows, kRowsOfBlock))), kBlock};
  if (!chunk.exponentials.defined()) return gpu::launch(chunk.x.device(), shape, finish_rows<false>, args);
  args.exponentials = chunk.exponentials.data<bf16>();
  args.exponentials_stride = chunk.exponentials.row_stride();
  args.x = chunk.x.data<bf16>(), args.x_stride = chunk.x.row_stride();
  if (chunk.scaled.defined())
    args.scaled = chunk.scaled.data<bf16>(), args.scaled_stride = chunk.scaled.row_stride();
  args.scales = chunk.scales.data<float>();
  args.dloss = dloss.data<float>(), args.each = dloss.rank() > 0;
  args.count = count.defined() ? count.data<float>() : nullptr;
  gpu::launch(chunk.x.device(), shape, finish_rows<true>, args);
}

void scale_rows_cuda(const Tensor& dx, const Tensor& sums, const Tensor& scales) {
  const int64_t rows = dx.size(0), width = dx.size(1);
  const int64_t blocks = std::min<int64_t>(ceil_div(rows * ceil_div(width, kPack), kBlock),
                                           int64_t(dx.device().multiprocessors()) * 8);
  gpu::launch(dx.device(), {dim3(unsigned(blocks)), kBlock}, scale_rows, dx.data<bf16>(), dx.row_stride(),
              sums.data<float>(), sums.row_stride(), scales.data<float>(), rows, width);
}

}  // namespace tessera::ops
