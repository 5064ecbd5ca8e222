#include "ops/mlp/linear_activation24.h"

#include <limits>
#include <vector>

#include "ops/gemm/gemm.h"
#include "ops/gemm/gemm_fused_internal.h"
#include "ops/linear/linear_activation_kernels.h"
#include "ops/linear/linear_kernels.h"
#include "ops/mlp/linear_activation24_kernels.h"
#include "ops/mlp/move_columns.h"
#include "ops/sparse24/sparse24_kernels.h"
#include "runtime/call_site.h"
#include "runtime/has_cuda.h"
#include "tensor/pads.h"

namespace tessera::ops {
namespace {

int64_t columns_of(const LinearActivation24Call& call) {
  return call.columns.defined() ? call.columns.count() : 0;
}

LinearActivation24 run_separate(const LinearActivation24Call& call) {
  const Tensor& x = call.x;
  const int64_t hidden = call.weight.size(0);
  LinearActivation24 made{{}, Tensor::empty_packed({hidden}, DType::i32, x.device()), {}};
  const Tensor a = as_scratch(Tensor::empty({x.size(0), hidden}, x.dtype(), x.device()));
  linear_activation_forward(a, made.counts, x, call.weight, call.bias, call.kind);
  if (call.columns.defined()) {
    made.dense = as_scratch(Tensor::empty({x.size(0), columns_of(call)}, x.dtype(), x.device()));
    take_columns(made.dense, a, call.columns, true);
  }
  made.kept = compress24(a, Along24::features);
  return made;
}

Reason epilogue_lacks(const LinearActivation24Call& call, const Gpu& gpu) {
  return linear_activation24_epilogue_lacks(call.x, call.weight, gpu);
}

LinearActivation24 run_epilogue(const LinearActivation24Call& call) {
  const Tensor& x = call.x;
  const int64_t hidden = call.weight.size(0);
  LinearActivation24 made{Sparse24::empty(x.size(0), hidden, Along24::features, x.dtype(), x.device()),
                          Tensor::empty_packed({hidden}, DType::i32, x.device()),
                          {}};
  made.counts.fill(0);
  if constexpr (kCuda) {
    Tensor slots;
    if (call.columns.defined()) {
      made.dense = as_scratch(Tensor::empty({x.size(0), columns_of(call)}, x.dtype(), x.device()));
      slots = Tensor::empty_packed({hidden}, DType::i32, x.device());
      column_slots_cuda(slots, call.columns);
    }
    if (x.dtype() == DType::bf16)
      linear_activation24_sm90<bf16>(made, call, slots);
    else
      linear_activation24_sm90<f16>(made, call, slots);
  }
  return made;
}

/// On the CPU alone: a GPU cannot report it without making the host wait.
void check_columns(const char* op, const Tensor& columns, int64_t hidden) {
  if (!columns.defined() || !columns.device().is_cpu()) return;
  std::vector<bool> seen(size_t(hidden), false);
  for (int64_t n = 0; n < columns.count(); ++n) {
    const int64_t column = columns.data<int32_t>()[n];
    check(0 <= column && column < hidden && !seen[size_t(column)], op, ": column ", column, " at position ",
          n, " of columns ", 0 <= column && column < hidden ? "is named twice" : "is outside the matrix",
          "; expected columns 0 to ", hidden - 1, ", each at most once");
    seen[size_t(column)] = true;
  }
}

/// One H100, bf16, T = 16,384: 4.25 ms next to 4.28 at 4096 -> 16384, 1.82 next to 1.24 at 2048 -> 8192.
Estimate estimate_epilogue(const LinearActivation24Call&, const Gpu&) {
  return Estimate::slower();
}

using Run = LinearActivation24(const LinearActivation24Call&);
constexpr Variant<LinearActivation24Call, Run> kVariants[] = {
    {"epilogue", epilogue_lacks, estimate_epilogue, run_epilogue},
    {"separate", lacks_nothing<LinearActivation24Call>, is_otherwise<LinearActivation24Call>, run_separate}};

}  // namespace

Reason linear_activation24_epilogue_lacks(const Tensor& x, const Tensor& weight, const Gpu& gpu) {
  if (gpu.major != 9) return "a GPU of compute capability 9.0";
  if (size_of(x.dtype()) != 2) return "bf16 or f16";
  if (!is_tma_readable(x) || !is_tma_readable(weight)) return "operands that TMA can read";
  if (gpu.multiprocessors < 2) return "two SMs, for clusters of two blocks";
  return {};
}

std::string describe_problem(const LinearActivation24Call& call) {
  return text_of("a 2:4 GEMM with ", name_of(call.kind), " of ", describe(call.x), " and ",
                 describe(call.weight));
}

std::vector<std::string> linear_activation24_variants() {
  return names_of(kVariants);
}

LinearActivation24 linear_activation24(const Tensor& x, const Tensor& weight, Activation kind,
                                       const Tensor& bias, const Tensor& columns, Site site) {
  const CallScope call(site);
  constexpr const char* kOp = "linear_activation24";
  check(kind == Activation::relu || kind == Activation::relu_squared, kOp, ": the activation is ",
        name_of(kind), "; expected relu or relu_squared");
  check_operand(kOp, "x", x, x);
  check(x.rank() == 2, kOp, ": x is ", describe(x), "; expected a matrix [T, D]");
  check_linear(kOp, "weight", x, x.size(-1), weight, bias);
  if (columns.defined())
    check(columns.dtype() == DType::i32 && columns.rank() == 1 && columns.count() <= weight.size(0) &&
              columns.device() == x.device(),
          kOp, ": columns are ", describe(columns), "; expected at most ", weight.size(0),
          " indices, i32 on ", x.device().name());
  check(x.size(0) <= std::numeric_limits<int32_t>::max(), kOp, ": x ", x.shape(), " has ", x.size(0),
        " rows; at most 2^31 - 1 can be counted");
  const LinearActivation24Call problem{x.detach(), weight.detach(), bias.detach(),
                                       columns.defined() ? columns.detach().packed() : Tensor(), kind};
  check_columns(kOp, problem.columns, weight.size(0));
  if (x.device().is_cpu()) return run_separate(problem);
  return choose(kOp, kVariants, problem, Gpu(x.device())).launch(problem);
}

}  // namespace tessera::ops
