#include "ops/grouped_mlp/grouped_mlp.h"

#include <algorithm>

#include "autograd/tape.h"
#include "ops/activation/activation_internal.h"
#include "ops/gemm/gemm.h"
#include "ops/gemm/gemm_padding.h"
#include "ops/grouped_linear/grouped_linear_kernels.h"
#include "ops/grouped_mlp/grouped_mlp_kernels.h"
#include "ops/linear/linear_kernels.h"
#include "ops/mlp/mlp_kernels.h"
#include "ops/variant.h"
#include "runtime/has_cuda.h"
#include "tensor/pads.h"

namespace tessera::ops {
namespace {

constexpr const char* kName = "grouped_mlp";

void check_operands(const Tensor& x, const Tensor& up, const Tensor& down) {
  check_operand(kName, "x", x, x);
  check_operand(kName, "up", up, x);
  check_operand(kName, "down", down, x);
  check(x.rank() >= 1, kName, ": x is a scalar; expected [..., D]");
  check(up.rank() == 3 && up.size(2) == x.size(-1), kName, ": up ", up.shape(), " does not match x ",
        x.shape(), "; expected [K, F, ", x.size(-1), "]");
  check(down.rank() == 3 && down.size(0) == up.size(0) && down.size(2) == up.size(1), kName, ": down ",
        down.shape(), " does not match up ", up.shape(), "; expected [", up.size(0), ", E, ", up.size(1),
        "]");
}

/// h [rows, K, F] = x up^T
Tensor hidden_rows(const Tensor& x, const Tensor& up) {
  const Tensor rows = by_group(x, true);
  const Tensor h = as_scratch(Tensor::empty({rows.size(0), up.size(0), up.size(1)}, x.dtype(), x.device()));
  multiply(by_group(h, false), rows, up.transpose(1, 2));
  return h;
}

/// up with rows of zeros up to `wide`.
Tensor lengthened(const Tensor& up, int64_t wide) {
  if (up.size(1) == wide) return up;
  const Tensor longer = Tensor::empty(up.shape().with(1, wide), up.dtype(), up.device());
  if constexpr (kCuda) padded_copy_cuda(longer, up);
  return longer;
}

/// Hidden rows on a GPU whose row padding is columns, [rows, K, row_pitch(F)]: the hidden rows of all groups,
/// one after the other, are a row of one matrix, and `up` [K, row_pitch(F), D], lengthened, its one weight.
Tensor joined_rows(const Tensor& x, const Tensor& up) {
  return Tensor::empty({x.size(0), up.size(0), row_pitch(up.size(1), x.dtype())}, x.dtype(), x.device());
}
Tensor joined_matrix(const Tensor& rows) {
  return rows.reshape({rows.size(0), rows.size(1) * rows.size(2)});
}
Tensor joined_weight(const Tensor& up) {
  return up.reshaped({up.size(0) * up.size(1), up.size(2)});
}

/// Whether GEMMs of these operands have epilogues for an activation at all: asked before memory is allocated.
bool may_have_epilogues(const Tensor& x, const Tensor& up, Activation kind) {
  return x.device().is_cuda() && Gpu(x.device()).major == 9 && size_of(x.dtype()) == 2 &&
         kind != Activation::none && x.count() > 0 && up.count() > 0;
}

/// Operands of grouped_mlp, x as rows.
struct Call {
  const Tensor &x, &up, &down;
};

std::string describe_problem(const Call& call) {
  return text_of("x ", describe(call.x), ", up ", describe(call.up), " and down ", describe(call.down));
}

/// How it runs on a GPU, forward and backward.
constexpr Variant<Call, void()> kVariants[] = {
    {"wgmma",
     [](const Call& call, const Gpu& gpu) -> Reason {
       return grouped_mlp_wgmma_needs(call.x, call.up, call.down, gpu);
     },
     is_preferred<Call>, nullptr},
    {"separate", lacks_nothing<Call>, is_otherwise<Call>, nullptr}};

bool runs_fused(const Tensor& x, const Tensor& up, const Tensor& down) {
  return x.device().is_cuda() && grouped_mlp_variant(x, up, down, Gpu(x.device())) == "wgmma";
}

void up_gradient(Backward& b, const Tensor& dh_rows, const Tensor& x, const Tensor& up) {
  multiply_gradient(b, 1, up, GradientDType::f32, by_group(dh_rows, false).transpose(1, 2),
                    by_group(x, true));
}

void backward_fused(Backward& b, const Tensor& x, const Tensor& up, const Tensor& down, Activation kind) {
  if constexpr (kCuda) {
    const Tensor rows = by_group(x, true), dy = flatten_leading(b.grad(), 2);
    // What would be pads are columns of zeros: the rows of all heads, one after the other, are a row of one
    // product.
    const int64_t wide = row_pitch(up.size(1), x.dtype());
    const Tensor dh = Tensor::empty({rows.size(0), up.size(0), wide}, x.dtype(), x.device());
    const int64_t launch_rows = grouped_mlp_launch_rows(up.size(0));
    {
      const Tensor parts = Tensor::empty_packed(
          {grouped_mlp_gradient_splits(rows, up, launch_rows), down.size(0), down.size(1), down.size(2)},
          DType::f32, x.device());
      grouped_mlp_hidden_gradient_cuda(dh, parts, dy, rows, up, down, kind, launch_rows);
      if (b.needs(2))
        b.give(2, column_sums(parts.reshape({parts.size(0), down.count()})).reshape(down.shape()));
    }
    if (b.needs(0))
      b.give(0, grouped_input_gradient(x.shape(), by_group(dh, false), lengthened(up, wide), true));
    if (b.needs(1)) up_gradient(b, dh.slice(2, 0, up.size(1)), x, up);
  }
}

/// Variant "separate" with the slope in the epilogue of da = dy down, and f(h) next to it. Returns false, and
/// has done nothing, where mlp would not do so either.
bool backward_in_epilogue(Backward& b, const Tensor& h, const Tensor& x, const Tensor& up, const Tensor& down,
                          Activation kind) {
  if (!may_have_epilogues(x, up, kind) || !(b.needs(0) || b.needs(1))) return false;
  const Tensor rows = by_group(x, true), dy = by_group(b.grad(), false), groups_h = by_group(h, false);
  const int64_t hidden = up.size(1);
  Tensor dh = joined_rows(rows, up), a = b.needs(2) ? Tensor::empty_like(dh) : Tensor();
  const Tensor groups_dh = by_group(dh, false), groups_a = a.defined() ? by_group(a, false) : a;
  if (!fuses_down_gradient(groups_dh, groups_a, dy, down, groups_h, kind, Gpu(x.device()))) return false;
  fused_down_gradient(groups_dh, groups_a, dy, down, groups_h, kind);
  if (b.needs(2))
    multiply_gradient(b, 2, down, GradientDType::f32, dy.transpose(1, 2),
                      by_group(a.slice(2, 0, hidden), false));
  a = Tensor();
  if (b.needs(0)) b.give(0, grouped_input_gradient(x.shape(), groups_dh, lengthened(up, dh.size(2)), true));
  if (b.needs(1)) up_gradient(b, dh.slice(2, 0, hidden), x, up);
  return true;
}

void backward_separate(Backward& b, const Tensor& h, const Tensor& x, const Tensor& up, const Tensor& down,
                       Activation kind) {
  if (backward_in_epilogue(b, h, x, up, down, kind)) return;
  const Tensor dy = by_group(b.grad(), false);  // [K, rows, E]
  if (b.needs(2)) {
    const Tensor a = as_scratch(Tensor::empty_like(h));
    activation_forward(a, h, kind);
    multiply_gradient(b, 2, down, GradientDType::f32, dy.transpose(1, 2), by_group(a, false));
  }
  if (!b.needs(0) && !b.needs(1)) return;
  const Tensor da = as_scratch(Tensor::empty_like(h));
  multiply(by_group(da, false), dy, down);
  activation_backward(da, da, h, kind);
  if (b.needs(0)) b.give(0, grouped_input_gradient(x.shape(), by_group(da, false), up, true));
  if (b.needs(1)) up_gradient(b, da, x, up);
}

/// h = x up^T, only if it is kept, and a = f(h), [rows, K, F].
struct Hidden {
  Tensor h, a;
};

/// With f in the GEMM's epilogue; undefined where mlp would not do so either.
Hidden hidden_in_epilogue(const Tensor& x, const Tensor& up, Activation kind, bool keeps_h) {
  if (!may_have_epilogues(x, up, kind)) return {};
  const Tensor a = joined_rows(x, up), h = keeps_h ? Tensor::empty_like(a) : Tensor();
  const Tensor of_a = joined_matrix(a), of_h = keeps_h ? joined_matrix(h) : h;
  const Tensor weight = joined_weight(lengthened(up, a.size(2)));
  if (!fuses_up(of_a, of_h, x, weight, kind, Gpu(x.device()))) return {};
  fused_up(of_a, of_h, x, weight, {}, kind);
  const int64_t hidden = up.size(1);
  return {keeps_h ? h.slice(2, 0, hidden) : h, a.slice(2, 0, hidden)};
}

/// y [rows, K, E]; returns the hidden rows if they are to be kept, by variant "separate".
Tensor forward(const Tensor& y, const Tensor& x, const Tensor& up, const Tensor& down, Activation kind,
               bool keeps_h) {
  const Tensor rows = by_group(x, true);
  if (runs_fused(rows, up, down)) {
    if constexpr (kCuda)
      grouped_mlp_forward_cuda(y, rows, up, down, kind, grouped_mlp_launch_rows(up.size(0)));
    return {};
  }
  Hidden hidden = hidden_in_epilogue(rows, up, kind, keeps_h);
  if (!hidden.a.defined()) {
    hidden.h = hidden_rows(x, up);
    hidden.a = keeps_h ? as_scratch(Tensor::empty_like(hidden.h)) : hidden.h;
    activation_forward(hidden.a, hidden.h, kind);
  }
  multiply(by_group(y, false), by_group(hidden.a, false), down.transpose(1, 2));
  return keeps_h ? hidden.h : Tensor();
}

}  // namespace

int64_t grouped_mlp_launch_rows(int64_t groups) {
  constexpr int64_t kMost = int64_t{1} << 30, kTileRows = 128, kMostSplits = 16;
  return std::clamp<int64_t>(kMost / (groups * kMostSplits), 1, kMost / kTileRows) * kTileRows;
}

std::vector<std::string> grouped_mlp_variants() {
  return names_of(kVariants);
}

std::string_view grouped_mlp_variant(const Tensor& x, const Tensor& up, const Tensor& down, const Gpu& gpu) {
  return choose(kName, kVariants, Call{x, up, down}, gpu).name;
}

std::string grouped_mlp_wgmma_needs(const Tensor& x, const Tensor& up, const Tensor& down, const Gpu& gpu) {
  const auto aligned = [](const Tensor& t) {
    bool fits = t.layout().stride(-1) == 1 && reinterpret_cast<uintptr_t>(t.raw()) % 16 == 0;
    for (int dim = 0; dim + 1 < t.rank(); ++dim)
      fits = fits && (t.size(dim) == 1 || t.layout().stride(dim) % 8 == 0);
    fits = fits && (t.size(-2) == 1 || t.layout().stride(-2) >= t.size(-1));
    return fits;
  };
  MessageStream needs;
  if (gpu.major != 9)
    needs << "compute capability 9.0; " << gpu.name << " has " << gpu.major << "." << gpu.minor;
  else if (x.dtype() != DType::bf16 && x.dtype() != DType::f16)
    needs << "bf16 or f16; got " << x.dtype();
  else if (x.count() == 0 || up.count() == 0 || down.count() == 0)
    needs << "at least one element in each operand";
  else if (x.size(1) > 512 || down.size(1) > 3 || up.size(1) < 8)
    needs << "D up to 512, E up to 3 and F of 8 or more; got " << x.size(1) << ", " << down.size(1) << " and "
          << up.size(1);
  else if (up.size(0) > kMostMlpGroups)
    needs << "at most " << kMostMlpGroups << " groups; got " << up.size(0);
  else if (!aligned(x) || !aligned(up) || down.layout().stride(-1) != 1)
    needs << "dense rows on 16-byte boundaries; x is " << describe(x) << ", up " << describe(up);
  return needs.str();
}

Tensor grouped_mlp(const Tensor& x, const Tensor& up, const Tensor& down, Activation kind, Site site) {
  const CallScope call(site);
  check_operands(x, up, down);
  const Shape rows = x.shape().without(-1);
  Tensor y = Tensor::empty(rows.inserted(rows.rank(), up.size(0)).inserted(rows.rank() + 1, down.size(1)),
                           x.dtype(), x.device());
  Tape* const tape = Tape::recording(x, up, down);
  const Tensor h =
      forward(flatten_leading(y, 2), x.detach(), up.detach(), down.detach(), kind, tape != nullptr);
  if (tape)
    tape->record(kName, {&x, &up, &down}, {&y},
                 [x = Saved(x), up = Saved(up), down = Saved(down), h = h.defined() ? Saved(h) : Saved(),
                  kind](Backward& b) {
                   if (h.defined())
                     backward_separate(b, h.get(), x.get(), up.get(), down.get(), kind);
                   else
                     backward_fused(b, x.get(), up.get(), down.get(), kind);
                 });
  return y;
}

}  // namespace tessera::ops
