#pragma once

#include <string>
#include <string_view>

#include "runtime/rng.h"
#include "tensor/tensor.h"

/// Matrices of which two of every four neighbouring elements are kept (2:4), and their GEMM on the sparse
/// tensor cores of sm_90. For 2:4 training of activations (Haziza et al., arXiv:2503.16672) and of weights
/// (Hu et al., arXiv:2404.01847).

namespace tessera::ops {

/// The dimension of x [tokens, features] along which four neighbours form a group. A sparse GEMM sums over
/// that dimension.
enum class Along24 : uint8_t {
  features,  // four consecutive elements of a row ("token-wise"): x itself can be multiplied, over features
  tokens     // four consecutive rows of a column ("feature-wise"): x^T can be multiplied, over tokens
};
const char* name_of(Along24 along);            // "features", "tokens"
Along24 parse_along24(std::string_view name);  // throws, naming the choices

/// Which two of a group x_0 ... x_3 are kept, and as what. Magnitudes are compared as stored; NaN is larger
/// than infinity, so it stays visible; of equal ones the lower index is taken. -0 is a zero of magnitude 0
/// and keeps its sign.
///
/// naive           The two of largest magnitude, as they are.
/// mvue            Unbiased (Chmiel et al., arXiv:2203.10991): with a_i = |x_i| + eps, S their sum, the first
///                 index is drawn with probability a_i / S, the second in proportion to a over the others;
///                 x_i is then kept with p_i = a_i/S + a_i sum_{j != i} (a_j/S) / (S - a_j), as x_i / p_i.
///                 eps is 2^-40 of the group's largest magnitude's power of two. A group with an infinite or
///                 NaN element is kept as by `naive`.
/// soft_threshold  The same two as naive, each sign(x) (|x| - t) scale, where t is the third-largest
/// magnitude
///                 (S-STE, arXiv:2409.09099). The scale is fitted once, on weights: soft_scale().
/// soft_dynamic    The same; the scale is refreshed from activations and lies in [0.5, 2]: DynamicScale24.
/// fast            x_0 and x_1, whatever they hold: a bound for the cost of choosing, not for training.
enum class Method24 : uint8_t { naive, mvue, soft_threshold, soft_dynamic, fast };
const char* name_of(Method24 method);            // "naive", ..., "fast"
Method24 parse_method24(std::string_view name);  // throws, naming the choices

/// A method with what it needs.
struct Selection24 {
  Method24 method = Method24::naive;
  Tensor scale = {};         // f32 [1], of the soft methods, on the device of x
  RandomStream stream = {};  // of mvue

  /// Draws for x on `device` from a new stream of `rng`. A draw is a function of seed, stream (one per call
  /// and step) and of the group's number in x: it depends on neither device, thread nor layout.
  static Selection24 mvue(const Rng& rng, Device device, Site site = Site::here());
};

/// A 2:4 matrix: that of x [tokens, features], or what is left of it.
///
/// As operand A of a GEMM it is m x k: x with m = tokens and k = features, or x^T with m = features and k =
/// tokens. Its elements lie in the order of the tensor core's fragments (ops/sparse24/sparse24_layout.h), m
/// and k rounded up to 64 with zeros; extents may be any. For 16 bits that is 1.125 bytes per element of x.
///
/// values    dtype [ceil(m / 64), ceil(k / 64), 2048]
/// metadata  i32 [ceil(m / 64), ceil(k / 64), 128]
/// scales    undefined: room for the factors of A's rows, f32 [m], of 8-bit values
///
/// f64 (CPU), f32, bf16 and f16.
struct Sparse24 {
  Along24 along = Along24::features;
  int64_t tokens = 0, features = 0;  // of x
  Tensor values, metadata, scales;

  /// Uninitialised.
  static Sparse24 empty(int64_t tokens, int64_t features, Along24 along, DType dtype, Device device);

