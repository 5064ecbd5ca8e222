#include "train/sparse24_settings.h"

#include <fmt/format.h>

#include <algorithm>
#include <tuple>

#include "runtime/error.h"

namespace tessera::train {

void Sparse24Settings::add_to(SettingList& list) {
  const Sparse24Settings usual;
  constexpr int64_t kMost = int64_t{1} << 30;
  list.group("Training");
  list.add("sparse24", method,
           "Train with 2:4 sparse hidden activations: how two of every four are selected; needs train llama "
           "--ffn relu2 or relu, a --model with relu (OPT), or --form cola --cola-activation relu_squared")
      .one_of({"none", "naive", "mvue", "soft_threshold", "soft_dynamic", "fast"})
      .absent_means(usual.method);
  const auto add_gemm = [&](const char* key, std::string& value, const char* help) {
    list.add(key, value, help).shown_as("split; sparse with --dense-share 0").absent_means("");
  };
  add_gemm("sparse24_y", y,
           "GEMM of the second layer: dense, sparse, or split into dense and sparse columns");
  add_gemm("sparse24_dx", dx, "GEMM of the first layer's input gradient");
  add_gemm("sparse24_dup", dup, "GEMM of the first layer's weight gradient");
  add_gemm("sparse24_ddown", ddown, "GEMM of the second layer's weight gradient");
  list.add("sparse24_tokens", token_method, "How two of every four tokens are selected for weight gradients")
      .one_of({"naive", "mvue", "fast"})
      .absent_means(usual.token_method);
  list.add("sparse24_dense_gradient", dense_gradient,
           "Keep the hidden gradient dense instead of restricting it to the activations that forward kept")
      .absent_means(usual.dense_gradient);
  list.add("sparse24_require", require, "Fail if a sparse GEMM cannot use sparse tensor cores")
      .absent_means(usual.require);
  list.add("dense_share", dense_share, "Share of the columns that split GEMMs keep dense, densest first")
      .range(0.0, 1.0)
      .absent_means(usual.dense_share);
  list.add("permute", permute,
           "Tokens that form groups of four: neighbours (none), a fixed random permutation (random), or "
           "tokens a quarter of the batch apart (stride)")
      .one_of({"none", "random", "stride"})
      .absent_means(usual.permute);
  list.add("dense_first", dense_first, "Number of dense steps at the beginning")
      .range(int64_t{0}, kMost)
      .absent_means(usual.dense_first);
  list.add("dense_last", dense_last, "Number of dense steps at the end")
      .range(int64_t{0}, kMost)
      .absent_means(usual.dense_last);
  list.add("dynamic_steps", dynamic_steps, "soft_dynamic: calls between fits of the scale")
      .range(int64_t{1}, kMost)
      .absent_means(usual.dynamic_steps);
  list.add("calibration_samples", calibration_samples, "soft_dynamic: tokens that the scale is fitted to")
      .range(int64_t{1}, kMost)
      .absent_means(usual.calibration_samples);
}

nn::Sparse24 Sparse24Settings::form(ops::Activation activation, uint64_t seed, const Rng& rng) const {
  const auto gemm = [&](const char* flag, const std::string& text) {
    check(text.empty() || text == "dense" || text == "sparse" || text == "split", "sparse24: ", flag,
          " is \"", text, "\"; expected dense, sparse or split");
    return text.empty() ? dense_share > 0 ? ops::Gemm24::split : ops::Gemm24::sparse
                        : ops::parse_gemm24(text);
  };
  nn::Sparse24 made;
  made.how = {.activation = activation,
              .y = gemm("--sparse24-y", y),
              .dx = gemm("--sparse24-dx", dx),
              .dup = gemm("--sparse24-dup", dup),
              .ddown = gemm("--sparse24-ddown", ddown),
              .dense_share = dense_share,
              .method = ops::parse_method24(method),
              .token_method = ops::parse_method24(token_method),
              .masks_gradient = !dense_gradient,
              .required = require,
              .rng = rng};
  check(!made.how.splits() || dense_share > 0,
        "sparse24: a GEMM is split, but --dense-share is 0; make it sparse, or give a share");
  made.order = permute;
  made.seed = seed;
  made.dynamic.interval = dynamic_steps;
  made.dynamic.samples = calibration_samples;
  return made;
}

void Sparse24Settings::validate() const {
  if (!on()) return;
  Rng rng(0);
  nn::Sparse24 made = form(ops::Activation::relu_squared, 0, rng);
  made.how.scale = Tensor::full({1}, 1, DType::f32, Device::cpu());  // fitted to the weights of each network
  made.how.dynamic = &made.dynamic;
  made.how.validate("sparse24 (--sparse24)");
}

void Sparse24Settings::check_given(const Given& given, bool weights24) const {
  check_needs(given,
              {"--sparse24-y", "--sparse24-dx", "--sparse24-dup", "--sparse24-ddown", "--sparse24-tokens",
               "--sparse24-dense-gradient", "--sparse24-require", "--dense-share", "--permute",
               "--dynamic-steps", "--calibration-samples"},
              on(), "--sparse24", "--sparse24 METHOD");
  check_needs(given, {"--dense-first", "--dense-last"}, on() || weights24, "--sparse24 or --weights-24",
              "one of them");
  for (const char* const flag : {"--dynamic-steps", "--calibration-samples"})
    check(method == "soft_dynamic" || !given.contains(flag), flag, " needs --sparse24 soft_dynamic, not ",
          method, "; leave it out");
}

bool Sparse24Settings::has_state() const {
  if (!on()) return false;
  Rng rng(0);
  const nn::Sparse24 made = form(ops::Activation::relu_squared, 0, rng);
  return made.how.splits() || method == "mvue" || method == "soft_dynamic" || token_method == "mvue";
}

std::optional<plan::HiddenBytes> Sparse24Settings::hidden_bytes(DType dtype) const {
  if (!on()) return {};
  Rng rng(0);
  const ops::MlpSparse24 how = form(ops::Activation::relu_squared, 0, rng).how;
  const double element = double(size_of(dtype)), compressed = element / 2 + 1.0 / 8;
  const bool changes = method == "mvue" || method == "soft_threshold" || method == "soft_dynamic";
  const double dense = how.y == ops::Gemm24::split ? dense_share * element : 0;
  double saved = how.y == ops::Gemm24::dense ? element : compressed + dense + (changes ? element / 2 : 0);
  if (!how.masks_gradient && how.y != ops::Gemm24::dense) saved += element;
  if (dense_first > 0 || dense_last > 0) saved = std::max(saved, element);
  // Backward: what was kept and dh as matrices, each compressed along tokens, and what one of them is a copy
  // of.
  const bool weights = how.dup != ops::Gemm24::dense || how.ddown != ops::Gemm24::dense;
  const double copy = how.splits() ? element : 0;
  const double transient = how.is_dense() ? element : 2 * element + copy + (weights ? 2 : 1) * compressed;
  return plan::HiddenBytes{.saved = saved, .transient = transient};
}

std::string Sparse24Settings::description() const {
  Rng rng(0);
  const ops::MlpSparse24 how = form(ops::Activation::relu_squared, 0, rng).how;
  std::string text = fmt::format("2:4 {}: y {}, dx {}, dup {}, ddown {}", method, ops::name_of(how.y),
                                 ops::name_of(how.dx), ops::name_of(how.dup), ops::name_of(how.ddown));
  if (how.splits()) text += fmt::format(", {:.4g}% of the columns dense", 100 * dense_share);
  if (token_method != "naive") text += fmt::format(", {} along tokens", token_method);
  if (dense_gradient) text += ", dense hidden gradient";
  if (permute != "none") text += fmt::format(", tokens in {} order", permute);
  if (dense_first > 0) text += fmt::format(", dense for {} steps", dense_first);
  if (dense_last > 0) text += fmt::format(", dense for the last {} steps", dense_last);
  return text;
}

namespace {

/// How a GEMM over features or tokens of these sizes runs.
std::string variant_of(ops::Along24 along, int64_t tokens, int64_t hidden, int64_t width, DType dtype,
                       Device device) {
  const ops::Sparse24 a = ops::Sparse24::empty(tokens, hidden, along, dtype, device);
  const Tensor b = Tensor::empty({a.k(), width}, dtype, device),
               d = Tensor::empty({a.m(), width}, dtype, device);
  return ops::multiply24_variant(d, a, b);
}

}  // namespace

std::string Sparse24Settings::variants(int64_t tokens, int64_t hidden, int64_t width, DType dtype,
                                       Device device) {
  const auto taken = [&](ops::Along24 along) {
    return variant_of(along, tokens, hidden, width, dtype, device);
  };
  return fmt::format("sums over features by {}, over tokens by {}", taken(ops::Along24::features),
                     taken(ops::Along24::tokens));
}

void Sparse24Settings::check_required(int64_t tokens, int64_t hidden, int64_t width, DType dtype,
                                      Device device) const {
  if (!on() || !require) return;
  Rng rng(0);
  const ops::MlpSparse24 how = form(ops::Activation::relu_squared, 0, rng).how;
  const std::tuple<const char*, ops::Gemm24, ops::Along24> gemms[] = {
      {"y", how.y, ops::Along24::features},
      {"dx", how.dx, ops::Along24::features},
      {"dup", how.dup, ops::Along24::tokens},
      {"ddown", how.ddown, ops::Along24::tokens}};
  for (const auto& [name, gemm, along] : gemms) {
    if (gemm == ops::Gemm24::dense) continue;
    const std::string variant = variant_of(along, tokens, hidden, width, dtype, device);
    check(variant.starts_with("wgmma"),
          "sparse24: sparse tensor cores are required (--sparse24-require), but the GEMM of ", name, " over ",
          tokens, " tokens, ", hidden, " features and a width of ", width, " in ", name_of(dtype), " on ",
          device.name(), " would run as \"", variant, "\"; give --sparse24-", name,
          " dense, or leave --sparse24-require out");
  }
}

}  // namespace tessera::train
