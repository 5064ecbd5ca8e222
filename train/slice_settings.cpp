#include "train/slice_settings.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "runtime/error.h"

namespace tessera::train {
namespace {

/// "50" -> n, "12.5%" -> share.
void parse_rows(const std::string& text, ops::SlicedBackward& slice) {
  const bool is_share = text.ends_with('%');
  const char* const begin = text.data();
  const char* const end = begin + text.size() - (is_share ? 1 : 0);
  double share = 0;
  int64_t n = 0;
  const auto [stop, bad] = is_share ? std::from_chars(begin, end, share) : std::from_chars(begin, end, n);
  check(bad == std::errc() && stop == end, "slice: rows (--rows) is \"", text,
        "\"; expected a number of rows such as 50, a share such as 10%, or auto");
  if (is_share)
    slice.share = share / 100;
  else
    slice.n = n;
}

}  // namespace

void SliceSettings::add_to(SettingList& list) {
  const SliceSettings usual;
  list.group("Training");
  list.add("slice", mode, "Backward pass of linear layers over some of the rows: how rows are selected")
      .one_of({"none", "first", "top_norm", "threshold", "random", "importance"})
      .absent_means(usual.mode);
  list.add("rows", rows,
           "Number of rows that --slice selects: a number, a share such as 10%, or auto (importance only)")
      .shown_as("")
      .absent_means(usual.rows);
  list.add("variance", variance,
           "--rows auto: maximum variance added by selecting rows, as a share of the batch gradient's "
           "variance")
      .range(1e-6, 100.0)
      .absent_means(usual.variance);
  list.add("estimate_every", estimate_every, "--rows auto: steps between estimates of the shares")
      .range(int64_t{1}, int64_t{1} << 40)
      .absent_means(usual.estimate_every);
  list.add("slice_threshold", threshold, "--slice threshold: minimum norm of a selected row")
      .range(0.0, 1e30)
      .shown_as("")
      .absent_means(usual.threshold);
  list.add("weight_grad", weight_grad,
           "Rows in the gradient of sliced weights: none, the selected ones (slice), or all (full)")
      .one_of({"none", "slice", "full"})
      .absent_means(usual.weight_grad);
  list.add("slice_layers", layers,
           "Layers to slice: patterns of transformers names, separated by commas, or all")
      .shown_as("the feed-forward layers")
      .absent_means(usual.layers);
  list.add("probe_gradient", probe_every,
           "Steps between comparisons with the dense gradient, written to probes.jsonl; 0: never")
      .range(int64_t{0}, int64_t{1} << 40)
      .absent_means(usual.probe_every);
}

ops::SlicedBackward SliceSettings::slice(const Rng& rng) const {
  ops::SlicedBackward made{
      .rows = ops::parse_select_mode(mode), .weight_grad = ops::parse_weight_grad(weight_grad), .rng = rng};
  const bool by_threshold = made.rows == ops::SelectMode::threshold;
  check(by_threshold || !rows.empty(), "slice: ", mode,
        " (--slice) needs to know how many rows; give --rows N or --rows 10%");
  check(by_threshold || threshold < 0, "slice: a threshold (--slice-threshold) needs --slice threshold, not ",
        mode, "; leave it out");
  check(!by_threshold || threshold >= 0, "slice: threshold (--slice) needs --slice-threshold NORM");
  check(!by_threshold || rows.empty(),
        "slice: the threshold decides how many rows there are; leave --rows out");
  if (by_threshold)
    made.threshold = threshold;
  else if (is_auto())
    made.share = 1;
  else
    parse_rows(rows, made);
  made.validate("slice (--slice)");
  return made;
}

void SliceSettings::validate() const {
  if (!slices()) return;
  Rng rng(0);
  slice(rng);
  if (!is_auto()) return;
  check(mode == "importance",
        "slice: auto (--rows) needs the unbiased choice of least variance; give --slice importance, not ",
        mode);
  check(weight_grad != "none",
        "slice: auto (--rows) bounds the noise of gradients that arrive; with --weight-grad none they do "
        "not: give "
        "slice or full");
}

void SliceSettings::check_given(const Given& given) const {
  check_needs(given, {"--rows", "--slice-threshold", "--weight-grad", "--slice-layers", "--probe-gradient"},
              slices(), "--slice", "--slice MODE");
  check_needs(given, {"--variance", "--estimate-every"}, is_auto(), "--rows auto",
              "--slice importance --rows auto");
}

void SliceSettings::refuse_auto() const {
  check(!is_auto(),
        "--rows auto estimates the rows while `tessera train bert` trains; give a number or a share");
}

std::vector<pretrained::LayerParts> SliceSettings::apply(const pretrained::LinearModules& modules,
                                                         const Rng& rng) const {
  const std::vector<std::string> names = pretrained::set_form(modules, layers, slice(rng));
  std::vector<pretrained::LayerParts> sliced = layer_parts(modules);
  std::erase_if(sliced, [&](const pretrained::LayerParts& layer) {
    return std::ranges::find(names, layer.name) == names.end();
  });
  return sliced;
}

std::string SliceSettings::description() const {
  Rng rng(0);
  if (is_auto())
    return fmt::format("{} auto, variance {:g}, weight_grad {}, of {}", mode, variance, weight_grad, layers);
  return to_string(slice(rng)) + ", of " + layers;
}

}  // namespace tessera::train
