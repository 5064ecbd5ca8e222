#include "sparsity/masks.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <span>

#include "io/npy.h"
#include "io/torch_file.h"
#include "io/utf8.h"
#include "ops/bits/bits.h"
#include "runtime/interrupt.h"
#include "runtime/text.h"
#include "sparsity/model_matrices.h"

namespace tessera::sparsity {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFormat = "tessera masks 1";
constexpr int64_t kWordBits = 32;

/// The fields of MaskInfo by their names in the metadata.
template <class Info, class Visit>
void for_each_text(Info& info, Visit&& visit) {
  visit("fingerprint", info.fingerprint), visit("model", info.model), visit("method", info.method);
  visit("pattern", info.pattern), visit("sparsity", info.sparsity), visit("seed", info.seed);
}

nlohmann::json parsed(const std::string& path, const io::Metadata& metadata, const char* key) {
  const auto found = metadata.find(key);
  check(found != metadata.end(), "masks: ", path, ": its metadata has no \"", key,
        "\"; it is damaged, or was not written by tessera prune");
  const nlohmann::json value = nlohmann::json::parse(found->second, nullptr, false);
  check(!value.is_discarded(), "masks: ", path, ": its metadata \"", key, "\" is no JSON; it is damaged");
  return value;
}

/// Throws unless the bits past the last column are zeros: counts of bits would be wrong.
void check_padding(const std::string& path, const std::string& name, const Mask& mask) {
  const int64_t words = mask.words.size(1), tail = mask.columns % kWordBits;
  if (tail == 0) return;
  const auto* const data = mask.words.data<int32_t>();
  for (int64_t r = 0; r < mask.rows(); ++r)
    check(uint32_t(data[(r + 1) * words - 1]) >> tail == 0, "masks: ", path, ": '", io::shown(name), "' row ",
          r, " has bits past its ", mask.columns, " columns; it is damaged");
}

Masks masks_of_folder(const std::string& path) {
  const ModelMatrices model(path);
  Masks masks{.info = {.model = io::utf8_name(path)}, .layers = {}};
  for (const ModelMatrices::Matrix& matrix : model.all()) {
    check_interrupt();
    masks.layers.emplace_back(matrix.name, mask_of(model.load(matrix)));
  }
  return masks;
}

void check_finite(const std::string& path, const Tensor& matrix) {
  if (!is_floating(matrix.dtype())) return;
  const Tensor rows = matrix.to(DType::f64).packed();
  const auto values = std::span(rows.data<double>(), size_t(rows.count()));
  const auto found = std::ranges::find_if_not(values, [](double value) { return std::isfinite(value); });
  const int64_t at = found - values.begin(), columns = matrix.size(1);
  check(found == values.end(), "masks: ", path, " has a value that is not finite at [", at / columns, ", ",
        at % columns, "]; expected the weights of a pruned matrix, or its mask");
}

Masks masks_of_matrix(const std::string& path, const Tensor& matrix) {
  check(matrix.rank() == 2 && matrix.count() > 0, "masks: ", path, " holds ", describe(matrix),
        "; expected a matrix [rows, columns]");
  check_finite(path, matrix);
  Masks masks;
  std::string name = fs::path(path).stem().string();
  check(io::is_utf8(name), "masks: the name of ", path, " is not UTF-8; rename the file");
  if (const auto parsed = parse_matrix_file_name(name)) {
    name = "layers." + std::to_string(parsed->block) + "." + parsed->component;
    masks.info.pattern = parsed->pattern, masks.info.sparsity = parsed->sparsity;
  }
  masks.layers.emplace_back(name, mask_of(matrix));
  return masks;
}

}  // namespace

std::optional<MatrixFileName> parse_matrix_file_name(const std::string& stem) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin <= stem.size();) {
    const size_t end = std::min(stem.find('-', begin), stem.size());
    parts.push_back(stem.substr(begin, end - begin));
    begin = end + 1;
  }
  const auto is_number = [](const std::string& text) {
    return !text.empty() && text.size() < 10 && text.find_first_not_of("0123456789") == std::string::npos;
  };
  if (parts.size() < 4 || parts.size() > 5 || !parts[0].starts_with("layer") || parts[1].empty()) return {};
  const std::string layer = parts[0].substr(5);
  if (!is_number(layer) || !is_number(parts[2]) || !is_number(parts[3])) return {};
  MatrixFileName name{.block = std::stoll(layer), .component = parts[1]};
  name.pattern = parts[2] == "0" && parts[3] == "0" ? "unstructured" : parts[2] + ":" + parts[3];
  if (parts.size() == 5) {
    if (parts[4].empty() || parts[4].find_first_not_of("0123456789._") != std::string::npos) return {};
    name.sparsity = parts[4];
    std::replace(name.sparsity.begin(), name.sparsity.end(), '_', '.');
  }
  return name;
}

Tensor read_matrix_file(const std::string& path) {
  if (fs::path(path).extension() == ".npy") return io::load_npy(path);
  const io::TorchFile file(path);
  check(file.entries().size() == 1, "masks: ", path, " holds ", file.entries().size(),
        " tensors; expected one matrix, or a folder with a whole model and its config.json");
  return file.load(file.entries()[0].name);
}

int64_t Mask::ones() const {
  const auto* const data = words.data<int32_t>();
  int64_t sum = 0;
  for (int64_t i = 0; i < words.count(); ++i) sum += std::popcount(uint32_t(data[i]));
  return sum;
}

bool Mask::at(int64_t row, int64_t column) const {
  check(0 <= row && row < rows() && 0 <= column && column < columns, "mask: row ", row, ", column ", column,
        " of a mask of ", rows(), " x ", columns);
  return uint32_t(words.data<int32_t>()[row * words.size(1) + column / kWordBits]) >> (column % kWordBits) &
         1;
}

