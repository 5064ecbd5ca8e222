#include "ops/op.h"

/// The list of operators: each folder's declarations, in the order that `tessera op --list` shows.

namespace tessera::ops {

std::vector<OpSpec> activation_specs();
std::vector<OpSpec> gather_specs();
std::vector<OpSpec> shape_specs();

namespace {

using Specs = std::vector<OpSpec> (*)();
constexpr Specs kFolders[] = {
    activation_specs,
    gather_specs,
    shape_specs,
};

}  // namespace

const std::vector<OpSpec>& all_ops() {
  static const auto& all = *[] {
    auto* const list = new std::vector<OpSpec>;
    for (const Specs specs : kFolders)
      for (OpSpec& spec : specs()) list->push_back(std::move(spec));
    return list;
  }();
  return all;
}

}  // namespace tessera::ops
