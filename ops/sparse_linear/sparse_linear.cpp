#include "ops/sparse_linear/sparse_linear.h"

#include "autograd/tape.h"
#include "ops/gemm/gemm.h"
#include "ops/sparse_linear/joint_plan.h"
#include "ops/sparse_linear/sparse_linear_kernels.h"
#include "ops/swiglu/swiglu.h"
#include "runtime/has_cuda.h"
#include "runtime/integers.h"

namespace tessera::ops {
namespace {

/// What the choice of a variant depends on.
struct SparseProblem {
  SparseFormat format;
  DType dtype;
  int64_t tokens, out, in;
  int64_t tiles;   // of 256 outputs, each part rounded up
  double density;  // values in memory per element
};

std::string describe_problem(const SparseProblem& p) {
  return text_of(p.tokens, " tokens and a ", name_of(p.format), " weight ", p.dtype, "[", p.out, ", ", p.in,
                 "]");
}

Reason lacks_common(const SparseProblem& p, const Gpu& gpu) {
  if (size_of(p.dtype) != 2) return "bf16 or f16";
  if (gpu.major < 9) return "compute capability 9.0";
  return {};
}

/// Dense columns need nothing decompressed: their gate and GEMM run in every dtype, everywhere.
Reason lacks_gemm(const SparseProblem& p, const Gpu& gpu) {
  return p.format == SparseFormat::dense_columns ? Reason() : lacks_common(p, gpu);
}

Reason lacks_format(const SparseProblem& p, const Gpu& gpu, SparseFormat format, int64_t most) {
  if (p.format != format) return text_of("a ", name_of(format), " weight");
  if (p.tokens > most) return text_of("at most ", most, " tokens");
  return lacks_common(p, gpu);
}

Reason lacks_columns_plan(const SparseProblem& p, const Gpu& gpu, bool swiglu) {
  const Reason lacks = lacks_format(p, gpu, SparseFormat::dense_columns, kColumnTokens);
  if (!lacks.empty()) return lacks;
  return sparse::plan_columns(p.tiles, p.in, p.tokens, swiglu, gpu.multiprocessors).lacks;
}
Reason lacks_sell_plan(const SparseProblem& p, const Gpu& gpu, bool swiglu) {
  const Reason lacks = lacks_format(p, gpu, SparseFormat::sell_delta4, kSellTokens);
  if (!lacks.empty()) return lacks;
  return sparse::plan_sell(p.tiles, p.in, p.tokens, swiglu, gpu.multiprocessors).lacks;
}

Reason lacks_wgmma(const SparseProblem& p, int64_t windows, const Gpu& gpu) {
  const Reason lacks = lacks_format(p, gpu, SparseFormat::sell_delta4, sparse::kSellWgmmaTokens);
  return lacks.empty() ? sparse::plan_sell_wgmma(windows, p.in, p.tokens, gpu.multiprocessors).lacks : lacks;
}

Reason lacks_mma(const SparseProblem& p, int64_t windows, const Gpu& gpu) {
  const Reason lacks = lacks_format(p, gpu, SparseFormat::mma_delta4, sparse::kMmaTokens);
  return lacks.empty() ? sparse::plan_mma(windows, p.in, p.tokens, gpu.multiprocessors).lacks : lacks;
}

// The kernels that take all parts in one launch are preferred: a token of a 7B model takes 0.86 to 0.88 of
// the time with them (one H100; docs/ops/sparse_linear.md).

/// With more tokens than these the loads of x bound "sell_joint", and tensor cores are faster, unless next to
/// nothing is stored (docs/ops/sparse_linear.md).
constexpr int64_t kFewTokens = 4;
constexpr double kLowDensity = 0.2;
const SparseProblem& sparse_problem(const SparseProblem& p) {
  return p;
}
template <class Call>
const SparseProblem& sparse_problem(const Call& call) {
  return call.problem;
}
template <class Problem>
Estimate few_tokens_estimate(const Problem& p, const Gpu&) {
  const SparseProblem& problem = sparse_problem(p);
  return problem.tokens <= kFewTokens || problem.density < kLowDensity ? Estimate::preferred()
                                                                       : Estimate::otherwise();
}

void run_gemm(const SparseCall& call);

constexpr Variant<SparseProblem, void(const SparseCall&)> kVariants[] = {
    {"columns_joint",
     [](const SparseProblem& p, const Gpu& gpu) { return lacks_columns_plan(p, gpu, false); },
     is_preferred<SparseProblem>,
     [](const SparseCall& call) {
       if constexpr (kCuda) sparse_columns_joint_cuda(call);
     }},
    {"sell_joint", [](const SparseProblem& p, const Gpu& gpu) { return lacks_sell_plan(p, gpu, false); },
     few_tokens_estimate<SparseProblem>,
     [](const SparseCall& call) {
       if constexpr (kCuda) sparse_sell_joint_cuda(call);
     }},
    {"columns",
     [](const SparseProblem& p, const Gpu& gpu) {
       return lacks_format(p, gpu, SparseFormat::dense_columns, kColumnTokens);
     },
     is_preferred<SparseProblem>,
     [](const SparseCall& call) {
       if constexpr (kCuda) for_each_part(call, sparse_columns_cuda);
     }},
    {"tiles",
     [](const SparseProblem& p, const Gpu& gpu) {
       return lacks_format(p, gpu, SparseFormat::tiled_cbc, kColumnTokens);
     },
     is_preferred<SparseProblem>,
     [](const SparseCall& call) {
       if constexpr (kCuda) for_each_part(call, sparse_tiles_cuda);
     }},
    {"bitmap",
     [](const SparseProblem& p, const Gpu& gpu) {
       return lacks_format(p, gpu, SparseFormat::tca_bme, kBitmapTokens);
     },
     is_preferred<SparseProblem>,
     [](const SparseCall& call) {
       if constexpr (kCuda) for_each_part(call, sparse_bitmap_cuda);
     }},
    {"sell_wgmma", [](const SparseProblem& p, const Gpu& gpu) { return lacks_wgmma(p, p.tiles, gpu); },
     is_preferred<SparseProblem>,
     [](const SparseCall& call) {
       if constexpr (kCuda) sparse_sell_wgmma_cuda(call);
     }},
    {"mma", [](const SparseProblem& p, const Gpu& gpu) { return lacks_mma(p, p.tiles, gpu); },
     is_preferred<SparseProblem>,
     [](const SparseCall& call) {
       if constexpr (kCuda) sparse_mma_cuda(call);
     }},
    {"sell",
     [](const SparseProblem& p, const Gpu& gpu) {
       return lacks_format(p, gpu, SparseFormat::sell_delta4, kSellTokens);
     },
     is_preferred<SparseProblem>,
     [](const SparseCall& call) {
       if constexpr (kCuda) for_each_part(call, sparse_sell_cuda);
     }},
    {"gemm", lacks_gemm, is_otherwise<SparseProblem>, run_gemm, kGemmVariants}};

int64_t tiles_of(int64_t out) {
  return ceil_div(out, sparse::kTileRows);
}

SparseProblem problem_of(const SparseWeight& weight, int64_t tokens) {
  const double elements = double(std::max<int64_t>(1, weight.out * weight.in));
  return {weight.format,
          weight.dtype(),
          tokens,
          weight.out,
          weight.in,
          tiles_of(weight.out),
          double(weight.values.count()) / elements};
}

/// Elements of decompressed rows that lie in memory at a time: 128 MB. Pieces of 32 MB, which the L2 holds
/// until the GEMM has read them, are slower: a GEMM of few tokens then does not fill the GPU.
constexpr int64_t kChunk = int64_t{1} << 26;

/// Applies the gate, and multiplies with rows that are decompressed for this call alone.
void multiply_decompressed(const SparsePartCall& call) {
  const SparseWeight& weight = call.weight;
  const Tensor x = call.gate.kind == Gate::Kind::none ? call.x : apply_gate(call.x, call.gate);
  const PassVariant pass("sparse_linear", call.x);
  const auto part = [](const Tensor& t, int dim, int64_t begin, int64_t end) {
    return t.defined() ? t.slice(dim, begin, end) : t;
  };
  if (weight.format == SparseFormat::dense_columns) {
    multiply(call.y, x, weight.values, {.bias = call.bias, .residual = call.residual});
    return;
  }
  const int64_t step = weight.format == SparseFormat::tca_bme ? tca_bme::kGroupRows : tiled_cbc::kGroupRows;
  static_assert(sell_delta4::kGroupRows == tiled_cbc::kGroupRows &&
                mma_delta4::kGroupRows == tiled_cbc::kGroupRows);
  const int64_t rows = std::max<int64_t>(1, kChunk / std::max<int64_t>(1, weight.in) / step) * step;
  for (int64_t first = 0; first < weight.out; first += rows) {
    const int64_t end = std::min(first + rows, weight.out);
    const Tensor dense = Tensor::empty({end - first, weight.in}, weight.dtype(), call.x.device());
    if constexpr (kCuda) decompress_cuda(dense, weight, first);
    multiply(part(call.y, 1, first, end), x, dense.transpose(0, 1),
             {.bias = part(call.bias, 0, first, end), .residual = part(call.residual, 1, first, end)});
  }
}

void run_gemm(const SparseCall& call) {
  for_each_part(call, multiply_decompressed);
}

void check_part(const char* op, const Tensor& x, const SparsePart& part, size_t index) {
  const SparseWeight& weight = part.weight;
  check(weight.values.defined(), op, ": the weight of part ", index, " is undefined");
  const DType dtype = weight.dtype();
  const bool wider = x.device().is_cpu() && (x.dtype() == DType::f64 || x.dtype() == DType::f32);
  check(dtype == x.dtype() || (wider && size_of(dtype) <= size_of(x.dtype())), op, ": x is ", describe(x),
        ", but the weight of part ", index, " is ", dtype, "; expected ", dtype,
        wider || x.device().is_cpu() ? ", f32 or f64" : "");
  check(weight.device() == x.device(), op, ": x is ", describe(x), ", but the weight of part ", index,
        " is on ", weight.device().name());
  check_sizes(op, weight.out, weight.in);
  check(weight.in == x.size(-1), op, ": the weight of part ", index, " [", weight.out, ", ", weight.in,
        "] takes ", weight.in, " features, but x has ", x.size(-1));
  part.gate.validate(text_of(op, ": part ", index), weight.in);
  check(!part.gate.scales.defined() || part.gate.scales.device() == x.device(), op,
        ": the gate's scales of part ", index, " are not on ", x.device().name());
}

void check_call(const char* op, const Tensor& x, std::span<const SparsePart> parts) {
  check(x.defined() && x.rank() >= 1, op, ": x is undefined or a scalar; expected [..., in]");
  check(!parts.empty(), op, ": there are no parts; expected one or more compressed weights");
  check(Tape::innermost() == nullptr, op,
        ": a tape is recording, and compressed weights have no backward pass; open a NoTape, or train the "
        "dense "
        "model");
  for (size_t i = 0; i < parts.size(); ++i) check_part(op, x, parts[i], i);
}

void check_vector(const char* what, const Tensor& given, const Shape& expected, const Tensor& x) {
  if (!given.defined()) return;
  check(given.dtype() == x.dtype() && given.device() == x.device() && given.shape() == expected,
        "sparse_linear: ", what, " is ", describe(given), "; expected ", x.dtype(), expected, " on ",
        x.device().name());
}

int64_t outputs_of(std::span<const SparsePart> parts) {
  int64_t out = 0;
  for (const SparsePart& part : parts) out += part.weight.out;
  return out;
}

SparseProblem problem_of(std::span<const SparsePart> launch, int64_t tokens) {
  SparseProblem problem = problem_of(launch[0].weight, tokens);
  problem.out = outputs_of(launch), problem.tiles = 0;
  for (const SparsePart& part : launch) problem.tiles += tiles_of(part.weight.out);
  return problem;
}

}  // namespace

std::span<const SparsePart> parts_of_launch(std::span<const SparsePart> parts) {
  size_t count = 0;
  for (int filled = 0; count < parts.size() && parts[count].weight.format == parts[0].weight.format; ++count)
    if (parts[count].weight.out > 0 && ++filled > sparse::kJointWeights) break;
  return parts.first(count);
}

std::string sparse_linear_variant(std::span<const SparsePart> launch, int64_t tokens, const Gpu& gpu) {
  return choose("sparse_linear", kVariants, problem_of(launch, tokens), gpu).name;
}

std::vector<std::string> sparse_linear_variants() {
  return names_of(kVariants);
}

int64_t most_sparse_tokens(SparseFormat format) {
  switch (format) {
    case SparseFormat::tca_bme:
      return kBitmapTokens;
    case SparseFormat::sell_delta4:
      return sparse::kSellWgmmaTokens;
    case SparseFormat::mma_delta4:
      return sparse::kMmaTokens;
    default:
      return kColumnTokens;
  }
}

std::string sparse_kernel_lacks(const SparseWeight& weight, int64_t tokens) {
  const int64_t most = most_sparse_tokens(weight.format);
  if (weight.device().is_cuda())
    return lacks_format(problem_of(weight, tokens), Gpu(weight.device()), weight.format, most).str();
  return tokens > most ? text_of("at most ", most, " tokens") : "";
}

std::string sparse_linear_variant(const SparseWeight& weight, int64_t tokens) {
  if (weight.device().is_cpu()) return "cpu";
  return choose("sparse_linear", kVariants, problem_of(weight, tokens), Gpu(weight.device())).name;
}

Tensor sparse_linear(const Tensor& x, std::span<const SparsePart> parts, const Tensor& bias,
                     const Tensor& residual, Site site) {
  const CallScope call(site);
  check_call("sparse_linear", x, parts);
  const int64_t out = outputs_of(parts);
  const Shape shape = x.shape().with(-1, out);
  check_vector("bias", bias, {out}, x);
  check_vector("residual", residual, shape, x);
  const Tensor y = Tensor::empty(shape, x.dtype(), x.device()), to = flatten_leading(y, 1),
               rows = flatten_leading(x.detach(), 1),
               bias_row = bias.defined() ? bias.detach().packed() : bias,
               added = residual.defined() ? flatten_leading(residual.detach(), 1) : residual;
  if (y.count() == 0) return y;
  const auto columns = [](const Tensor& all, int64_t begin, int64_t end) {
    return all.defined() ? all.slice(-1, begin, end) : all;
  };
  for (int64_t first = 0; !parts.empty();) {
    const std::span<const SparsePart> launch = parts_of_launch(parts);
    parts = parts.subspan(launch.size());
    const int64_t end = first + outputs_of(launch);
    if (first == end) continue;
    const Tensor y_part = columns(to, first, end), bias_part = columns(bias_row, first, end),
                 residual_part = columns(added, first, end);
    const SparseCall one{y_part, rows, launch, bias_part, residual_part};
    if (x.device().is_cpu())
      sparse_linear_cpu(one);
    else
      choose("sparse_linear", kVariants, problem_of(launch, rows.size(0)), Gpu(x.device())).launch(one);
    first = end;
  }
  return y;
}

Tensor sparse_linear(const Tensor& x, const SparseWeight& weight, const Gate& gate, const Tensor& bias,
                     const Tensor& residual, Site site) {
  const SparsePart part{weight, gate};
  return sparse_linear(x, std::span(&part, 1), bias, residual, site);
}

// ---- SwiGLU of two parts ----

namespace {

struct SwigluCall {
  const Tensor& x;
  std::span<const SparsePart> parts;  // gate and up
  SparseProblem problem;
};

std::string describe_problem(const SwigluCall& call) {
  return describe_problem(call.problem);
}

Reason one_format(const SwigluCall& call) {
  const bool same = call.parts[0].weight.format == call.parts[1].weight.format;
  return same ? "" : "gate and up in one format";
}

/// Runs one of the kernels that write silu(gate) up alone.
template <class Kernel>
Tensor run_together(const SwigluCall& call, Kernel&& kernel) {
  const Tensor &x = call.x, y = Tensor::empty(x.shape().with(-1, call.problem.out), x.dtype(), x.device()),
               to = flatten_leading(y, 1), rows = flatten_leading(x.detach(), 1), none;
  if (y.count() > 0) kernel(SparseCall{to, rows, call.parts, none, none});
  return y;
}

constexpr Variant<SwigluCall, Tensor(const SwigluCall&)> kSwigluVariants[] = {
    {"columns_joint",
     [](const SwigluCall& call, const Gpu& gpu) {
       Reason lacks = one_format(call);
       return lacks.empty() ? lacks_columns_plan(call.problem, gpu, true) : lacks;
     },
     is_preferred<SwigluCall>,
     [](const SwigluCall& call) {
       return run_together(call, [](const SparseCall& one) {
         if constexpr (kCuda) sparse_columns_swiglu_cuda(one);
       });
     }},
    {"sell_joint",
     [](const SwigluCall& call, const Gpu& gpu) {
       Reason lacks = one_format(call);
       return lacks.empty() ? lacks_sell_plan(call.problem, gpu, true) : lacks;
     },
     few_tokens_estimate<SwigluCall>,
     [](const SwigluCall& call) {
       return run_together(call, [](const SparseCall& one) {
         if constexpr (kCuda) sparse_sell_swiglu_cuda(one);
       });
     }},
    {"sell_wgmma",
     [](const SwigluCall& call, const Gpu& gpu) {
       const Reason lacks = one_format(call);
       return lacks.empty() ? lacks_wgmma(call.problem, 2 * call.problem.tiles, gpu) : lacks;
     },
     is_preferred<SwigluCall>,
     [](const SwigluCall& call) {
       return run_together(call, [](const SparseCall& one) {
         if constexpr (kCuda) sparse_sell_wgmma_swiglu_cuda(one);
       });
     }},
    {"mma",
     [](const SwigluCall& call, const Gpu& gpu) {
       const Reason lacks = one_format(call);
       return lacks.empty() ? lacks_mma(call.problem, 2 * call.problem.tiles, gpu) : lacks;
     },
     is_preferred<SwigluCall>,
     [](const SwigluCall& call) {
       return run_together(call, [](const SparseCall& one) {
         if constexpr (kCuda) sparse_mma_swiglu_cuda(one);
       });
     }},
    {"parts", lacks_nothing<SwigluCall>, is_otherwise<SwigluCall>,
     [](const SwigluCall& call) { return swiglu(sparse_linear(call.x, call.parts)); }}};

}  // namespace

std::vector<std::string> sparse_linear_swiglu_variants() {
  return names_of(kSwigluVariants);
}

Tensor sparse_linear_swiglu(const Tensor& x, const SparsePart& gate, const SparsePart& up, Site site) {
  const CallScope scope(site);
  const SparsePart parts[] = {gate, up};
  check_call("sparse_linear_swiglu", x, parts);
  check(gate.weight.out == up.weight.out, "sparse_linear_swiglu: gate has ", gate.weight.out,
        " outputs and up ", up.weight.out, "; expected as many");
  if (x.device().is_cpu()) return swiglu(sparse_linear(x, parts));
  const SwigluCall call{x, parts, problem_of(gate.weight, flatten_leading(x, 1).size(0))};
  return choose("sparse_linear_swiglu", kSwigluVariants, call, Gpu(x.device())).launch(call);
}

}  // namespace tessera::ops
