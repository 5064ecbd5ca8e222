#include "ops/obs_columns/obs_columns.h"

#include "ops/obs_columns/obs_columns_kernels.h"
#include "runtime/call_site.h"
#include "runtime/has_cuda.h"

namespace tessera::ops {
namespace {

void check_grid(const RoundingGrid& grid, const Tensor& weight) {
  if (!grid.scale.defined()) return;
  check(grid.levels >= 2, "obs_columns: a grid of ", grid.levels, " levels; expected 2 or more");
  for (const Tensor* part : {&grid.scale, &grid.zero})
    check(part->defined() && part->rank() == 1 && part->size(0) == weight.size(0) &&
              part->dtype() == weight.dtype() && part->device() == weight.device(),
          "obs_columns: the grid's scale and zero; expected ", weight.dtype(), " [", weight.size(0), "] on ",
          weight.device().name());
}

}  // namespace

ObsBlock obs_columns(const Tensor& weight, const Tensor& factor, const ObsColumns& how, Site site) {
  const CallScope call(site);
  check(weight.defined() && factor.defined(), "obs_columns: weight or factor is undefined");
  const Device device = weight.device();
  check(weight.rank() == 2 &&
            (weight.dtype() == DType::f32 || (weight.dtype() == DType::f64 && device.is_cpu())),
        "obs_columns: weight is ", describe(weight), "; expected f32 (f64 on the CPU) [rows, columns]");
  const int64_t columns = weight.size(1);
  check(factor.rank() == 2 && factor.size(0) == columns && factor.size(1) == columns &&
            factor.dtype() == weight.dtype() && factor.device() == device,
        "obs_columns: factor is ", describe(factor), "; expected ", weight.dtype(), " [", columns, ", ",
        columns, "] on ", device.name());
  check(device.is_cpu() || columns <= kMostObsColumns, "obs_columns: ", columns,
        " columns; expected at most ", kMostObsColumns, " on a GPU: do fewer at a time");
  if (how.keep.defined())
    check(how.keep.dtype() == DType::u8 && how.keep.shape() == weight.shape() && how.keep.device() == device,
          "obs_columns: keep is ", describe(how.keep), "; expected u8 of the weight's shape on ",
          device.name());
  else
    check(how.group >= 1 && columns % how.group == 0 && 0 <= how.zeros && how.zeros <= how.group,
          "obs_columns: ", how.zeros, " zeros in groups of ", how.group, " of ", columns,
          " columns; expected keep, or a group that divides the columns");
  check_grid(how.grid, weight);
  ObsBlock result{weight.detach().clone().packed(),
                  Tensor::empty_packed(weight.shape(), weight.dtype(), device)};
  ObsColumns packed = how;
  if (how.keep.defined()) packed.keep = how.keep.packed();
  if (how.grid.scale.defined())
    packed.grid = {how.grid.scale.packed(), how.grid.zero.packed(), how.grid.levels};
  if (weight.count() == 0) return result;
  if (device.is_cpu()) {
    obs_columns_cpu(result, factor.detach().packed(), packed);
  } else if constexpr (kCuda) {
    obs_columns_cuda(result, factor.detach().packed(), packed);
  }
  return result;
}

}  // namespace tessera::ops
