#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "pretrained/load.h"

namespace tessera::pretrained {
namespace {

/// The part of our tensor that is theirs, as a view.
Tensor part_of(const Tensor& ours, const NameRule& rule, int64_t row, int64_t rows) {
  const Tensor part = ours.detach().slice(0, row, row + rows);
  return rule.transposed ? part.transpose(0, 1) : part;
}

template <class Model>
void save_model(const Model& model, const std::string& folder, const SaveOptions& options) {
  auto config = model.config;
  if (options.dtype) config.dtype = *options.dtype;
  check(config.dtype == DType::f32 || config.dtype == DType::bf16 || config.dtype == DType::f16,
        "save: parameters of ", config.dtype, "; expected f32, bf16 or f16");
  std::map<std::string, Tensor> parameters;
  for (const auto& [name, tensor] : nn::parameters(model)) parameters.emplace(name, tensor);
  std::vector<io::WeightToWrite> weights;
  for (const NameRule& rule : name_table(config).rules) {
    const Tensor ours = parameters.at(rule.ours);
    for_each_part(rule, [&](const NameRule::Part& part, int64_t row, int64_t rows) {
      weights.push_back({{part.theirs, config.dtype, part.shape},
                         [=, dtype = config.dtype] { return part_of(ours, rule, row, rows).to(dtype); }});
    });
  }
  io::check_no_weights(folder);
  io::AtomicFolder files(folder, io::AtomicFolder::Existing::merge);
  io::save_weights(files.path(), weights, options.shard_bytes);
  io::write_file(files.path() + "/config.json", config_text(config));
  files.publish();
}

/// What a folder holds besides weights that its user needs.
constexpr const char* kCompanions[] = {"config.json", "generation_config.json",  "tokenizer.json",
                                       "vocab.json",  "tokenizer_config.json",   "merges.txt",
                                       "vocab.txt",   "special_tokens_map.json", "tokenizer.model",
                                       "LICENSE",     "added_tokens.json"};

/// A config.json that says what the weights are now, since loaders believe it, and has no field
/// that was to be ignored, since other programs would not.
std::string adapted(const std::string& config, std::optional<DType> dtype,
                    const std::set<std::string>& ignored) {
  auto fields = nlohmann::ordered_json::parse(config);
  const bool is_new = fields.contains("dtype");
  if (dtype && is_new) fields["dtype"] = dtype_name(*dtype);
  if (dtype && (!is_new || fields.contains("torch_dtype"))) fields["torch_dtype"] = dtype_name(*dtype);
  for (const std::string& field : ignored) {
    fields.erase(field);
    for (const char* const part : {"rope_scaling", "rope_parameters"})
      if (fields.contains(part) && fields[part].is_object()) fields[part].erase(field);
  }
  return fields.dump(2) + "\n";
}

bool is_folder(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::is_directory(path, ignored);
}

bool is_file(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::is_regular_file(path, ignored);
}

}  // namespace

io::NamedTensors export_tensors(const io::NamedTensors& ours, const NameTable& table) {
  const std::map<std::string, Tensor> by_name(ours.begin(), ours.end());
  io::NamedTensors theirs;
  for (const NameRule& rule : table.rules) {
    const auto found = by_name.find(rule.ours);
    if (found == by_name.end() || !found->second.defined()) continue;
    for_each_part(rule, [&](const NameRule::Part& part, int64_t row, int64_t rows) {
      theirs.emplace_back(part.theirs, part_of(found->second, rule, row, rows));
    });
  }
  return theirs;
}

void save(const models::Gpt& model, const std::string& folder, const SaveOptions& options) {
  save_model(model, folder, options);
}
void save(const models::Llama& model, const std::string& folder, const SaveOptions& options) {
  save_model(model, folder, options);
}
void save(const models::Bert& model, const std::string& folder, const SaveOptions& options) {
  save_model(model, folder, options);
}

Conversion convert(const std::string& from, const std::string& to, const SaveOptions& options,
                   const ConfigOptions& config_options) {
  const io::WeightSource source(from);
  Conversion done;
  std::vector<io::WeightToWrite> weights;
  const auto add = [&](const std::string& theirs, const std::string& in_file) {
    const io::WeightEntry& entry = source.entry(in_file);
    const DType dtype = options.dtype && is_floating(entry.dtype) ? *options.dtype : entry.dtype;
    weights.push_back(
        {{theirs, dtype, entry.shape}, [&source, in_file, dtype] { return source.load(in_file).to(dtype); }});
    done.tensors += 1;
    done.bytes += uint64_t(entry.shape.count()) * size_of(dtype);
  };
  if (is_folder(from) && is_file(from + "/config.json")) {
    const Config config = read_config(from, config_options);
    const NameTable table = std::visit([](const auto& model) { return name_table(model); }, config.model);
    const Matched matched = match_names(table, source, true);
    for (const NameRule& rule : table.rules)
      for (const NameRule::Part& part : rule.parts)
        if (const auto found = matched.names.find(part.theirs); found != matched.names.end())
          add(part.theirs, found->second);
    // Heads and a pooler that this model has not belong to the file all the same.
    for (const std::string& name : matched.report.ignored)
      if (const std::string theirs = name_of_other(table, name); !theirs.empty())
        add(theirs, name);
      else
        done.ignored.push_back(name);
  } else {
    for (const io::WeightEntry& entry : source.entries()) add(entry.name, entry.name);
  }
  done.ignored.insert(done.ignored.end(), source.others().begin(), source.others().end());
  io::check_no_weights(to);
  io::AtomicFolder files(to, io::AtomicFolder::Existing::merge);
  io::save_weights(files.path(), weights, options.shard_bytes);
  constexpr uint64_t kMost = uint64_t{256} << 20;  // of a tokenizer
  for (const char* const name : kCompanions) {
    if (!is_folder(from) || !is_file(from + "/" + name)) continue;
    const std::string text = io::read_file(from + "/" + name, kMost);
    const bool other =
        std::string_view(name) == "config.json" && (options.dtype || !config_options.ignored_fields.empty());
    io::write_file(files.path() + "/" + name,
                   other ? adapted(text, options.dtype, config_options.ignored_fields) : text);
  }
  files.publish();
  return done;
}

}  // namespace tessera::pretrained
