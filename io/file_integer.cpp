#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "io/file_integer_internal.h"
#include "runtime/text.h"

namespace tessera::io {
namespace {

constexpr std::array<FileInteger, 5> kIntegers = {{{"I8", "|i1", DType::i32, 1},
                                                   {"I16", "<i2", DType::i32, 2},
                                                   {"U16", "<u2", DType::i32, 2},
                                                   {"U32", "<u4", DType::i64, 4},
                                                   {"U64", "<u8", DType::i64, 8}}};

template <class From, class To>
Tensor widened(const InputFile& file, uint64_t offset, const Shape& shape, const std::string& name) {
  const Tensor host = Tensor::empty_packed(shape, dtype_of<To>);
  To* const to = host.data<To>();
  std::vector<From> part(size_t(std::min<int64_t>(host.count(), int64_t{1} << 20)));
  for (int64_t begin = 0; begin < host.count(); begin += int64_t(part.size())) {
    const int64_t count = std::min(int64_t(part.size()), host.count() - begin);
    file.read(offset + uint64_t(begin) * sizeof(From), part.data(), size_t(count) * sizeof(From));
    for (int64_t i = 0; i < count; ++i) {
      const From value = part[size_t(i)];
      check(std::in_range<To>(value), "read: ", file.path(), ": element ", begin + i, " of '", shown(name),
            "' is ", value, ", more than an ", dtype_of<To>, " holds");
      to[begin + i] = To(value);
    }
  }
  return host;
}

}  // namespace

const FileInteger* find_file_integer(const char* FileInteger::*names, std::string_view name) {
  const auto* const found = std::find_if(kIntegers.begin(), kIntegers.end(),
                                         [&](const FileInteger& known) { return name == known.*names; });
  return found == kIntegers.end() ? nullptr : found;
}

Tensor read_file_integers(const InputFile& file, uint64_t offset, const FileInteger& integer,
                          const Shape& shape, const std::string& name) {
  const bool is_signed = integer.safetensors[0] == 'I';
  switch (integer.bytes) {
    case 1:
      return widened<int8_t, int32_t>(file, offset, shape, name);
    case 2:
      return is_signed ? widened<int16_t, int32_t>(file, offset, shape, name)
                       : widened<uint16_t, int32_t>(file, offset, shape, name);
    case 4:
      return widened<uint32_t, int64_t>(file, offset, shape, name);
    default:
      return widened<uint64_t, int64_t>(file, offset, shape, name);
  }
}

}  // namespace tessera::io
