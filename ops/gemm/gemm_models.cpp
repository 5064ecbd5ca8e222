#include "ops/gemm/gemm_models_internal.h"

#include <algorithm>
#include <array>

#include "ops/gemm/plan_cache_internal.h"
#include "runtime/integers.h"

namespace tessera::ops {
namespace {

constexpr int64_t kNarrowSide = 64;  // what makes a side narrow
constexpr int64_t kShortSide = 256, kLongDepth = 4096;

}  // namespace

double gemm_bytes(const Gemm& g) {
  const double batch = double(g.batch), matrices = double(g.batch * g.terms), size = double(size_of(g.in));
  return (g.stride_a == 0 ? 1 : matrices) * double(g.m) * double(g.k) * size +
         (g.stride_b == 0 ? 1 : matrices) * double(g.k) * double(g.n) * size +
         batch * double(g.m) * double(g.n) * double(size_of(g.out));
}

bool gemm_on_vectors(const void* data, int64_t ld, int64_t stride, DType dtype) {
  const int64_t size = int64_t(size_of(dtype));
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && ld * size % 16 == 0 && stride * size % 16 == 0;
}

bool gemm_on_lines(const void* data, int64_t ld, int64_t stride) {
  return reinterpret_cast<uintptr_t>(data) % 128 == 0 && ld % 64 == 0 && stride % 64 == 0;
}

bool gemv_is_slower(DType dtype, int64_t out, int64_t in, int64_t tokens, const Gpu& gpu) {
  const FewTokensCosts& c = gemm_costs(gpu).few_tokens;
  return size_of(dtype) == 2 && tokens <= kGemvTokens && out % 8 == 0 &&
         double(out * in) * double(size_of(dtype)) >= c.gemv_bytes && double(in) <= c.longest * double(out);
}

bool gemm_stores_by_tma(const Gemm& g) {
  if (!gemm_on_vectors(g.d, g.ldd, g.stride_d, g.out) ||
      (g.c && !gemm_on_vectors(g.c, g.ldd, g.stride_d, g.out)))
    return false;
  return g.owns_d_padding || g.n * int64_t(size_of(g.out)) % 16 == 0;
}

bool GemmOnGpu::lacks_wgmma() const {
  if (!lacks_wgmma_) lacks_wgmma_ = !gemm_sm90_lacks(gemm_, gpu_).empty();
  return *lacks_wgmma_;
}

const GemmChoice& GemmOnGpu::wgmma() const {
  if (!wgmma_) wgmma_ = choose_gemm(gemm_, gpu_);
  return *wgmma_;
}

const NarrowChoice& GemmOnGpu::narrow() const {
  if (!narrow_) narrow_ = narrow_by_mma(gemm_) ? choose_narrow_mma(gemm_, gpu_) : choose_narrow(gemm_, gpu_);
  return *narrow_;
}

bool GemmOnGpu::has_odd_extents() const {
  const Gemm& g = gemm_;
  return ((g.transpose_a ? g.m : g.k) | (g.transpose_b ? g.k : g.n) | g.n) % 8 != 0;
}

bool GemmOnGpu::suits_cublas() const {
  const Gemm& g = gemm_;
  return (g.rounds_in_place || !has_odd_extents()) && gemm_on_vectors(g.a, g.lda, g.stride_a, g.in) &&
         gemm_on_vectors(g.b, g.ldb, g.stride_b, g.in) && gemm_on_vectors(g.d, g.ldd, g.stride_d, g.out) &&
         gemm_on_vectors(g.bias, 0, g.stride_bias, g.in);
}

bool GemmOnGpu::cublas_beats_tiles() const {
  const Gemm& g = gemm_;
  const AlignedCosts& c = costs().aligned;
  if (c.factor == 0 || lacks_wgmma() || g.takes_along || g.terms > 1 || !suits_cublas()) return false;
  const GemmChoice& tiles = wgmma();
  if (tiles.tile == kStreamTile)
    return gemv_is_slower(g.in, std::max(g.m, g.n), g.k, std::min(g.m, g.n), gpu_);
  if (narrow_estimate().compared < wgmma_estimate().compared) return false;
  if (product_is_gradient(!g.transpose_a, g.transpose_b)) return tiles.seconds < c.gradients;
  return tiles.seconds < c.others || tiles.splits > 1 || std::min(g.m, g.n) <= c.few ||
         double(g.k) >= c.long_k * double(g.n);
}

double GemmOnGpu::cublas_seconds() const {
  const Gemm& g = gemm_;
  const CublasCosts& c = costs().cublas;
  if (!narrow_by_mma(g)) {
    double seconds = c.single + gemm_bytes(g) / c.single_bytes;
    if (std::max(g.m, g.n) <= kShortSide) seconds += c.term * double(std::min(g.k, kLongDepth));
    return seconds;
  }
  constexpr int64_t kFew = 8, kTerms = 32;
  const bool odd = has_odd_extents();
  const double flops =
      2 * double(g.batch) * double(round_up(g.m, 64)) * double(round_up(g.n, 64)) * double(g.terms * g.k);
  const int64_t side = std::min(g.m, g.n);
  const bool few_terms = g.k <= kTerms && side > kNarrowSide && g.out == g.in;
  const double few =
      side > 2 && product_is_gradient(!g.transpose_a, g.transpose_b) ? c.few_gradient : c.few_and_odd;
  const double bytes = gemm_bytes(g) * (odd && side <= kFew ? few : few_terms ? c.few_terms : 1);
  // Operands whose padding is not ours come by way of a copy, read and written.
  const double copies = 2 * g.copied / c.bytes_per_second;
  return c.ends + copies + (odd ? c.odd : 0) + std::max(flops / c.flops, bytes / c.bytes_per_second) +
         (std::max(g.m, g.n) <= kShortSide ? c.term * double(std::min(g.k, kLongDepth)) : 0);
}

Estimate GemmOnGpu::cublas_estimate() const {
  if (!cublas_beats_tiles()) return modelled_cublas();
  const GemmChoice& choice = wgmma();
  return {choice.seconds *
          (choice.tile == kStreamTile ? costs().few_tokens.cublas_factor : costs().aligned.factor)};
}

Estimate GemmOnGpu::modelled_cublas() const {
  // Not compared with tiles where those pay: its model is some 30 % off.
  if (!lacks_wgmma() && wgmma_pays()) return Estimate::slower(cublas_seconds());
  // A bias that it does not fuse is a launch.
  return {cublas_seconds() + (gemm_.bias && lacks_wgmma() ? costs().cublas.bias : 0)};
}

bool GemmOnGpu::wgmma_pays() const {
  // GEMV-like shapes, and skinny ones that need split-K or an unaligned D, do not fill a tile. Where rows lie
  // across lines TMA is slow and cuBLASLt may be faster: for GEMMs long enough for its copies, where the
  // models, both some 15 % off, say so clearly.
  const WgmmaCosts& c = costs().wgmma;
  const int64_t few = std::min(gemm_.m, gemm_.n);
  if (few < 2) return false;
  const GemmChoice& choice = wgmma();
  if (choice.tile != kStreamTile && few <= c.few && (!gemm_stores_by_tma(gemm_) || choice.splits > 1))
    return false;
  return choice.seconds < c.clearly_from ||
         (gemm_on_lines(gemm_.a, gemm_.lda, gemm_.stride_a) &&
          gemm_on_lines(gemm_.b, gemm_.ldb, gemm_.stride_b)) ||
         cublas_seconds() >= c.clearly * choice.seconds;
}

Estimate GemmOnGpu::wgmma_estimate() const {
  const double seconds = wgmma().seconds;
  if (!wgmma_pays()) return Estimate::slower(seconds);
  // What a single block of k costs, its model does not know.
  const bool narrow = std::min({gemm_.m, gemm_.n, gemm_.k}) <= kNarrowSide;
  const bool one_block = narrow && gemm_.k <= costs().narrow_terms.few_k &&
                         gemm_narrow_lacks(gemm_).empty() && this->narrow().tile == kNarrowTerms;
  return {seconds, one_block ? cublas_seconds() : seconds};
}

double GemmOnGpu::unforced_seconds() const {
  const std::string_view variant = gemm_variant_unforced(*this);
  return variant == "wgmma"    ? wgmma().seconds
         : variant == "narrow" ? narrow().seconds
                               : cublas_estimate().seconds;
}

Estimate GemmOnGpu::narrow_estimate() const {
  if (std::min({gemm_.m, gemm_.n, gemm_.k}) > kNarrowSide) return Estimate::slower();
  const double seconds = narrow().seconds;
  if (!narrow_by_mma(gemm_)) return {seconds};
  double others = modelled_cublas().compared;
  if (!lacks_wgmma()) others = std::min(others, wgmma_estimate().compared);
  const NarrowMargins& margins = costs().margins;
  return {seconds, seconds / (others < margins.from ? margins.about : margins.clearly)};
}

namespace {

/// What choices depend on.
using Key = std::array<int64_t, 16>;

/// The largest power of two up to 128 that divides the address; 0 of null.
int64_t alignment(const void* pointer) {
  if (!pointer) return 0;
  const uint64_t address = reinterpret_cast<uintptr_t>(pointer) | 128;
  return int64_t(address & (~address + 1));
}

Key key_of(const Gemm& g, const Gpu& gpu) {
  const int64_t flags = int64_t(g.in) | int64_t(g.out) << 8 | int64_t(g.transpose_a) << 16 |
                        int64_t(g.transpose_b) << 17 | int64_t(g.bias != nullptr) << 18 |
                        int64_t(g.beta == 0) << 19 | int64_t(g.owns_d_padding) << 20 |
                        int64_t(g.takes_along) << 21 | int64_t(g.rounds_in_place) << 22 |
                        int64_t(gpu.model) << 24 | int64_t(gpu.major) << 32;
  const int64_t aligned = alignment(g.a) | alignment(g.b) << 16 | alignment(g.d) << 32 | alignment(g.c) << 48;
  return {g.m,
          g.n,
          g.k,
          g.batch,
          g.lda,
          g.ldb,
          g.ldd,
          g.stride_a,
          g.stride_b,
          g.stride_d,
          flags,
          aligned,
          int64_t(g.copied),
          g.terms,
          gpu.multiprocessors};
}

}  // namespace

const GemmOnGpu& gemm_on_gpu(const Gemm& gemm, const Gpu& gpu) {
  constexpr size_t kKept = 1024;  // a training step has some dozens
  thread_local LruCache<Key, GemmOnGpu, NumbersHash> cache(kKept);
  return cache.get(key_of(gemm, gpu), [&] { return GemmOnGpu(gemm, gpu); });
}

std::string describe_problem(const GemmOnGpu& problem) {
  const Gemm& g = problem.gemm();
  return text_of(g.m, " x ", g.n, " x ", g.k, " in ", g.in, " with leading dimensions ", g.lda, ", ", g.ldb,
                 ", ", g.ldd, g.batch > 1 ? text_of(", batch ", g.batch) : "",
                 g.terms > 1 ? text_of(", sum of ", g.terms) : "");
}

}  // namespace tessera::ops
