#include "ops/keep_largest/keep_largest.h"
#include "ops/op.h"

namespace tessera::ops {
namespace {

Case of(int64_t rows, int64_t columns, const char* within, int64_t zeros, int64_t group = 0,
        Placement placement = Placement::pitched) {
  return {.dims = {{"R", rows}, {"C", columns}},
          .attrs = {{"within", std::string(within)}, {"zeros", zeros}, {"group", group}},
          .placement = placement};
}

KeepLargest how_of(const Attrs& attrs) {
  const std::string& within = attrs.word("within");
  return {.within = within == "row"      ? KeepWithin::row
                    : within == "matrix" ? KeepWithin::matrix
                                         : KeepWithin::group,
          .zeros = attrs.integer("zeros"),
          .group = attrs.integer("group")};
}

Problem keep_largest_problem(const Dims& d, const Attrs&) {
  const double n = double(d.at("R")) * double(d.at("C"));
  // A few equal scores, which the index tells apart: an eighth of them are 0.
  return {.inputs = {{.shape = {d.at("R"), d.at("C")}, .density = 0.875}},
          .forward_elements = n,
          .forward_bytes = n};
}

OpSpec keep_largest_spec() {
  OpSpec op{
      .name = "keep_largest",
      .summary = "0 for the `zeros` smallest of each row, matrix or group, else 1",
      .inputs = {{.name = "scores", .shape = "[R, C]", .differentiable = false}},
      .attrs = {{"within", std::string("row"), "among which elements", {"row", "matrix", "group"}},
                {"zeros", int64_t{1}, "elements dropped of each"},
                {.name = "group",
                 .fallback = int64_t{0},
                 .help = "consecutive elements of a group; divides C",
                 .only_with = {"within", "group"}}},
      .outputs = {{"keep", "[R, C]", false, {DType::u8}}},
      .run = [](const std::vector<Tensor>& in,
                const Attrs& attrs) { return std::vector{keep_largest(in[0], how_of(attrs))}; },
      .problem = keep_largest_problem,
      .benches = {of(4096, 4096, "row", 2048), of(11008, 4096, "row", 2048), of(4096, 11008, "row", 5504),
                  of(4096, 128, "matrix", 262144), of(4096, 4096, "matrix", 8388608),
                  of(4096, 4096, "group", 2, 4), of(4096, 4096, "group", 4, 8)},
      .cpu_benches = {of(2048, 2048, "row", 1024), of(2048, 128, "matrix", 131072),
                      of(2048, 2048, "group", 2, 4)},
      .sweep =
          [](Draw& draw) {
            const int64_t rows = draw.size(1, 8192), columns = draw.size(1, 16384);
            const bool matrix = draw.chance(0.3);
            const int64_t among = matrix ? rows * columns : columns;
            return of(rows, columns, matrix ? "matrix" : "row", among / draw.pick({2, 3, 10}));
          },
  };
  for (const char* within : {"row", "matrix"})
    for (const auto& [rows, columns] :
         {std::pair<int64_t, int64_t>{1, 1}, {7, 13}, {33, 129}, {5, 1025}, {300, 3}}) {
      const int64_t among = std::string_view(within) == "row" ? columns : rows * columns;
      for (const int64_t zeros : {int64_t{0}, int64_t{1}, among / 2, among})
        op.cases.push_back(of(rows, columns, within, zeros));
    }
  for (const auto& [zeros, group] :
       {std::pair<int64_t, int64_t>{1, 2}, {2, 4}, {4, 8}, {3, 8}, {0, 4}, {12, 12}, {17, 24}})
    op.cases.push_back(of(19, group * 6, "group", zeros, group));
  for (const Placement placement : {Placement::strided, Placement::transposed}) {
    op.cases.push_back(of(21, 37, "row", 18, 0, placement));
    op.cases.push_back(of(21, 37, "matrix", 400, 0, placement));
    op.cases.push_back(of(21, 36, "group", 2, 4, placement));
  }
  op.cases.push_back(of(0, 4, "row", 2));
  op.cases.push_back(of(700, 700, "matrix", 300000));
  return op;
}

}  // namespace

std::vector<OpSpec> keep_largest_specs() {
  return {keep_largest_spec()};
}

}  // namespace tessera::ops
