#include <algorithm>
#include <limits>

#include "ops/gemm/gemm.h"
#include "ops/sparse24/multiply24_internal.h"
#include "ops/sum_dtype.h"
#include "runtime/call_site.h"
#include "runtime/has_cuda.h"
#include "tensor/kernels.h"

/// The GEMM of a 2:4 matrix: checks, the choice of a variant, and the GEMM of the decompressed matrix, which
/// is also the CPU's.

namespace tessera::ops {
namespace {

/// A itself, dense, as a view of x.
Tensor dense_operand(const Sparse24& a) {
  const Tensor x = masked24({}, a);
  return a.along == Along24::features ? x : x.transpose(0, 1);
}

void run_decompressed(const Multiply24Call& call) {
  const auto& [d, sparse, b, options] = call;
  const PassVariant pass("multiply24", d);
  const Tensor a = dense_operand(sparse);
  const bool transposed = !writable(d), along_m = options.bias.defined() && options.bias.rank() == 2;
  const auto view = [&](const Tensor& x) { return x.defined() && transposed ? x.transpose(0, 1) : x; };
  if (!options.bias.defined() || transposed == along_m) {
    const Tensor bias = along_m ? options.bias.reshape({d.size(0)}) : options.bias;
    multiply(view(d), transposed ? b.transpose(0, 1) : a, transposed ? a.transpose(0, 1) : b,
             {.alpha = options.alpha,
              .accumulate = options.accumulate,
              .bias = bias,
              .residual = view(options.residual)});
    return;
  }
  // multiply() knows a bias along d's dense side alone: the others are added to a wider sum.
  const Tensor sum = Tensor::empty(d.shape(), sum_dtype(d.dtype()), d.device());
  if (d.device().is_cpu() && sum.dtype() != a.dtype())
    multiply(sum, a.to(sum.dtype()), b.to(sum.dtype()), {.alpha = options.alpha});
  else
    multiply(sum, a, b, {.alpha = options.alpha});
  tessera::accumulate(sum, options.bias.expand(d.shape()));
  if (options.residual.defined()) tessera::accumulate(sum, options.residual);
  d.copy_from(sum);
}

Reason lacks_sm90(const Described24& problem, const Gpu& gpu) {
  const SparseGemm24& g = problem.gemm;
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() / 2;
  if (gpu.major != 9) return "a GPU of compute capability 9.0";
  if (size_of(g.dtype) != 2) return "bf16 or f16";
  if (std::min({g.m, g.n, g.k}) == 0) return "a product that is not empty";
  if (std::max({g.m, g.n, g.k}) > kMost) return "extents of at most 2^30";
  return problem.lacks;
}

void run_sm90(const Multiply24Call& call) {
  if constexpr (kCuda) {
    const SparseGemm24 gemm = describe24(call).gemm;
    const Device device = call.d.device();
    const int tile = choose24(gemm, Gpu(device)).tile;
    // The kernels add to d what lies as d does.
    if (call.options.residual.defined()) call.d.copy_from(call.options.residual);
    if (gemm.dtype == DType::bf16)
      multiply24_sm90<bf16>(gemm, tile, device);
    else
      multiply24_sm90<f16>(gemm, tile, device);
  }
}

/// Variants of the dense GEMM that can be forced; its "wgmma" would hide that the sparse kernel did not run.
constexpr const char* kDenseParts[] = {"cublas", "cublas padded", "narrow", nullptr};

constexpr Variant<Described24, void(const Multiply24Call&)> kVariants[] = {
    {"wgmma", lacks_sm90,
     [](const Described24& problem, const Gpu& gpu) -> Estimate {
       return {choose24(problem.gemm, gpu).seconds};
     },
     run_sm90},
    {"decompressed", lacks_nothing<Described24>,
     [](const Described24& problem, const Gpu& gpu) -> Estimate {
       if (!lacks_sm90(problem, gpu).empty()) return Estimate::otherwise();
       return {decompressed24_seconds(problem.gemm, gpu)};
     },
     run_decompressed, kDenseParts}};

void check_call(const Multiply24Call& call) {
  const auto& [d, a, b, options] = call;
  constexpr const char* kOp = "multiply24";
  validate(a, kOp);
  const DType dtype = a.dtype();
  check(b.defined() && b.rank() == 2 && b.dtype() == dtype && b.device() == a.device() && b.size(0) == a.k(),
        kOp, ": b is ", b.defined() ? text_of(describe(b)) : "undefined", "; expected ", dtype, "[", a.k(),
        ", n] on ", a.device().name(), ", as the 2:4 matrix is [", a.m(), ", ", a.k(), "]");
  const Shape shape{a.m(), b.size(1)};
  check(d.defined() && d.shape() == shape && d.device() == a.device() &&
            (d.dtype() == dtype || (size_of(dtype) == 2 && d.dtype() == DType::f32)),
        kOp, ": d is ", d.defined() ? text_of(describe(d)) : "undefined", "; expected ", dtype,
        size_of(dtype) == 2 ? " or f32 " : " ", shape, " on ", a.device().name());
  check(d.count() == 0 || writable(d) || writable(d.transpose(0, 1)), kOp, ": d ", describe(d),
        " has neither dense rows nor dense columns");
  if (const Tensor& bias = options.bias; bias.defined()) {
    check(!options.accumulate, kOp, ": a bias and accumulate do not go together");
    check((bias.shape() == Shape{shape[1]} || bias.shape() == Shape{shape[0], 1}) && bias.dtype() == dtype &&
              bias.device() == a.device(),
          kOp, ": bias is ", describe(bias), "; expected ", dtype, "[", shape[1], "] or [", shape[0],
          ", 1] on ", a.device().name());
  }
  if (const Tensor& residual = options.residual; residual.defined()) {
    check(!options.accumulate, kOp, ": a residual and accumulate do not go together");
    check(residual.shape() == shape && residual.dtype() == d.dtype() && residual.device() == a.device(), kOp,
          ": residual is ", describe(residual), "; expected ", d.dtype(), shape, " on ", a.device().name());
  }
}

Multiply24Call checked(const Tensor& d, const Sparse24& a, const Tensor& b,
                       const Multiply24Options& options) {
  check_call({d, a, b, options});
  Multiply24Call call{d.detach(), a, b.detach(), options};
  call.options.bias = options.bias.defined() ? options.bias.detach() : options.bias;
  call.options.residual = options.residual.defined() ? options.residual.detach() : options.residual;
  return call;
}

}  // namespace

std::string describe_problem(const Described24& problem) {
  const SparseGemm24& g = problem.gemm;
  return text_of("a 2:4 matrix ", g.dtype, "[", g.m, ", ", g.k, "] times [", g.k, ", ", g.n, "]");
}

std::vector<std::string> multiply24_variants() {
  std::vector<std::string> names = names_of(kVariants);
  for (const char* const* name = kDenseParts; *name; ++name) names.emplace_back(*name);
  return names;
}

void multiply24(const Tensor& d, const Sparse24& a, const Tensor& b, const Multiply24Options& options,
                Site site) {
  const CallScope scope(site);
  const Multiply24Call call = checked(d, a, b, options);
  const auto launch = d.device().is_cpu()
                          ? run_decompressed
                          : choose("multiply24", kVariants, describe24(call), Gpu(d.device())).launch;
  if (d.count() == 0) return;
  launch(call);
  d.bump_version();
}

std::string multiply24_lacks(const Tensor& d, const Sparse24& a, const Tensor& b) {
  const Multiply24Call call = checked(d, a, b, {});
  if (d.device().is_cpu()) return "a GPU of compute capability 9.0";
  return lacks_sm90(describe24(call), Gpu(d.device())).str();
}

std::string multiply24_variant(const Tensor& d, const Sparse24& a, const Tensor& b,
                               const Multiply24Options& options) {
  const Multiply24Call call = checked(d, a, b, options);
  if (d.device().is_cpu()) return "cpu";
  return choose("multiply24", kVariants, describe24(call), Gpu(d.device())).name;
}

}  // namespace tessera::ops
