#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace tessera {

/// The choice among the variants of an operator's kernel, which are numbered.
///
/// Order: a variant forced by this thread (`ForceRow`; the `--row` flag), then the committed table of the
/// GPU, then the operator's own cost model (nullopt here). The table is text, one line each:
///   <GPU> TAB <operator> TAB <key> TAB <variant>      (a line that starts with # is a comment)
/// It is docs/results/tuning.tsv, compiled in, so a choice is a pure function of build, GPU and problem.
namespace tuning {

std::optional<int> row(std::string_view card, std::string_view op, std::string_view key);

/// Runs `op` with that variant for the lifetime of the scope, on this thread.
class ForceRow {
 public:
  ForceRow(std::string op, int row);
  ~ForceRow();
  ForceRow(const ForceRow&) = delete;
  static std::optional<int> forced(std::string_view op);

 private:
  std::string op_;
  int row_;
  ForceRow* outer_;
};

/// Number of lines of the committed table that belong to the GPU.
int entries(std::string_view card);

}  // namespace tuning
}  // namespace tessera
