#include "tensor/dtype.h"

#include <array>

namespace tessera {
namespace {

struct DTypeFacts {
  const char* name;
  size_t bytes;
  bool floating;
  double epsilon;
};

// In the order of DType.
constexpr std::array<DTypeFacts, 9> kFacts{{{"f64", 8, true, 0x1p-52},
                                            {"f32", 4, true, 0x1p-23},
                                            {"bf16", 2, true, 0x1p-7},
                                            {"f16", 2, true, 0x1p-10},
                                            {"f8e4m3", 1, true, 0x1p-3},
                                            {"i64", 8, false, 0},
                                            {"i32", 4, false, 0},
                                            {"u8", 1, false, 0},
                                            {"bool", 1, false, 0}}};

}  // namespace

size_t size_of(DType dtype) {
  return kFacts[size_t(dtype)].bytes;
}
const char* name_of(DType dtype) {
  return kFacts[size_t(dtype)].name;
}
bool is_floating(DType dtype) {
  return kFacts[size_t(dtype)].floating;
}

double epsilon(DType dtype) {
  check(is_floating(dtype), "epsilon: ", dtype, " is not a floating dtype");
  return kFacts[size_t(dtype)].epsilon;
}

DType parse_dtype(std::string_view name) {
  for (size_t i = 0; i < kFacts.size(); ++i)
    if (name == kFacts[i].name) return DType(i);
  fail_at(Site::here(), "dtype \"", name, "\": expected f64, f32, bf16, f16, f8e4m3, i64, i32, u8 or bool");
}

}  // namespace tessera