  int64_t m() const { return along == Along24::features ? tokens : features; }
  int64_t k() const { return along == Along24::features ? features : tokens; }
  DType dtype() const { return values.dtype(); }
  Device device() const { return values.device(); }
  bool defined() const { return values.defined(); }
  uint64_t bytes() const;
  Sparse24 to(Device device) const;
  void fields(auto&& visit) {
    visit("along", along), visit("tokens", tokens), visit("features", features);
    visit("values", values), visit("metadata", metadata), visit("scales", scales);
  }
};

/// Throws, saying what does not fit, unless the tensors have the dtypes, shapes and device that they should.
/// `name` begins the message.
void validate(const Sparse24& x, const std::string& name);
/// The same for values from elsewhere, on the CPU: also throws unless every group's positions ascend and
/// padding is zero.
void validate_elements(const Sparse24& x, const std::string& name);

/// x [tokens, features] -> its 2:4 matrix. x: floating, any layout. What is kept is rounded once to x's dtype
/// (naive and fast keep bits). No gradient flows through it.
Sparse24 compress24(const Tensor& x, Along24 along, const Selection24& selection = {},
                    Site site = Site::here());
/// Compressed along both dimensions: along features, and along tokens of what that keeps, so that dropped
/// elements stay dropped ("on top of the token-wise mask"). x is read once.
struct BothWays24 {
  Sparse24 by_features, by_tokens;
};
BothWays24 compress24_both(const Tensor& x, const Selection24& selection = {}, Site site = Site::here());
/// The elements of x at the positions that `pattern` keeps, unchanged: for a gradient, masked like its
/// activation. Shares the metadata. x: floating, of pattern's shape and device.
Sparse24 compress24_like(const Tensor& x, const Sparse24& pattern, Site site = Site::here());

/// x [tokens, features], zeros where nothing was kept.
Tensor decompress24(const Sparse24& x, Site site = Site::here());

/// f32 [1] on the device of x: the scale that makes the soft-thresholded x the nearest to x in the mean
/// square, sum x s / sum s^2 (1 if all s are 0), over `samples` of its tokens at equal distances (0: all).
/// `clamped`: to [0.5, 2]. Sums in f64; the host does not wait.
Tensor soft_scale(const Tensor& x, Along24 along = Along24::features, int64_t samples = 0,
                  bool clamped = false, Site site = Site::here());

/// The scale of soft_dynamic over training: fitted to `samples` tokens at the first step and at every
/// `interval`-th one after it. A checkpoint keeps `scale` and `step`.
struct DynamicScale24 {
  int64_t interval = 10, samples = 100;
  int64_t step = 0;
  Tensor scale = {};

  /// The scale for x at this step, and on to the next.
  Tensor next(const Tensor& x, Along24 along = Along24::features, Site site = Site::here());
};

struct Multiply24Options {
  double alpha = 1;
  bool accumulate = false;  // add to d instead of overwriting it
  Tensor bias = {};         // [n], or [m, 1]: broadcasts to d; not with accumulate
  Tensor residual = {};     // of d's shape and dtype, added to the result; not with accumulate
};

/// d = alpha A b (+ d) (+ bias) (+ residual): A the m x k matrix of `a`, b [k, n] of its dtype, d [m, n] of
/// that dtype or f32. b and d may be transposed views: rows or columns are dense. Sums run in f32 (f64 for
/// f64), everything is added to them, and they are rounded once (variant "decompressed": as ops::multiply
/// rounds). k = 0 gives zeros or what is added.
///
/// With x = a of activations, dy and a weight W [out, in], row-major:
///   y = x W^T        multiply24(y, x along features, W.transpose(0, 1))
///   dx = dy W        multiply24(dx, dy along features, W)
///   dW = dy^T x      multiply24(dW, dy along tokens, x), or
///                    multiply24(dW.transpose(0, 1), x along tokens, dy)
/// and with a 2:4 weight W along features (y) or along tokens (dx):
///   y^T = W x^T      multiply24(y.transpose(0, 1), W, x.transpose(0, 1), {.bias = [out, 1]})
///
/// On a GPU the variants are
///   wgmma         sm_90, bf16 and f16: sparse tensor cores
///   decompressed  every GPU and dtype: A is made dense in scratch memory and multiplied as such
/// There is no gradient.
void multiply24(const Tensor& d, const Sparse24& a, const Tensor& b, const Multiply24Options& options = {},
                Site site = Site::here());
/// The variant that multiply24 takes ("cpu" on the CPU). Throws if none can run it.
std::string multiply24_variant(const Tensor& d, const Sparse24& a, const Tensor& b,
                               const Multiply24Options& options = {});
/// Why the sparse tensor cores cannot run it ("bf16 or f16"); empty if they can.
std::string multiply24_lacks(const Tensor& d, const Sparse24& a, const Tensor& b);

}  // namespace tessera::ops
