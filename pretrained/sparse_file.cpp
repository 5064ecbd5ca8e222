#include "pretrained/sparse_file.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "io/checksum.h"
#include "io/weights.h"
#include "nn/narrowed.h"
#include "pretrained/companions_internal.h"
#include "pretrained/fingerprint.h"
#include "pretrained/load.h"
#include "runtime/interrupt.h"

namespace tessera::pretrained {
namespace {

using nlohmann::json;

constexpr const char* kVersion = "2";
constexpr const char* kVersionBefore = "1";  // its sell_delta4 sorted each column part's rows by themselves
constexpr const char* kArrays[] = {"values", "bitmaps", "gaps", "offsets", "info"};

constexpr std::string_view kWeightEnd = ".weight";

std::string checksum_of(const Tensor& tensor) {
  const Tensor packed = tensor.to(Device::cpu()).packed();
  io::Xxh3 sum;
  sum.add(packed.raw(), packed.bytes());
  return sum.digits();
}

std::string checksum_of(const io::Metadata& metadata) {
  io::Xxh3 sum;
  for (const char* const key : {"tessera_sparse", "layers", "checksums", "fingerprint"})
    sum.add(metadata.at(key) + "\n");
  return sum.digits();
}

bool is_of_block(const std::string& ours) {
  return ours.starts_with("blocks.");
}

/// An array of a compressed weight, by its name in the file.
Tensor& array_of(ops::SparseWeight& weight, std::string_view name) {
  return name == "values"    ? weight.values
         : name == "bitmaps" ? weight.bitmaps
         : name == "gaps"    ? weight.gaps
         : name == "offsets" ? weight.offsets
                             : weight.info;
}

bool has_array(ops::SparseFormat format, std::string_view name) {
  using enum ops::SparseFormat;
  if (name == "values") return true;
  if (name == "bitmaps") return format == tiled_cbc || format == tca_bme;
  if (name == "gaps") return ops::has_distances(format);
  return format != dense_columns;
}

}  // namespace

bool is_sparse_folder(const std::string& folder) {
  return is_file(folder + "/" + kSparseFile);
}

void check_no_model(const std::string& folder) {
  check(!is_sparse_folder(folder), "convert: ", folder, " has weights already, in ", kSparseFile,
        "; name another folder");
  io::check_no_weights(folder);
}

// ---- reading ----

namespace {

/// A field of the file's metadata.
const std::string& metadata_of(const io::SafetensorsFile& file, const std::string& key) {
  const auto found = file.metadata().find(key);
  check(found != file.metadata().end(), "sparse weights: ", file.path(), " has no '", key,
        "' in its metadata; expected a file of tessera convert --format");
  return found->second;
}

/// Of 10,000 layers; what is parsed takes some 30 times as much memory.
constexpr size_t kMostText = size_t{1} << 20;

json object_of(const io::SafetensorsFile& file, const std::string& key) {
  const std::string& text = metadata_of(file, key);
  check(text.size() <= kMostText, "sparse weights: ", file.path(), ": '", key, "' in its metadata has ",
        text.size(), " bytes; expected at most ", kMostText);
  json object = json::parse(text, nullptr, false);
  check(object.is_object(), "sparse weights: ", file.path(), ": '", key,
        "' in its metadata is no JSON object");
  return object;
}

int64_t number_of(const json& value, const std::string& where) {
  check(
      value.is_number_integer() && !(value.is_number_unsigned() && value.get<uint64_t>() > uint64_t{1} << 62),
      where, " is no whole number");
  return value.get<int64_t>();
}

SparseLayer layer_of(const std::string& path, const std::string& name, const json& fields) {
  const std::string where = "sparse weights: " + path + ": layer '" + io::shown(name) + "'";
  for (const char* const key : {"format", "shape", "stored", "most"})
    check(fields.is_object() && fields.contains(key), where, " has no '", key, "'");
  const json &format = fields["format"], &shape = fields["shape"];
  check(format.is_string() && shape.is_array() && shape.size() == 2, where,
        ": expected a format's name and a shape of two numbers");
  return {.name = name,
          .format = ops::parse_sparse_format(format.get<std::string>()),
          .out = number_of(shape[0], where + ": shape"),
          .in = number_of(shape[1], where + ": shape"),
          .stored = number_of(fields["stored"], where + ": stored"),
          .most = number_of(fields["most"], where + ": most")};
}

}  // namespace

SparseFile::SparseFile(const std::string& folder) : file_(folder + "/" + kSparseFile) {
  const std::string& version = metadata_of(file_, "tessera_sparse");
  check(version == kVersion || version == kVersionBefore, "sparse weights: ", path(), " has version ",
        io::shown(version), " of the format; this program reads versions ", kVersionBefore, " and ", kVersion,
        "; compress the model again (tessera convert)");
  fingerprint_ = metadata_of(file_, "fingerprint");
  for (const char* const key : {"layers", "checksums"}) metadata_of(file_, key);
  check(metadata_of(file_, "checksum") == checksum_of(file_.metadata()), "sparse weights: ", path(),
        ": the metadata do not agree with their checksum; the file is damaged, convert the model again");
  const json layers = object_of(file_, "layers"), checksums = object_of(file_, "checksums");
  for (const auto& [name, fields] : layers.items()) {
    layers_.emplace(name, layer_of(path(), name, fields));
    check(
        version == kVersion || layers_.at(name).format != ops::SparseFormat::sell_delta4,
        "sparse weights: ", path(), ": layer '", io::shown(name), "' is sell-delta4 of version ", version,
        " of the format, which version ", kVersion,
        " stores differently; compress the dense model again (tessera convert), which the program that wrote "
        "the file gives back with convert --format dense");
  }
  for (const auto& [name, sum] : checksums.items()) {
    check(sum.is_string(), "sparse weights: ", path(), ": the checksum of '", io::shown(name),
          "' is no text");
    checksums_.emplace(name, sum.get<std::string>());
  }
  for (const io::SafetensorsEntry& entry : file_.entries())
    check(checksums_.contains(entry.name), "sparse weights: ", path(), ": tensor '", io::shown(entry.name),
          "' has no checksum");
}

DType SparseFile::dtype() const {
  for (const io::SafetensorsEntry& entry : file_.entries())
    if (is_floating(entry.dtype)) return entry.dtype;
  return DType::f32;
}

std::vector<std::string> SparseFile::dense_names() const {
  std::map<std::string, bool> of_layers;
  for (const auto& [name, layer] : layers_)
    for (const char* const array : kArrays) of_layers[name + ".weight." + array] = true;
  std::vector<std::string> names;
  for (const io::SafetensorsEntry& entry : file_.entries())
    if (!of_layers.contains(entry.name)) names.push_back(entry.name);
  return names;
}

Tensor SparseFile::load(const std::string& tensor) const {
  check(has(tensor), "sparse weights: ", path(), " has no tensor '", io::shown(tensor), "'");
  const Tensor loaded = file_.load(tensor);
  check(checksums_.at(tensor) == checksum_of(loaded), "sparse weights: ", path(), ": tensor '",
        io::shown(tensor),
        "' does not agree with its checksum; the file is damaged, convert the model again");
  return loaded;
}

ops::SparseWeight SparseFile::load(const SparseLayer& layer) const {
  ops::SparseWeight weight{
      .format = layer.format, .out = layer.out, .in = layer.in, .stored = layer.stored, .most = layer.most};
  for (const char* const array : kArrays)
    if (has_array(layer.format, array)) array_of(weight, array) = load(layer.name + ".weight." + array);
  ops::validate(weight, "sparse weights: " + path() + ": layer '" + io::shown(layer.name) + "'");
  return weight;
}

// ---- conversion ----

namespace {

/// The matrix [out, in] with zeros for -0, whose number is added to `count`. Throws for what is not finite.
Tensor cleaned(const Tensor& given, const std::string& name, int64_t& count) {
  const Tensor matrix = given.clone();
  dispatch_floating(matrix.dtype(), "convert", [&]<class T>() {
    for (int64_t r = 0; r < matrix.size(0); ++r) {
      T* const row = matrix.data<T>() + r * matrix.layout().stride(0);
      for (int64_t c = 0; c < matrix.size(1); ++c) {
        const float value = float(row[c]);
        check(std::isfinite(value), "convert: weight '", io::shown(name), "' has ", value, " in row ", r,
              ", column ", c, "; a compressed model needs finite weights");
        if (value == 0 && std::signbit(value)) row[c] = T(0.0f), ++count;
      }
    }
  });
  return matrix;
}

/// Compresses and collects the tensors of the file.
class Compressor {
 public:
  Compressor(ops::SparseFormat format, DType dtype) : format_(format) { done.dtype = dtype; }