Tensor Mask::unpacked() const {
  const Tensor dense = Tensor::empty_packed({rows(), columns}, DType::u8, Device::cpu());
  auto* const to = dense.data<uint8_t>();
  const auto* const from = words.data<int32_t>();
  for (int64_t r = 0; r < rows(); ++r)
    for (int64_t c = 0; c < columns; ++c)
      to[r * columns + c] = uint32_t(from[r * words.size(1) + c / kWordBits]) >> (c % kWordBits) & 1;
  return dense;
}

Mask mask_of(const Tensor& weight) {
  check(weight.defined() && weight.rank() == 2, "mask_of: expected a matrix [rows, columns]");
  const Tensor matrix = weight.detach();
  // What is no operand widens to f32 without becoming 0 or ceasing to be.
  const bool packs = is_floating(matrix.dtype()) && matrix.dtype() != DType::f8e4m3 &&
                     (matrix.dtype() != DType::f64 || matrix.device().is_cpu());
  const Tensor words = ops::pack_bits(packs ? matrix : matrix.to(DType::f32));
  return {words.to(Device::cpu()).packed(), matrix.size(1)};
}

bool Masks::has(const std::string& name) const {
  return std::any_of(layers.begin(), layers.end(), [&](const auto& layer) { return layer.first == name; });
}

const Mask& Masks::at(const std::string& name) const {
  std::vector<std::string> names;
  for (const auto& [own, mask] : layers) {
    if (own == name) return mask;
    names.push_back(own);
  }
  const std::string near = nearest(name, names);
  fail_at(Site::here(), "masks: there is no mask of '", io::shown(name), "'",
          near.empty() ? "" : "; did you mean '" + io::shown(near) + "'?");
}

void save_masks(const std::string& path, const Masks& masks) {
  io::NamedTensors tensors;
  nlohmann::ordered_json columns = nlohmann::ordered_json::object(), order = nlohmann::ordered_json::array();
  for (const auto& [name, mask] : masks.layers) {
    check(mask.words.size(1) == ops::bit_words(mask.columns), "save_masks: '", name, "' has ",
          mask.words.size(1), " words per row for ", mask.columns, " columns");
    tensors.emplace_back(name, mask.words);
    columns[name] = mask.columns;
    order.push_back(name);
  }
  io::Metadata metadata{{"format", kFormat}, {"columns", columns.dump()}, {"order", order.dump()}};
  for_each_text(masks.info, [&](const char* key, const std::string& text) { metadata[key] = text; });
  io::save_safetensors(path, tensors, metadata);
}

Masks load_masks(const std::string& path) {
  const io::SafetensorsFile file(path);
  const io::Metadata& metadata = file.metadata();
  const auto format = metadata.find("format");
  check(format != metadata.end() && format->second == kFormat, "masks: ", path,
        " is no file of masks (its format is '", format == metadata.end() ? "" : io::shown(format->second),
        "', expected '", kFormat, "'); give masks.safetensors of a pruned model, or the folder of the model");
  const nlohmann::json columns = parsed(path, metadata, "columns"), order = parsed(path, metadata, "order");
  check(columns.is_object() && order.is_array() && columns.size() == file.entries().size() &&
            order.size() == file.entries().size(),
        "masks: ", path, ": its metadata does not list its ", file.entries().size(),
        " matrices; it is damaged");
  Masks masks;
  for_each_text(masks.info, [&](const char* key, std::string& text) {
    if (const auto found = metadata.find(key); found != metadata.end()) text = found->second;
  });
  std::set<std::string> seen;
  for (const nlohmann::json& entry : order) {
    const std::string name = entry.is_string() ? entry.get<std::string>() : "";
    check(file.has(name) && columns.contains(name) && columns[name].is_number_integer() &&
              seen.insert(name).second,
          "masks: ", path, ": its metadata does not describe '", io::shown(name), "'; it is damaged");
    const io::SafetensorsEntry& stored = file.entry(name);
    const auto count = columns[name].get<int64_t>();
    check(stored.dtype == DType::i32 && stored.shape.rank() == 2 && count >= 1 &&
              count <= stored.shape[1] * kWordBits && stored.shape[1] == ops::bit_words(count),
          "masks: ", path, ": '", io::shown(name), "' is ", stored.dtype, stored.shape, " for ", count,
          " columns; expected i32 [rows, ceil(columns / 32)]");
    masks.layers.emplace_back(name, Mask{file.load(name).packed(), count});
    check_padding(path, name, masks.layers.back().second);
  }
  return masks;
}

Masks read_masks(const std::string& path) {
  std::error_code ignored;
  if (fs::is_directory(path, ignored)) return masks_of_folder(path);
  const bool is_matrix = fs::path(path).extension() == ".npy" || io::is_torch_file(io::InputFile(path));
  return is_matrix ? masks_of_matrix(path, read_matrix_file(path)) : load_masks(path);
}

void check_same_model(const Masks& a, const Masks& b) {
  const std::string &first = a.info.fingerprint, &second = b.info.fingerprint;
  check(first.empty() || second.empty() || first == second,
        "masks: they are of two models: the fingerprints of the dense models are ", first, " and ", second,
        "; prune the same model for both");
  for (const auto& [name, mask] : a.layers) {
    const Mask& other = b.at(name);
    check(mask.rows() == other.rows() && mask.columns == other.columns, "masks: '", io::shown(name), "' is ",
          mask.rows(), " x ", mask.columns, " in one and ", other.rows(), " x ", other.columns,
          " in the other; they are of two models");
  }
  for (const auto& [name, mask] : b.layers) a.at(name);
}

}  // namespace tessera::sparsity
