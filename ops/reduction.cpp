#include "ops/reduction.h"

#include "runtime/text.h"

namespace tessera::ops {
namespace {

constexpr const char* kNames[] = {"mean", "sum", "none"};

}  // namespace

const char* name_of(Reduction reduction) {
  return kNames[size_t(reduction)];
}

Reduction parse_reduction(std::string_view name) {
  return parse_name<Reduction>("loss: there is no reduction", kNames, name);
}

}  // namespace tessera::ops
