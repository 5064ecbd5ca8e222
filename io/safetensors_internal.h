#pragma once

#include "io/safetensors.h"

/// The layout of a safetensors file, for code that writes or reads one piece by piece.

namespace tessera::io {

/// The reference implementation's cap on the header's length.
inline constexpr uint64_t kLargestHeader = 100'000'000;

/// "F32", "BF16", "BOOL".
const char* safetensors_name(DType dtype);

/// Layout of a file: the entries in file order (offsets from the end of the head), and the tensor of each.
struct SafetensorsPlan {
  std::vector<SafetensorsEntry> entries;
  std::vector<Tensor> tensors;
  uint64_t bytes = 0;  // of all elements
};
/// Throws, naming `path` and the tensor, on an undefined tensor or a name that cannot be written.
SafetensorsPlan plan_safetensors(const std::string& path, const NamedTensors& tensors);

/// Length and header. Metadata values of equal length give heads of equal length if they need no escapes.
std::string safetensors_head(const std::string& path, const SafetensorsPlan& plan, const Metadata& metadata);

/// The elements as they are in a file: packed, in host memory.
Tensor file_order(const Tensor& tensor);

/// Parses and checks the header (without its length), for a file with `data_bytes` bytes after it.
void parse_safetensors_header(const std::string& path, std::string_view header, uint64_t data_bytes,
                              std::vector<SafetensorsEntry>& entries, Metadata& metadata);

/// Reads an entry's elements into a packed host tensor.
Tensor read_entry(const InputFile& file, const SafetensorsEntry& entry);

/// A packed host tensor as Tensor::empty would lay it out on the device.
Tensor on_device(const Tensor& host, Device device);

}  // namespace tessera::io
