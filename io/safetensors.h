#pragma once

#include <cstdint>
#include <map>
#include <ranges>
#include <string>
#include <utility>
#include <vector>

#include "io/file.h"
#include "runtime/text.h"
#include "tensor/tensor.h"

/// The safetensors format (https://github.com/huggingface/safetensors, "Format"): eight bytes with the length
/// of a JSON header, the header, and the elements of all tensors, row-major, little-endian, one after the
/// other.
///
/// Writing gives the same bytes as the reference library: tensors sorted by descending dtype (I64 F64 F32 I32
/// BF16 F16 F8_E4M3 U8 BOOL), then by name, so that each is aligned; the header padded with spaces to a
/// multiple of 8.
///
/// Reading accepts nothing that the reference library refuses, and refuses more: duplicate names (of tensors,
/// metadata and parts of an entry), unknown parts of an entry, dtypes that are not read, more than eight
/// dimensions, BOOL bytes other than 0 and 1. Integers that no dtype here has are read into a wider one: I8,
/// I16 and U16 as i32, U32 and U64 as i64; a U64 beyond that throws. Every number in the header is checked
/// against the file's size before anything is allocated.

namespace tessera::io {

using tessera::shown;  // names come from files

using NamedTensors = std::vector<std::pair<std::string, Tensor>>;
using Metadata = std::map<std::string, std::string>;

/// Writes the file as AtomicFile does. Any layout and device; names are distinct, UTF-8, and not
/// "__metadata__".
void save_safetensors(const std::string& path, const NamedTensors& tensors, const Metadata& metadata = {});
/// The same for any range of (name, tensor), such as a std::map.
template <std::ranges::range Tensors>
void save_safetensors(const std::string& path, const Tensors& tensors, const Metadata& metadata = {}) {
  save_safetensors(path, NamedTensors(tensors.begin(), tensors.end()), metadata);
}

/// All tensors of the file, by name, on the device.
std::map<std::string, Tensor> load_safetensors(const std::string& path, Device device = Device::cpu());

struct FileInteger;  // io/file_integer_internal.h

/// One tensor as the header describes it.
struct SafetensorsEntry {
  std::string name;
  DType dtype = DType::f32;  // of the tensor that is read
  Shape shape;
  uint64_t offset = 0;  // of the first byte, from the start of the file
  uint64_t bytes = 0;   // in the file
  /// What the elements are in the file if they are not of that dtype, else null.
  const FileInteger* integer = nullptr;
};

/// A file whose header has been read and checked; tensors are read when asked for.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path) : SafetensorsFile(InputFile(path)) {}
  explicit SafetensorsFile(InputFile file);

  const std::string& path() const { return file_.path(); }
  /// In the order of their bytes.
  const std::vector<SafetensorsEntry>& entries() const { return entries_; }
  const Metadata& metadata() const { return metadata_; }
  bool has(const std::string& name) const { return index_.count(name) > 0; }
  /// Throws if there is none, naming the nearest.
  const SafetensorsEntry& entry(const std::string& name) const;
  Tensor load(const std::string& name, Device device = Device::cpu()) const;
  /// Elements begin ... end of the first dimension alone, in host memory; nothing else is read.
  Tensor load_rows(const std::string& name, int64_t begin, int64_t end) const;

  const InputFile& file() const { return file_; }
  /// The eight length bytes and the header, as they are in the file.
  const std::string& head() const { return head_; }

 private:
  InputFile file_;
  std::string head_;
  std::vector<SafetensorsEntry> entries_;
  Metadata metadata_;
  std::map<std::string, size_t> index_;
};

/// Throws, naming file and tensor, if a byte of a BOOL tensor is neither 0 nor 1: such a bool is undefined
/// behaviour.
void check_bools(const Tensor& tensor, const std::string& path, const std::string& name);

}  // namespace tessera::io
