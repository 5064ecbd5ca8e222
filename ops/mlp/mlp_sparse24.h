#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "ops/activation/activation.h"
#include "ops/sparse24/sparse24.h"

namespace tessera::ops {

/// How one of the GEMMs with hidden activations runs.
///   dense   not sparse
///   sparse  its hidden operand is 2:4 in every column
///   split   2:4 in all but the densest columns, which a dense GEMM multiplies
enum class Gemm24 : uint8_t { dense, sparse, split };
const char* name_of(Gemm24 form);            // "split"
Gemm24 parse_gemm24(std::string_view name);  // throws, naming the choices

/// The settings of mlp_sparse24.
struct MlpSparse24 {
  Activation activation = Activation::relu_squared;  // or relu
  Gemm24 y = Gemm24::split;                          // a down^T
  Gemm24 dx = Gemm24::split;                         // dh up
  Gemm24 dup = Gemm24::split;                        // dh^T x
  Gemm24 ddown = Gemm24::split;                      // dy^T a
  double dense_share = 0.05;                         // of the F columns; of split GEMMs
  /// What forward keeps of each group of four features.
  Method24 method = Method24::naive;
  /// What the gradients of the weights keep of each group of four tokens: naive, mvue or fast.
  Method24 token_method = Method24::naive;
  /// False: dh is not restricted to what forward kept of a ("dense dy1", with which Haziza et al. saw a run
  /// diverge). Keeps a dense copy of a.
  bool masks_gradient = true;
  /// A GEMM that is not dense and that sparse tensor cores cannot run is an error, not a GEMM of the
  /// decompressed operand.
  bool required = false;

  // ---- what belongs to a call ----
  /// i32 [F]: the counts of an earlier call, by which split GEMMs find the densest columns: those of the
  /// largest counts, of equal ones the first. Undefined: zeros.
  Tensor previous = {};
  /// i32 [T], a permutation: gradients of weights take tokens order[4 g] ... order[4 g + 3] as group g.
  /// Undefined: neighbours.
  Tensor order = {};
  Tensor scale = {};                  // f32 [1], of method soft_threshold
  DynamicScale24* dynamic = nullptr;  // of method soft_dynamic; a call advances it
  std::optional<Rng> rng = {};        // of mvue; a stream or two per call
  bool l1 = false;                    // MlpSparse24Result::l1 is wanted

  /// The settings, without what belongs to a call.
  void fields(auto&& visit) {
    visit("activation", activation), visit("y", y), visit("dx", dx), visit("dup", dup);
    visit("ddown", ddown), visit("dense_share", dense_share), visit("method", method);
    visit("token_method", token_method), visit("masks_gradient", masks_gradient);
    visit("required", required);
  }
  bool operator==(const MlpSparse24& other) const;  // of the settings
  bool splits() const;
  bool is_dense() const;  // every GEMM
  int64_t dense_columns(int64_t hidden) const;
  /// Throws, beginning with `what`, unless the settings go together.
  void validate(const std::string& what) const;
};

/// A permutation i32 [tokens] of which tokens stand together, for MlpSparse24::order. "random": drawn from
/// the seed; "stride": tokens a quarter of all apart.
Tensor token_order24(const std::string& kind, int64_t tokens, uint64_t seed, Device device,
                     Site site = Site::here());

struct MlpSparse24Result {
  Tensor y;       // [..., E]
  Tensor counts;  // i32 [F]: elements of a that are not zero, before any are dropped; on y's device
  /// With MlpSparse24::l1: the mean of |S(a)| over all T F elements, those that were dropped being 0. f32
  /// (f64 for f64), of rank 0, and differentiable: a penalty on hidden activations is part of the loss.
  Tensor l1 = {};
};

/// The feed-forward layer of ops::mlp with 2:4 sparse hidden activations (Haziza et al., arXiv:2503.16672):
///   h = x up^T + up_bias,  a = f(h),  y = S(a) down^T + down_bias + residual
/// with f relu or relu_squared and S what `method` keeps of every four features of a token; in a split GEMM S
/// keeps the densest columns as they are. x [..., D], up [F, D], down [E, F], up_bias [F], down_bias [E] and
/// residual [..., E], each of these three or undefined. One floating dtype and device for all.
///   da = dy down,  dh = da S'(a) f'(h)   within what S kept; a scale or threshold of S is a constant in S'
///   dx = dh up,  ddown = dy^T S(a),  dup = dh^T x,  dup_bias and ddown_bias the column sums of dh and dy
/// In dup and ddown, which sum over tokens, S(a) and dh keep two of every four tokens of a feature on top of
/// that: those of `token_method` by S(a), for both (by mvue each its own, so that both stay unbiased). With
/// dx `sparse` where y is not, dh keeps the two of four features that are largest in S(a).
/// The gradient of l1 adds dl1 / (T F) to every element of da, in f32 (f64 for f64) and rounded again.
///
/// Rounding: h, a, S(a), da and dh to x's dtype, sums in f32 (f64 for f64). The dense part of a split y or dx
/// is rounded to x's dtype before the sparse part is added in f32; split gradients of weights are not.
///
/// Saved: x, the weights, S(a) as Sparse24 (1.125 bytes per element of 16 bits) and its dense columns; f'(h)
/// follows from S(a) where the method keeps values as they are, else it is saved next to it, 1 byte per
/// element. With `y` dense or without masks_gradient: a. relu_squared overflows f16 from |h| = 256 on.
///
/// Variants on a GPU, of one result: "fused" makes S(a), its dense columns and the counts in the first GEMM's
/// epilogue and everything that backward's other GEMMs multiply in one pass (linear_activation24,
/// hidden_gradient24); it needs bf16 or f16 on compute capability 9.0, four GEMMs that are alike and not
/// dense, naive choices, masks_gradient and no order. "composed" calls the operators one after the other.
/// Where not all of x, up and down need gradients, or up_bias needs one, backward is composed in both.
///
/// While no tape records, counts are made and nothing is saved. On a GPU the GEMMs are those of multiply24,
/// which chooses the tensor cores; throws where sizes, dtypes, devices or settings disagree.
MlpSparse24Result mlp_sparse24(const Tensor& x, const Tensor& up, const Tensor& down, const MlpSparse24& how,
                               const Tensor& up_bias = {}, const Tensor& down_bias = {},
                               const Tensor& residual = {}, Site site = Site::here());

}  // namespace tessera::ops
