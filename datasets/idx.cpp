#include "datasets/idx.h"

#include <cstring>
#include <filesystem>
#include <vector>

#include "io/file.h"

namespace tessera::datasets {
namespace {

struct Type {
  int code;
  size_t bytes;
  DType dtype;
};
constexpr Type kTypes[] = {{0x08, 1, DType::u8},  {0x09, 1, DType::i32}, {0x0B, 2, DType::i32},
                           {0x0C, 4, DType::i32}, {0x0D, 4, DType::f32}, {0x0E, 8, DType::f64}};

uint64_t big_endian(const char* from, size_t bytes) {
  uint64_t value = 0;
  for (size_t i = 0; i < bytes; ++i) value = value << 8 | uint8_t(from[i]);
  return value;
}

/// Calls store(i, word) with the bits of each element.
template <class Store>
void for_each_word(const char* from, size_t bytes, int64_t count, Store&& store) {
  for (int64_t i = 0; i < count; ++i) store(i, big_endian(from + size_t(i) * bytes, bytes));
}

std::string first_that_exists(const std::string& prefix, const char* plain, const char* original) {
  return std::filesystem::exists(prefix + original) ? prefix + original : prefix + plain;
}

}  // namespace

Tensor parse_idx(std::span<const char> bytes, const std::string& name) {
  check(bytes.size() >= 4 && bytes[0] == 0 && bytes[1] == 0, "idx: ", name,
        " does not begin as an IDX file does, with two zero bytes, a type and a rank");
  const int code = uint8_t(bytes[2]), rank = uint8_t(bytes[3]);
  const Type* type = nullptr;
  for (const Type& candidate : kTypes)
    if (candidate.code == code) type = &candidate;
  check(type != nullptr, "idx: ", name, " has element type ", code, "; expected 8, 9, 11, 12, 13 or 14");
  check(rank >= 1 && rank <= kMaxRank, "idx: ", name, " has rank ", rank, "; expected 1 to ", kMaxRank);
  const size_t header = 4 + 4 * size_t(rank);
  check(bytes.size() >= header, "idx: ", name, " ends inside its header of ", header, " bytes");
  std::vector<int64_t> sizes;
  uint64_t need = type->bytes;
  bool fits = true;
  for (size_t dim = 0; dim < size_t(rank); ++dim) {
    sizes.push_back(int64_t(big_endian(bytes.data() + 4 + 4 * dim, 4)));
    fits = fits && !__builtin_mul_overflow(need, uint64_t(sizes.back()), &need);
  }
  check(fits && need == bytes.size() - header, "idx: ", name, " has ", bytes.size() - header,
        " bytes of elements; its header says ", fits ? std::to_string(need) : "more than 2^64");

  const Tensor tensor = Tensor::empty_packed(Shape(sizes), type->dtype, Device::cpu());
  const char* const from = bytes.data() + header;
  const int64_t count = tensor.count();
  const auto read = [&]<class To, class Bits>(To* to, Bits) {
    for_each_word(from, type->bytes, count, [&](int64_t i, uint64_t word) {
      const Bits bits = Bits(word);
      if constexpr (std::is_floating_point_v<To>)
        std::memcpy(to + i, &bits, sizeof bits);
      else
        to[i] = To(bits);
    });
  };
  if (count == 0) return tensor;
  if (code == 0x08) std::memcpy(tensor.data<uint8_t>(), from, size_t(count));
  if (code == 0x09) read(tensor.data<int32_t>(), int8_t{});
  if (code == 0x0B) read(tensor.data<int32_t>(), int16_t{});
  if (code == 0x0C) read(tensor.data<int32_t>(), int32_t{});
  if (code == 0x0D) read(tensor.data<float>(), uint32_t{});
  if (code == 0x0E) read(tensor.data<double>(), uint64_t{});
  return tensor;
}

Tensor read_idx(const std::string& path) {
  const io::InputFile file(path);
  std::vector<char> bytes(file.size());
  file.read(0, bytes.data(), bytes.size());
  return parse_idx(bytes, path);
}

Idx::Idx(const std::string& prefix)
    : Idx(read_idx(first_that_exists(prefix, "-images.idx", "-images-idx3-ubyte")),
          read_idx(first_that_exists(prefix, "-labels.idx", "-labels-idx1-ubyte"))) {}

Idx::Idx(Tensor images, Tensor labels) : images_(images.packed()), labels_(labels.to(DType::i64).packed()) {
  check(images.dtype() == DType::u8 && images.rank() >= 2 && labels.rank() == 1 &&
            !is_floating(labels.dtype()) && labels.size(0) == images.size(0),
        "idx: images ", describe(images), " and labels ", describe(labels),
        " do not fit together; expected u8[items, ...] and [items]");
}

LabelledImages Idx::batch(std::span<const int64_t> indices) const {
  const int64_t items = size(), count = int64_t(indices.size()), width = items ? images_.count() / items : 0;
  const LabelledImages batch{Tensor::empty_packed({count, width}, DType::f32, Device::cpu()),
                             Tensor::empty_packed({count}, DType::i64, Device::cpu())};
  for (int64_t i = 0; i < count; ++i) {
    const int64_t item = indices[size_t(i)];
    check(item >= 0 && item < items, "idx: there is no item ", item, " of ", items);
    const uint8_t* const from = images_.data<uint8_t>() + item * width;
    float* const to = batch.images.data<float>() + i * width;
    for (int64_t k = 0; k < width; ++k) to[k] = float(from[k]) / 255.0f;
    batch.labels.data<int64_t>()[i] = labels_.data<int64_t>()[item];
  }
  return batch;
}

}  // namespace tessera::datasets
