#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

/// Pickles and zip archives built by hand, right or wrong as a test wants them.

namespace tessera::io::test {

template <class T>
std::string raw(T value) {
  std::string bytes(sizeof value, '\0');
  std::memcpy(bytes.data(), &value, sizeof value);
  return bytes;
}

/// Instructions of pickles.
namespace pickle {
inline const std::string kProto("\x80\x02", 2);
inline const std::string kNone = "N", kTrue = "\x88", kFalse = "\x89", kMark = "(", kTuple = "t",
                         kReduce = "R", kStop = ".", kEmptyDict = "}", kSetItem = "s", kSetItems = "u",
                         kBuild = "b", kPersistent = "Q", kEmptyTuple = ")";
inline std::string text(const std::string& value) {
  return "X" + raw(uint32_t(value.size())) + value;
}
inline std::string integer(int32_t value) {
  return "J" + raw(value);
}
inline std::string wide(int64_t value) {
  return std::string("\x8A\x08") + raw(value);
}
inline std::string global(const std::string& module, const std::string& name) {
  return "c" + module + "\n" + name + "\n";
}
inline std::string tuple(const std::vector<std::string>& items) {
  std::string code = kMark;
  for (const std::string& item : items) code += item;
  return code + kTuple;
}
inline std::string integers(const std::vector<int64_t>& values) {
  std::vector<std::string> items;
  for (const int64_t value : values) items.push_back(wide(value));
  return tuple(items);
}
inline std::string storage(const std::string& type, const std::string& key, int64_t elements) {
  return tuple({text("storage"), global("torch", type), text(key), text("cpu"), wide(elements)}) +
         kPersistent;
}
inline std::string ordered_dict() {
  return global("collections", "OrderedDict") + kEmptyTuple + kReduce;
}
inline std::string tensor_of(const std::string& storage, int64_t offset, const std::vector<int64_t>& sizes,
                             const std::vector<int64_t>& strides) {
  return global("torch._utils", "_rebuild_tensor_v2") +
         tuple({storage, wide(offset), integers(sizes), integers(strides), kFalse, ordered_dict()}) + kReduce;
}
/// As torch.save writes dtypes that have no type of storage: the elements of the storage are bytes.
inline std::string typed_tensor_of(const std::string& storage, int64_t offset,
                                   const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                                   const std::string& dtype, const std::string& metadata = {}) {
  std::vector<std::string> arguments{storage,        wide(offset), integers(sizes), integers(strides), kFalse,
                                     ordered_dict(), dtype};
  if (!metadata.empty()) arguments.push_back(metadata);
  return global("torch._utils", "_rebuild_tensor_v3") + tuple(arguments) + kReduce;
}
inline std::string untyped_storage(const std::string& key, int64_t bytes) {
  return tuple({text("storage"), global("torch.storage", "UntypedStorage"), text(key), text("cpu"),
                wide(bytes)}) +
         kPersistent;
}
/// [2, 3] on a storage of six.
inline std::string matrix(const std::string& type = "FloatStorage", const std::string& key = "0") {
  return tensor_of(storage(type, key, 6), 0, {2, 3}, {3, 1});
}
/// The whole program: a dictionary of names and code that makes their values.
inline std::string program(const std::vector<std::pair<std::string, std::string>>& items) {
  std::string code = kProto + kEmptyDict + kMark;
  for (const auto& [name, value] : items) code += text(name) + value;
  return code + kSetItems + kStop;
}
}  // namespace pickle

inline uint32_t crc32_of(const std::string& bytes) {
  uint32_t crc = ~uint32_t{0};
  for (const char c : bytes) {
    crc ^= uint8_t(c);
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0);
  }
  return ~crc;
}

struct ZipPart {
  std::string name, bytes;
  // What the headers say, where it is not the truth.
  uint16_t method = 0, flags = 0;
  std::string local_name = name;
  uint32_t crc = crc32_of(bytes);
  uint32_t size = uint32_t(bytes.size()), packed_size = uint32_t(bytes.size());
  uint32_t offset_error = 0;
};

inline std::string zip_bytes(const std::vector<ZipPart>& parts, uint16_t entries_error = 0,
                             uint32_t directory_error = 0) {
  std::string file, directory;
  for (const ZipPart& part : parts) {
    const std::string fields = raw(uint16_t{20}) + raw(part.flags) + raw(part.method) + raw(uint32_t{0x21}) +
                               raw(part.crc) + raw(part.packed_size) + raw(part.size);
    directory += "PK\1\2" + raw(uint16_t{20}) + fields + raw(uint16_t(part.name.size())) +
                 std::string(12, '\0') + raw(uint32_t(file.size() + part.offset_error)) + part.name;
    file += "PK\3\4" + fields + raw(uint16_t(part.local_name.size())) + raw(uint16_t{0}) + part.local_name +
            part.bytes;
  }
  const auto at = uint32_t(file.size());
  const auto count = uint16_t(parts.size() + entries_error);
  return file + directory + "PK\5\6" + std::string(4, '\0') + raw(count) + raw(count) +
         raw(uint32_t(directory.size())) + raw(at + directory_error) + std::string(2, '\0');
}

/// Six floats, 1 to 6.
inline std::string six_floats() {
  std::string bytes;
  for (int i = 1; i <= 6; ++i) bytes += raw(float(i));
  return bytes;
}

/// A file of torch.save with one storage, "0".
inline std::string torch_bytes(const std::string& program, const std::string& data = six_floats()) {
  return zip_bytes({{"model/data.pkl", program}, {"model/byteorder", "little"}, {"model/data/0", data}});
}

}  // namespace tessera::io::test
