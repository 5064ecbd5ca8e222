#include "ops/sparse24/sparse24.h"

#include <algorithm>
#include <iterator>

#include "autograd/tape.h"
#include "ops/sparse24/sparse24_kernels.h"
#include "ops/sparse24/sparse24_math.h"
#include "runtime/has_cuda.h"
#include "runtime/integers.h"
#include "runtime/text.h"

namespace tessera::ops {

using namespace sparse24;

namespace {

constexpr const char* kAlong[] = {"features", "tokens"};
constexpr const char* kMethods[] = {"naive", "mvue", "soft_threshold", "soft_dynamic", "fast"};

Shape values_shape(const Sparse24& x) {
  return {ceil_div(x.m(), kTileRows), ceil_div(x.k(), kTileDepth), kTileValues};
}
Shape metadata_shape(const Sparse24& x) {
  return {ceil_div(x.m(), kTileRows), ceil_div(x.k(), kTileDepth), kTileWords};
}

void check_matrix(const char* op, const Tensor& x) {
  check(x.defined() && x.rank() == 2, op, ": x is ", x.defined() ? text_of(describe(x)) : "undefined",
        "; expected a matrix [tokens, features]");
  check(is_floating(x.dtype()) && x.dtype() != DType::f8e4m3, op, ": x is ", describe(x),
        "; expected f64, f32, bf16 or f16");
  check(x.device().is_cpu() || x.dtype() != DType::f64, op, ": x is ", describe(x),
        "; f64 is computed on the CPU only");
}

void check_selection(const char* op, const Selection24& selection, const Tensor& x) {
  const bool soft =
      selection.method == Method24::soft_threshold || selection.method == Method24::soft_dynamic;
  if (!soft) return;
  const Tensor& scale = selection.scale;
  check(scale.defined(), op, ": method ", name_of(selection.method),
        " has no scale; fit one with soft_scale, or take that of a DynamicScale24");
  check(scale.dtype() == DType::f32 && scale.count() == 1 && scale.device() == x.device(), op,
        ": the scale is ", describe(scale), "; expected f32 [1] on ", x.device().name());
}

Reason packed_lacks(const Compress24Call& call, const Gpu&) {
  if (size_of(call.x.dtype()) != 2) return "bf16 or f16";
  if (!call.pattern && call.selection.method != Method24::naive) return "method naive or a pattern";
  return {};
}

void run_general(const Compress24Call& call) {
  if constexpr (kCuda) compress24_cuda(call);
}
void run_packed(const Compress24Call& call) {
  if constexpr (kCuda) compress24_packed_cuda(call);
}

constexpr Variant<Compress24Call> kCompressions[] = {
    {"packed", packed_lacks, is_preferred<Compress24Call>, run_packed},
    {"general", lacks_nothing<Compress24Call>, is_otherwise<Compress24Call>, run_general}};

void run(const char* op, const Compress24Call& call) {
  const bool has_tiles = call.x.count() > 0;  // without any there is no padding either
  if (call.x.device().is_cpu()) return has_tiles ? compress24_cpu(call) : void();
  const auto& chosen = choose(op, kCompressions, call, Gpu(call.x.device()));
  if (has_tiles) chosen.launch(call);
}

}  // namespace

std::string describe_problem(const Compress24Call& call) {
  return text_of("a 2:4 choice by ", call.pattern ? "pattern" : name_of(call.selection.method), " of ",
                 describe(call.x));
}

std::vector<std::string> compress24_variants() {
  return names_of(kCompressions);
}

const char* name_of(Along24 along) {
  return kAlong[size_t(along)];
}
Along24 parse_along24(std::string_view name) {
  return parse_name<Along24>("2:4: groups cannot lie along", kAlong, name);
}
const char* name_of(Method24 method) {
  return kMethods[size_t(method)];
}
Method24 parse_method24(std::string_view name) {
  return parse_name<Method24>("2:4: there is no method", kMethods, name);
}

Selection24 Selection24::mvue(const Rng& rng, Device device, Site site) {
  const CallScope call(site);
  return {.method = Method24::mvue, .stream = rng.reserve(device)};
}

Sparse24 Sparse24::empty(int64_t tokens, int64_t features, Along24 along, DType dtype, Device device) {
  check(tokens >= 0 && features >= 0, "2:4: a matrix [", tokens, ", ", features,
        "]; expected sizes of 0 or more");
  check(is_floating(dtype) && dtype != DType::f8e4m3, "2:4: ", dtype,
        " is not supported; expected f64, f32, ", "bf16 or f16");
  Sparse24 made;
  made.along = along, made.tokens = tokens, made.features = features;
  made.values = Tensor::empty_packed(values_shape(made), dtype, device);
  made.metadata = Tensor::empty_packed(metadata_shape(made), DType::i32, device);
  return made;
}

uint64_t Sparse24::bytes() const {
  uint64_t sum = 0;
  for (const Tensor* part : {&values, &metadata, &scales})
    if (part->defined()) sum += part->bytes();
  return sum;
}

Sparse24 Sparse24::to(Device device) const {
  Sparse24 moved = *this;
  for (Tensor* part : {&moved.values, &moved.metadata, &moved.scales})
    if (part->defined()) *part = part->to(device);
  return moved;
}

void validate(const Sparse24& x, const std::string& name) {
  check(x.values.defined() && x.metadata.defined(), name, ": the 2:4 matrix is undefined");
  check(x.tokens >= 0 && x.features >= 0, name, ": the 2:4 matrix is [", x.tokens, ", ", x.features,
        "]; expected sizes of 0 or more");
  check(is_floating(x.dtype()) && x.dtype() != DType::f8e4m3 && x.values.shape() == values_shape(x), name,
        ": values are ", describe(x.values), "; expected f64, f32, bf16 or f16 ", values_shape(x));
  check(x.metadata.dtype() == DType::i32 && x.metadata.shape() == metadata_shape(x) &&
            x.metadata.device() == x.device(),
        name, ": metadata is ", describe(x.metadata), "; expected i32 ", metadata_shape(x), " on ",
        x.device().name());
  for (const Tensor* part : {&x.values, &x.metadata})
    check(part->layout().is_packed(), name, ": ", describe(*part), " is a view; expected packed memory");
  check(!x.scales.defined(), name, ": has scales, which values of ", x.dtype(), " do not take");
}

void validate_elements(const Sparse24& x, const std::string& name) {
  validate(x, name);
  const int64_t k_tiles = x.values.size(1), tiles = x.values.size(0) * k_tiles;
  const int32_t* const words = x.metadata.data<int32_t>();
  dispatch_floating(x.dtype(), "validate", [&]<class T>() {
    const T* const values = x.values.data<T>();
    for (int64_t tile = 0; tile < tiles; ++tile)
      for (int row = 0; row < kTileRows; ++row)
        for (int group = 0; group < kTileGroups; ++group) {
          const int64_t m = tile / k_tiles * kTileRows + row, k = tile % k_tiles * kTileDepth + group * 4;
          const Positions at =
              Positions::of(uint32_t(words[word_index(tile, row, group)]) >> word_bit(row, group));
          check(at.first < at.second, name, ": group ", k / 4, " of row ", m, " keeps positions ", at.first,
                " and ", at.second, "; expected two that ascend");
          const T* const pair = values + value_index(tile, row, group);
          for (int slot = 0; slot < 2; ++slot) {
            const bool inside = m < x.m() && k + (slot ? at.second : at.first) < x.k();
            check(inside || magnitude(pair[slot]) == 0, name, ": group ", k / 4, " of row ", m, " keeps ",
                  double(pair[slot]), " outside the matrix [", x.m(), ", ", x.k(), "]");
          }
        }
  });
}

Sparse24 compress24(const Tensor& x, Along24 along, const Selection24& selection, Site site) {
  const CallScope call(site);
  check_matrix("compress24", x);
  check_selection("compress24", selection, x);
  const Sparse24 made = Sparse24::empty(x.size(0), x.size(1), along, x.dtype(), x.device());
  Compress24Call one;
  one.x = x.detach(), one.selection = selection;
  (along == Along24::features ? one.by_features : one.by_tokens) = made;
  run("compress24", one);
  return made;
}

BothWays24 compress24_both(const Tensor& x, const Selection24& selection, Site site) {
  const CallScope call(site);
  check_matrix("compress24_both", x);
  check_selection("compress24_both", selection, x);
  const auto made = [&](Along24 along) {
    return Sparse24::empty(x.size(0), x.size(1), along, x.dtype(), x.device());
  };
  const BothWays24 both{made(Along24::features), made(Along24::tokens)};
  run("compress24_both", {.x = x.detach(),
                          .by_features = both.by_features,
                          .by_tokens = both.by_tokens,
                          .selection = selection});
  return both;
}

Sparse24 compress24_like(const Tensor& x, const Sparse24& pattern, Site site) {
  const CallScope call(site);
  check_matrix("compress24_like", x);
  validate(pattern, "compress24_like");
  check(x.size(0) == pattern.tokens && x.size(1) == pattern.features && x.device() == pattern.device(),
        "compress24_like: x is ", describe(x), ", but the pattern is [", pattern.tokens, ", ",
        pattern.features, "] on ", pattern.device().name());
  Sparse24 made = Sparse24::empty(x.size(0), x.size(1), pattern.along, x.dtype(), x.device());
  made.metadata = pattern.metadata;
  Compress24Call one;
  one.x = x.detach(), one.pattern = &pattern;
  (pattern.along == Along24::features ? one.by_features : one.by_tokens) = made;
  run("compress24_like", one);
  return made;
}

Tensor masked24(const Tensor& from, const Sparse24& x) {
  const Tensor y =
      Tensor::empty({x.tokens, x.features}, from.defined() ? from.dtype() : x.dtype(), x.device());
  if (y.count() == 0) return y;
  if (x.device().is_cpu()) {
    decompress24_cpu(y, x, from);
  } else if constexpr (kCuda) {
    decompress24_cuda(y, x, from);
  }
  return y;
}

Tensor decompress24(const Sparse24& x, Site site) {
  const CallScope call(site);
  validate(x, "decompress24");
  return masked24({}, x);
}

Tensor soft_scale(const Tensor& x, Along24 along, int64_t samples, bool clamped, Site site) {
  const CallScope call(site);
  check_matrix("soft_scale", x);
  check(samples >= 0, "soft_scale: ", samples, " samples; expected 1 or more, or 0 for all");
  const int64_t per_unit = along == Along24::features ? 1 : 4, units = ceil_div(x.size(0), per_unit);
  SoftScaleCall fit{.scale = Tensor::full({1}, 1, DType::f32, x.device()),
                    .x = x.detach(),
                    .along = along,
                    .units = units,
                    .samples = samples == 0 ? units : std::min(units, ceil_div(samples, per_unit)),
                    .clamped = clamped};
  if (x.count() == 0) return fit.scale;
  if (x.device().is_cpu()) {
    soft_scale_cpu(fit);
  } else if constexpr (kCuda) {
    soft_scale_cuda(fit);
  }
  return fit.scale;
}

Tensor DynamicScale24::next(const Tensor& x, Along24 along, Site site) {
  const CallScope call(site);
  check(interval > 0 && samples > 0, "soft_dynamic: an interval of ", interval, " steps and ", samples,
        " samples; expected 1 or more of both");
  if (step++ % interval == 0 || !scale.defined()) scale = soft_scale(x, along, samples, true);
  return scale;
}

}  // namespace tessera::ops