  void add_dense(const std::string& name, const Tensor& tensor) {
    const Tensor kept = nn::narrowed(tensor, done.dtype, name);
    done.bytes += kept.bytes(), done.dense_bytes += kept.bytes();
    add(name, kept);
  }
  /// matrix: [out, in]
  void add_layer(const std::string& name, const Tensor& matrix) {
    check_interrupt();
    const Tensor clean = cleaned(nn::narrowed(matrix, done.dtype, name), name, done.negative_zeros);
    add_to_fingerprint(fingerprint_, name, clean);
    ops::SparseWeight weight = ops::compress(clean, format_);
    done.layers.push_back({{name, format_, weight.out, weight.in, weight.stored, weight.most},
                           weight.bytes(),
                           weight.dense_bytes()});
    done.bytes += weight.bytes(), done.dense_bytes += weight.dense_bytes();
    layers_[name] = {{"format", ops::name_of(format_)},
                     {"shape", {weight.out, weight.in}},
                     {"stored", weight.stored},
                     {"most", weight.most}};
    for (const char* const array : kArrays)
      if (const Tensor& tensor = array_of(weight, array); tensor.defined())
        add(name + ".weight." + array, tensor);
  }
  void write(const std::string& path) {
    done.fingerprint = fingerprint_.digits();
    io::Metadata metadata{{"tessera_sparse", kVersion},
                          {"layers", layers_.dump()},
                          {"checksums", checksums_.dump()},
                          {"fingerprint", done.fingerprint}};
    metadata["checksum"] = checksum_of(metadata);
    io::save_safetensors(path, tensors_, metadata);
  }
  SparseConversion done;

