#include "io/safetensors.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>
#include <tuple>

#include "io/file_integer_internal.h"
#include "io/safetensors_internal.h"
#include "runtime/text.h"

namespace tessera::io {

static_assert(std::endian::native == std::endian::little, "elements are written as they are in memory");

namespace {

/// The order in which the reference implementation lays out tensors: wide types first.
int file_rank(DType dtype) {
  constexpr std::array kOrder = {DType::i64, DType::f64,    DType::f32, DType::i32,    DType::bf16,
                                 DType::f16, DType::f8e4m3, DType::u8,  DType::boolean};
  return int(std::find(kOrder.begin(), kOrder.end(), dtype) - kOrder.begin());
}

/// A JSON string. Throws, naming `what`, unless the text is UTF-8.
std::string quoted(const std::string& text, const std::string& path, const char* what) {
  try {
    return nlohmann::json(text).dump();
  } catch (const nlohmann::json::exception&) {
    fail_at(Site::here(), "safetensors: ", path, ": a ", what, " is not UTF-8 text");
  }
}

}  // namespace

SafetensorsPlan plan_safetensors(const std::string& path, const NamedTensors& tensors) {
  std::vector<const std::pair<std::string, Tensor>*> order;
  for (const auto& named : tensors) {
    const auto& [name, tensor] = named;
    check(tensor.defined(), "safetensors: ", path, ": tensor '", shown(name), "' is undefined");
    check(name != "__metadata__" && name.find('\0') == std::string::npos, "safetensors: ", path,
          ": the name '", shown(name), "' cannot be used for a tensor");
    order.push_back(&named);
  }
  std::sort(order.begin(), order.end(), [](const auto* a, const auto* b) {
    const int left = file_rank(a->second.dtype()), right = file_rank(b->second.dtype());
    return std::tie(left, a->first) < std::tie(right, b->first);
  });
  std::map<std::string, int> seen;
  SafetensorsPlan plan;
  for (const auto* named : order) {
    const auto& [name, tensor] = *named;
    check(++seen[name] == 1, "safetensors: ", path, ": two tensors have the name '", shown(name), "'");
    plan.entries.push_back({name, tensor.dtype(), tensor.shape(), plan.bytes, tensor.bytes()});
    plan.tensors.push_back(tensor);
    check(!__builtin_add_overflow(plan.bytes, tensor.bytes(), &plan.bytes), "safetensors: ", path,
          ": more than 2^64 bytes");
  }
  return plan;
}

std::string safetensors_head(const std::string& path, const SafetensorsPlan& plan, const Metadata& metadata) {
  std::string header = "{";
  const char* separator = "";
  if (!metadata.empty()) {
    header += "\"__metadata__\":{";
    for (const auto& [key, value] : metadata) {
      check(key.find('\0') == std::string::npos, "safetensors: ", path, ": a metadata key holds a NUL byte");
      header.append(separator).append(quoted(key, path, "metadata key")).append(":");
      header.append(quoted(value, path, "metadata value"));
      separator = ",";
    }
    header += '}';
    separator = ",";
  }
  for (const SafetensorsEntry& entry : plan.entries) {
    header.append(separator).append(quoted(entry.name, path, "tensor name")).append(":{\"dtype\":\"");
    header.append(safetensors_name(entry.dtype)).append("\",\"shape\":[");
    for (int dim = 0; dim < entry.shape.rank(); ++dim)
      header.append(dim ? "," : "").append(std::to_string(entry.shape[dim]));
    header.append("],\"data_offsets\":[").append(std::to_string(entry.offset)).append(",");
    header.append(std::to_string(entry.offset + entry.bytes)).append("]}");
    separator = ",";
  }
  header += '}';
  header.append((8 - header.size() % 8) % 8, ' ');
  check(header.size() <= kLargestHeader, "safetensors: ", path, ": the header of ", plan.entries.size(),
        " tensors has ", header.size(), " bytes, more than the ", kLargestHeader, " that readers accept");
  const uint64_t length = header.size();
  std::string head(sizeof length, '\0');
  std::memcpy(head.data(), &length, sizeof length);
  return head + header;
}

Tensor file_order(const Tensor& tensor) {
  return tensor.detach().to(Device::cpu()).packed();
}

void save_safetensors(const std::string& path, const NamedTensors& tensors, const Metadata& metadata) {
  const SafetensorsPlan plan = plan_safetensors(path, tensors);
  const std::string head = safetensors_head(path, plan, metadata);
  AtomicFile file(path, head.size() + plan.bytes);
  file.write(head);
  for (const Tensor& tensor : plan.tensors) {
    const Tensor host = file_order(tensor);
    file.write(host.raw(), host.bytes());
  }
  file.publish();
}

SafetensorsFile::SafetensorsFile(InputFile file) : file_(std::move(file)) {
  uint64_t length = 0;
  check(file_.size() >= sizeof length, "safetensors: ", path(), " has ", file_.size(),
        " bytes, too few for a header; the file is cut short or not in this format");
  file_.read(0, &length, sizeof length);
  check(length <= kLargestHeader, "safetensors: ", path(), ": the header claims ", length,
        " bytes, more than the ", kLargestHeader, " allowed; the file is damaged or not in this format");
  const uint64_t rest = file_.size() - sizeof length;
  check(length <= rest, "safetensors: ", path(), ": the header claims ", length, " bytes, but only ", rest,
        " follow: the file is cut short or not in this format");
  head_.resize(size_t(length) + sizeof length);
  file_.read(0, head_.data(), head_.size());
  parse_safetensors_header(path(), std::string_view(head_).substr(sizeof length), rest - length, entries_,
                           metadata_);
  for (size_t i = 0; i < entries_.size(); ++i) {
    entries_[i].offset += head_.size();
    index_.emplace(entries_[i].name, i);
  }
}

const SafetensorsEntry& SafetensorsFile::entry(const std::string& name) const {
  const auto found = index_.find(name);
  if (found == index_.end()) {
    std::vector<std::string> names;
    for (const SafetensorsEntry& entry : entries_) names.push_back(entry.name);
    const std::string near = nearest(name, names);
    fail_at(Site::here(), "safetensors: ", path(), " has no tensor '", shown(name), "' among its ",
            entries_.size(), near.empty() ? "" : "; did you mean '" + shown(near) + "'?");
  }
  return entries_[found->second];
}

void check_bools(const Tensor& tensor, const std::string& path, const std::string& name) {
  if (tensor.dtype() != DType::boolean) return;
  const auto* const bytes = static_cast<const uint8_t*>(tensor.raw());
  const auto* const wrong =
      std::find_if(bytes, bytes + tensor.bytes(), [](uint8_t byte) { return byte > 1; });
  check(wrong == bytes + tensor.bytes(), "read: ", path, ": element ", wrong - bytes, " of the bool tensor '",
        shown(name), "' is ", wrong == bytes + tensor.bytes() ? 0 : int(*wrong), ", expected 0 or 1");
}

Tensor read_entry(const InputFile& file, const SafetensorsEntry& entry) {
  if (entry.integer) return read_file_integers(file, entry.offset, *entry.integer, entry.shape, entry.name);
  const Tensor host = Tensor::empty_packed(entry.shape, entry.dtype, Device::cpu());
  file.read(entry.offset, host.raw(), size_t(entry.bytes));
  return host;
}

Tensor on_device(const Tensor& host, Device device) {
  if (!device.is_cpu()) return host.to(device);
  const bool has_pitch = host.rank() > 1 && row_pitch(host.size(-1), host.dtype()) != host.size(-1);
  return has_pitch ? host.clone() : host;
}

Tensor SafetensorsFile::load(const std::string& name, Device device) const {
  const SafetensorsEntry& found = entry(name);
  const Tensor host = read_entry(file_, found);
  check_bools(host, path(), name);
  return on_device(host, device);
}

Tensor SafetensorsFile::load_rows(const std::string& name, int64_t begin, int64_t end) const {
  SafetensorsEntry part = entry(name);
  check(part.shape.rank() >= 1 && 0 <= begin && begin <= end && end <= part.shape[0], "safetensors: ", path(),
        ": '", shown(name), "' has the shape ", part.shape, ", not rows ", begin, " to ", end);
  const uint64_t row = part.shape[0] > 0 ? part.bytes / uint64_t(part.shape[0]) : 0;
  part.offset += uint64_t(begin) * row;
  part.bytes = uint64_t(end - begin) * row;
  part.shape = part.shape.with(0, end - begin);
  const Tensor host = read_entry(file_, part);
  check_bools(host, path(), name);
  return on_device(host, Device::cpu());
}

std::map<std::string, Tensor> load_safetensors(const std::string& path, Device device) {
  const SafetensorsFile file(path);
  std::map<std::string, Tensor> tensors;
  for (const SafetensorsEntry& entry : file.entries())
    tensors.emplace(entry.name, file.load(entry.name, device));
  return tensors;
}

}  // namespace tessera::io
