#pragma once

#include <optional>

#include "ops/gemm/gemm.h"
#include "ops/gemm/gemm_costs.h"
#include "ops/gemm/gemm_narrow.h"
#include "ops/gemm/gemm_sm90_plan.h"

namespace tessera::ops {

/// Bytes of all operands and of d.
double gemm_bytes(const Gemm& gemm);
/// Whether every row of a 16-bit operand starts on a line of memory, 128 bytes. TMA loads rows of so many: of
/// others it asks for two lines each.
bool gemm_on_lines(const void* data, int64_t ld, int64_t stride);
/// Whether all rows of an operand start on 16 bytes.
bool gemm_on_vectors(const void* data, int64_t ld, int64_t stride, DType dtype);
/// Whether TMA can write d.
bool gemm_stores_by_tma(const Gemm& gemm);

/// Tokens up to which linear has a GEMV.
inline constexpr int64_t kGemvTokens = 8;
/// Whether GEMMs are faster than that for a weight [out, in].
bool gemv_is_slower(DType dtype, int64_t out, int64_t in, int64_t tokens, const Gpu& gpu);

/// A GEMM on a GPU, and what the cost models say of it, each computed when it is first asked for. The problem
/// of the table of variants in gemm.cpp.
class GemmOnGpu {
 public:
  GemmOnGpu(const Gemm& gemm, const Gpu& gpu) : gemm_(gemm), gpu_(gpu) {}
  /// Its pointers may be those of another GEMM that differs in nothing but them, and lies on boundaries
  /// alike.
  const Gemm& gemm() const { return gemm_; }
  const Gpu& gpu() const { return gpu_; }
  const GemmCosts& costs() const { return gemm_costs(gpu_); }

  /// Tile and splits in variant "wgmma", with its seconds. Only if gemm_sm90_lacks nothing.
  const GemmChoice& wgmma() const;
  /// In variant "narrow". Only if gemm_narrow_lacks nothing.
  const NarrowChoice& narrow() const;
  /// What cuBLASLt is expected to take, with rounded extents or as they are, without a launch for the bias.
  double cublas_seconds() const;
  /// Whether cuBLASLt is faster than tiles, as measured: of GEMMs that it takes as they are, or with extents
  /// that are rounded up in place.
  bool cublas_beats_tiles() const;
  /// What the variant that runs unforced is expected to take.
  double unforced_seconds() const;
  /// What the variants are compared by, where they can run.
  Estimate wgmma_estimate() const;
  Estimate narrow_estimate() const;
  Estimate cublas_estimate() const;

  /// Index in the table of variants if none is forced, from `choose()`, which is asked once.
  template <class Choose>
  size_t unforced(Choose&& choose) const {
    if (!unforced_) unforced_ = choose();
    return *unforced_;
  }

 private:
  bool lacks_wgmma() const;
  /// Whether a dense row of A, B or D is no multiple of 16 bytes (in 16 bits).
  bool has_odd_extents() const;
  /// Whether cuBLASLt can load and store all of it in vectors.
  bool suits_cublas() const;
  Estimate modelled_cublas() const;
  bool wgmma_pays() const;

  Gemm gemm_;
  Gpu gpu_;
  mutable std::optional<bool> lacks_wgmma_;
  mutable std::optional<GemmChoice> wgmma_;
  mutable std::optional<NarrowChoice> narrow_;
  mutable std::optional<size_t> unforced_;
};

/// The same from this thread's cache of the last GEMMs that differ in what choices depend on: evaluating all
/// models takes the host some microseconds, more than a launch. Valid until the next 1,024 calls.
const GemmOnGpu& gemm_on_gpu(const Gemm& gemm, const Gpu& gpu);

std::string describe_problem(const GemmOnGpu& problem);

/// Name of the variant of multiply that runs the GEMM, forced or not.
std::string_view gemm_variant(const GemmOnGpu& problem);
/// Likewise if none is forced.
std::string_view gemm_variant_unforced(const GemmOnGpu& problem);

}  // namespace tessera::ops