 private:
  void add(const std::string& name, const Tensor& tensor) {
    checksums_[name] = checksum_of(tensor);
    tensors_.emplace_back(name, tensor);
  }
  ops::SparseFormat format_;
  io::Xxh3 fingerprint_;
  json layers_ = json::object(), checksums_ = json::object();
  io::NamedTensors tensors_;
};

}  // namespace

std::string module_of(const NameRule::Part& weight) {
  return weight.theirs.substr(0, weight.theirs.size() - kWeightEnd.size());
}

bool is_compressed_rule(const NameRule& rule) {
  return is_of_block(rule.ours) && rule.ours.ends_with(kWeightEnd) && rule.parts.at(0).shape.rank() == 2;
}

SparseConversion convert_sparse(const std::string& from, const std::string& to, ops::SparseFormat format,
                                std::optional<DType> dtype, const ConfigOptions& config_options,
                                const std::string& fingerprint) {
  check(!is_sparse_folder(from), "convert: the weights of ", from,
        " are compressed already; --format dense makes a dense model of them");
  const Config config = read_config(from, config_options);
  check(!std::holds_alternative<models::BertConfig>(config.model), "convert: ", from, " holds a ",
        config.type,
        "; compressed weights are for causal language models (gpt2, opt, llama, mistral, qwen2, qwen3, phi3, "
        "arcee)");
  const io::WeightSource source(from);
  const NameTable table = std::visit([](const auto& model) { return name_table(model); }, config.model);
  const Matched matched = match_names(table, source, false);
  io::AtomicFolder files(to, io::AtomicFolder::Existing::merge, check_no_model);
  Compressor compressor(format, dtype.value_or(stored_dtype(source)));
  io::Xxh3 found;
  for (const NameRule& rule : table.rules)
    for (const NameRule::Part& part : rule.parts) {
      const Tensor tensor = source.load(matched.names.at(part.theirs));
      if (!is_compressed_rule(rule)) {
        compressor.add_dense(part.theirs, tensor);
        continue;
      }
      const Tensor matrix = rule.transposed ? tensor.transpose(0, 1) : tensor;
      if (!fingerprint.empty()) add_to_fingerprint(found, module_of(part), matrix);
      compressor.add_layer(module_of(part), matrix);
    }
  if (!fingerprint.empty()) {
    const std::string digits = found.digits();
    check(digits == fingerprint, "convert: the weights of ", from, " have the fingerprint ", digits,
          ", and the pruning or calibration that they should come from ", fingerprint,
          ": they do not belong together; calibrate this model, or prune again");
  }
  compressor.write(files.path() + "/" + kSparseFile);
  copy_companions(from, files.path(), compressor.done.dtype, config_options.ignored_fields);
  files.publish();
  return compressor.done;
}

Conversion convert_dense(const std::string& from, const std::string& to, uint64_t shard_bytes,
                         const ConfigOptions& config_options) {
  check(is_sparse_folder(from), "convert: --format dense: ", from, " has no ", kSparseFile,
        ", so nothing in it is compressed");
  const Config config = read_config(from, config_options);
  const NameTable table = std::visit([](const auto& model) { return name_table(model); }, config.model);
  const SparseFile file(from);
  check_fits(table, file);
  Conversion done;
  std::vector<io::WeightToWrite> weights;
  for (const NameRule& rule : table.rules)
    for (const NameRule::Part& part : rule.parts) {
      const auto layer = file.layers().find(module_of(part));
      const bool is_layer = is_compressed_rule(rule);
      const DType dtype = file.entry(part.theirs + (is_layer ? ".values" : "")).dtype;
      weights.push_back({{part.theirs, dtype, part.shape}, [&file, &rule, &part, layer, is_layer] {
                           if (!is_layer) return file.load(part.theirs);
                           const Tensor dense = ops::to_dense(file.load(layer->second));
                           return rule.transposed ? dense.transpose(0, 1) : dense;
                         }});
      done.tensors += 1;
      done.bytes += uint64_t(part.shape.count()) * size_of(dtype);
    }
  io::AtomicFolder files(to, io::AtomicFolder::Existing::merge, check_no_model);
  io::save_weights(files.path(), weights, shard_bytes);
  copy_companions(from, files.path(), {}, config_options.ignored_fields);
  files.publish();
  return done;
}

void check_fits(const NameTable& table, const SparseFile& file) {
  std::map<std::string, bool> expected;
  for (const NameRule& rule : table.rules)
    for (const NameRule::Part& part : rule.parts) {
      if (is_compressed_rule(rule)) {
        const std::string name = module_of(part);
        const auto layer = file.layers().find(name);
        check(layer != file.layers().end(), "sparse weights: ", file.path(), " lacks layer '", name,
              "' of the model of config.json");
        const Shape shape{layer->second.out, layer->second.in},
            wanted = rule.transposed ? Shape{part.shape[1], part.shape[0]} : part.shape;
        check(shape == wanted, "sparse weights: ", file.path(), ": layer '", name, "' is ", shape,
              "; config.json says ", wanted);
        check(file.has(part.theirs + ".values"), "sparse weights: ", file.path(), " has no tensor '",
              part.theirs, ".values'");
        expected[name] = true;
      } else {
        check(file.has(part.theirs), "sparse weights: ", file.path(), " lacks tensor '", part.theirs,
              "' of the model of config.json");
        const io::SafetensorsEntry& entry = file.entry(part.theirs);
        check(entry.shape == part.shape && is_floating(entry.dtype), "sparse weights: ", file.path(),
              ": tensor '", part.theirs, "' is ", entry.dtype, entry.shape, "; config.json says ",
              part.shape);
        expected[part.theirs] = true;
      }
    }
  for (const auto& [name, layer] : file.layers())
    check(expected.contains(name), "sparse weights: ", file.path(), " has layer '", io::shown(name),
          "', which the model of config.json has not");
  for (const std::string& name : file.dense_names())
    check(expected.contains(name), "sparse weights: ", file.path(), " has tensor '", io::shown(name),
          "', which the model of config.json has not");
}

}  // namespace tessera::pretrained
