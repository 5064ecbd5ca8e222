#include <algorithm>

#include "ops/linear/sliced_backward_spec_internal.h"

namespace tessera::ops {

std::vector<AttrSpec> slice_attrs() {
  return {
      {"slice",
       std::string("none"),
       "rows of dy that backward multiplies",
       {"none", "first", "top_norm", "threshold", "random", "importance"}},
      {"rows", int64_t{0}, "how many rows a slice has; 0: share says it"},
      {"share", 0.0, "share of the rows that a slice has; 0: rows says it"},
      {"threshold", 0.0, "smallest norm of a row of slice threshold"},
      {"weight_grad", std::string("slice"), "rows of a sliced weight gradient", {"none", "slice", "full"}},
      {"seed", int64_t{0}, "random seed of slices random and importance"}};
}

std::optional<SlicedBackward> slice_of(const char* op, const Attrs& attrs, const Rng& rng) {
  const std::string& mode = attrs.word("slice");
  const int64_t rows = attrs.integer("rows");
  const double share = attrs.number("share"), threshold = attrs.number("threshold");
  const std::string& weight_grad = attrs.word("weight_grad");
  if (mode == "none") {
    check(rows == 0 && share == 0 && threshold == 0 && weight_grad == "slice", op, ": ",
          rows             ? "rows"
          : share != 0     ? "share"
          : threshold != 0 ? "threshold"
                           : "weight_grad",
          " is of a slice; set slice=first, top_norm, ", "threshold, random or importance as well");
    return std::nullopt;
  }
  SlicedBackward slice{
      .rows = parse_select_mode(mode), .weight_grad = parse_weight_grad(weight_grad), .rng = rng};
  // In the words of the attributes, before SlicedBackward::validate says the rest.
  check(rows >= 0, op, ": rows is ", rows, "; expected 1 or more rows of the slice, or 0 with a share");
  if (slice.rows == SelectMode::threshold) {
    check(rows == 0 && share == 0, op, ": ", rows ? "rows" : "share",
          " is given, but with slice=threshold the threshold decides how many rows there are; leave it out");
  } else {
    check(threshold == 0, op, ": threshold is of slice=threshold, but slice is ", mode, "; leave it out");
    check(rows == 0 || share == 0, op, ": rows is ", rows, " and share ", share, "; give one of the two");
    check(rows != 0 || share != 0, op, ": slice=", mode, " needs a number of rows; set rows or share");
  }
  if (rows != 0) slice.n = rows;
  if (share != 0) slice.share = share;
  if (threshold != 0 || slice.rows == SelectMode::threshold) slice.threshold = threshold;
  slice.validate(op);
  return slice;
}

int64_t sliced_rows(const Attrs& attrs, int64_t rows) {
  Rng rng(0);
  const auto slice = slice_of("slice", attrs, rng);
  if (!slice) return rows;
  return slice->n ? std::min(*slice->n, rows) : slice->share ? share_of_rows(rows, *slice->share) : rows;
}

Attrs slice_case(SelectMode mode, int64_t count, WeightGrad kind) {
  Attrs attrs{{"slice", std::string(name_of(mode))}, {"weight_grad", std::string(name_of(kind))}};
  if (mode == SelectMode::threshold)
    attrs.set("threshold", 1.5);
  else
    attrs.set("rows", count);
  return attrs;
}

void add_slice_cases(std::vector<Case>& cases, const Case& plain, int64_t count) {
  for (const SelectMode mode : {SelectMode::first, SelectMode::top_norm, SelectMode::threshold,
                                SelectMode::random, SelectMode::importance})
    for (const WeightGrad kind : {WeightGrad::none, WeightGrad::slice, WeightGrad::full}) {
      Case one = plain;
      const Attrs slice = slice_case(mode, count, kind);
      for (const auto& [name, value] : slice.values()) one.attrs.set(name, value);
      one.gradcheck = false;  // not the slope of y: tests/ops/linear_slice_test.cpp has that check
      cases.push_back(one);
    }
}

void draw_slice(Draw& draw, Case& drawn) {
  if (!draw.chance(0.2)) return;
  const SelectMode mode = draw.chance(0.5) ? SelectMode::first : SelectMode::random;
  const WeightGrad kinds[] = {WeightGrad::none, WeightGrad::slice, WeightGrad::full};
  const int64_t rows = draw.size(1, std::max<int64_t>(drawn.dims.at("T"), 1));
  const Attrs slice = slice_case(mode, rows, kinds[draw.below(3)]);
  for (const auto& [name, value] : slice.values()) drawn.attrs.set(name, value);
}

}  // namespace tessera::ops
