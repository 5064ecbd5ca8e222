#include "runtime/tuning.h"

#include <charconv>
#include <map>
#include <utility>
#include <vector>

namespace tessera::tuning {

/// docs/results/tuning.tsv, embedded by the build.
extern const char* const kTable;

namespace {

thread_local ForceRow* t_force = nullptr;

struct Entry {
  std::string card, op, key;
  int row;
};

std::vector<Entry> parse_table() {
  std::vector<Entry> entries;
  std::string_view text = kTable;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (line.empty() || line.front() == '#') continue;
    std::string_view fields[4];
    size_t count = 0;
    while (count < 4) {
      const size_t tab = line.find('\t');
      fields[count++] = line.substr(0, tab);
      if (tab == std::string_view::npos) break;
      line.remove_prefix(tab + 1);
    }
    int row = -1;
    if (count == 4) std::from_chars(fields[3].data(), fields[3].data() + fields[3].size(), row);
    if (row >= 0)
      entries.push_back({std::string(fields[0]), std::string(fields[1]), std::string(fields[2]), row});
  }
  return entries;
}

const std::vector<Entry>& table() {
  static const auto& entries = *new std::vector<Entry>(parse_table());
  return entries;
}

}  // namespace

std::optional<int> row(std::string_view card, std::string_view op, std::string_view key) {
  if (const auto forced = ForceRow::forced(op)) return forced;
  for (const Entry& entry : table())
    if (entry.card == card && entry.op == op && entry.key == key) return entry.row;
  return std::nullopt;
}

int entries(std::string_view card) {
  int count = 0;
  for (const Entry& entry : table()) count += entry.card == card;
  return count;
}

ForceRow::ForceRow(std::string op, int row) : op_(std::move(op)), row_(row), outer_(t_force) {
  t_force = this;
}
ForceRow::~ForceRow() {
  t_force = outer_;
}

std::optional<int> ForceRow::forced(std::string_view op) {
  for (const ForceRow* scope = t_force; scope; scope = scope->outer_)
    if (scope->op_ == op) return scope->row_;
  return std::nullopt;
}

}  // namespace tessera::tuning
