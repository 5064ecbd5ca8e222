#include "nn/summary.h"

#include <algorithm>
#include <array>

#include "runtime/text.h"

namespace tessera::nn {
namespace {

std::string grouped(int64_t value) {  // 1234567 -> "1,234,567"
  std::string text = std::to_string(value);
  for (int64_t at = int64_t(text.size()) - 3; at > 0; at -= 3) text.insert(size_t(at), ",");
  return text;
}

std::string scaled(double value, double base, const std::array<const char*, 6>& units) {
  size_t unit = 0;
  while (value >= base && unit + 1 < units.size()) value /= base, ++unit;
  return decimals(value, unit ? 1 : 0) + " " + units[unit];
}

using Cells = std::array<std::string, 6>;

Cells cells(const SummaryRow& row) {
  MessageStream shapes;
  for (const Shape& shape : row.shapes) shapes << (&shape == row.shapes.data() ? "" : " ") << shape;
  return {row.name.empty() ? "(model)" : row.name,
          row.kind,
          shapes.str(),
          grouped(row.parameters),
          row.flops > 0 ? scaled(row.flops, 1000, {"FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"}) : "",
          scaled(row.bytes, 1024, {"B", "KiB", "MiB", "GiB", "TiB", "PiB"})};
}

}  // namespace

namespace detail {

SummaryRow& owner(std::vector<SummaryRow>& rows, const std::string& name) {
  SummaryRow* best = nullptr;
  for (SummaryRow& row : rows) {
    const bool holds = row.name.empty() || (name.size() > row.name.size() && name[row.name.size()] == '.' &&
                                            name.compare(0, row.name.size(), row.name) == 0);
    if (holds && (!best || row.name.size() >= best->name.size())) best = &row;
  }
  if (!best) best = &rows.emplace_back();  // a container of bare tensors
  return *best;
}

void add_tensor(SummaryRow& row, const Tensor& tensor) {
  row.shapes.push_back(tensor.shape());
  if (requires_grad(tensor)) row.parameters += tensor.count();
  row.bytes += double(tensor.bytes());
}

Summary finish(std::vector<SummaryRow> rows, int64_t tokens) {
  std::erase_if(rows, [](const SummaryRow& row) { return row.shapes.empty() && row.flops == 0; });
  Summary summary;
  summary.tokens = tokens;
  summary.total.name = "total";
  for (const SummaryRow& row : rows) {
    summary.total.parameters += row.parameters;
    summary.total.flops += row.flops;
    summary.total.bytes += row.bytes;
  }
  summary.rows = std::move(rows);
  return summary;
}

}  // namespace detail

std::string Summary::text() const {
  std::vector<Cells> table{{"name", "kind", "shapes", "parameters",
                            "forward of " + grouped(tokens) + (tokens == 1 ? " token" : " tokens"), "bytes"}};
  for (const SummaryRow& row : rows) table.push_back(cells(row));
  table.push_back(cells(total));
  std::array<size_t, 6> width{};
  for (const Cells& line : table)
    for (size_t i = 0; i < line.size(); ++i) width[i] = std::max(width[i], line[i].size());
  std::string text;
  for (const Cells& line : table) {
    for (size_t i = 0; i < line.size(); ++i) {
      const std::string fill(width[i] - line[i].size(), ' ');
      text += (i ? "  " : "") + (i < 3 ? line[i] + fill : fill + line[i]);
    }
    text += '\n';
  }
  return text;
}

}  // namespace tessera::nn
