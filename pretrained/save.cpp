#include <algorithm>
#include <nlohmann/json.hpp>

#include "io/file.h"
#include "nn/low_rank.h"
#include "nn/narrowed.h"
#include "nn/weights24.h"
#include "pretrained/companions_internal.h"
#include "pretrained/load.h"
#include "pretrained/sparse_file.h"

namespace tessera::pretrained {
namespace {

/// The part of our tensor that is theirs, as a view.
Tensor part_of(const Tensor& ours, const NameRule& rule, int64_t row, int64_t rows) {
  const Tensor part = ours.detach().slice(0, row, row + rows);
  return rule.transposed ? part.transpose(0, 1) : part;
}

/// The text of config.json with kColaField.
std::string with_field(const std::string& text, const std::optional<ColaConfig>& cola) {
  if (!cola) return text;
  nlohmann::json config = nlohmann::json::parse(text);
  config[kColaField] = {{"attention_rank", cola->attention_rank},
                        {"mlp_rank", cola->mlp_rank},
                        {"activation", cola->activation == ops::Activation::relu_squared ? "relu2" : "silu"},
                        {"model_type", config.at("model_type")}};
  config["model_type"] = kColaField;
  return config.dump(2) + "\n";
}

template <class Model>
void save_model(const Model& model, const std::string& folder, const SaveOptions& options) {
  auto config = model.config;
  if (options.dtype) config.dtype = *options.dtype;
  check(config.dtype == DType::f32 || config.dtype == DType::bf16 || config.dtype == DType::f16,
        "save: parameters of ", config.dtype, "; expected f32, bf16 or f16");
  // All tensors, also frozen ones (nn::freeze), which are not among nn::parameters.
  // Weights that factors or a mask stand for are made one by one, when they are written.
  std::map<std::string, std::function<Tensor()>> parameters;
  nn::for_each<Tensor>(model, [&](const std::string& name, const Tensor& tensor) {
    if (tensor.defined()) parameters.emplace(name, [tensor] { return tensor; });
  });
  nn::for_each<nn::Linear>(model, [&](const std::string& name, const nn::Linear& layer) {
    if (nn::factors_of(layer.form) && nn::merges(layer.form))
      parameters.emplace(name + ".weight", [&layer] { return nn::merged_weight(layer); });
    else if (nn::weights24_of(layer))
      parameters.at(name + ".weight") = [&layer] { return nn::masked_weight(layer); };
  });
  const std::optional<ColaConfig> cola = cola_of(model);
  const NameTable plain = name_table(config), table = cola ? with_cola(plain, *cola) : plain;
  std::vector<io::WeightToWrite> weights;
  for (const NameRule& rule : table.rules) {
    const auto found = parameters.find(rule.ours);
    check(found != parameters.end(), "save: '", rule.ours,
          "' is no dense parameter; a compressed model is written by convert_sparse alone");
    for_each_part(rule, [&](const NameRule::Part& part, int64_t row, int64_t rows) {
      weights.push_back(
          {{part.theirs, config.dtype, part.shape}, [=, ours = found->second, dtype = config.dtype] {
             return nn::narrowed(part_of(ours(), rule, row, rows), dtype, part.theirs);
           }});
    });
  }
  io::AtomicFolder files(folder, io::AtomicFolder::Existing::merge, io::check_no_weights);
  io::save_weights(files.path(), weights, options.shard_bytes);
  check(!cola || options.companions.empty(),
        "save: a model of cola layers has a config.json of its own; it cannot be that of ",
        options.companions);
  if (options.companions.empty())
    io::write_file(files.path() + "/config.json", with_field(config_text(config), cola));
  else
    copy_companions(options.companions, files.path(), config.dtype, {});
  files.publish();
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
  check(!is_sparse_folder(from), "convert: ", from,
        " is compressed; --format dense makes a dense model of it");
  const io::WeightSource source(from);
  Conversion done;
  std::vector<io::WeightToWrite> weights;
  const auto add = [&](const std::string& theirs, const std::string& in_file) {
    const io::WeightEntry& entry = source.entry(in_file);
    const DType dtype = options.dtype && is_floating(entry.dtype) ? *options.dtype : entry.dtype;
    weights.push_back({{theirs, dtype, entry.shape}, [&source, in_file, dtype] {
                         return nn::narrowed(source.load(in_file), dtype, in_file);
                       }});
    done.tensors += 1;
    done.bytes += uint64_t(entry.shape.count()) * size_of(dtype);
  };
  if (io::is_folder(from) && is_file(from + "/config.json")) {
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
  io::AtomicFolder files(to, io::AtomicFolder::Existing::merge, check_no_model);
  io::save_weights(files.path(), weights, options.shard_bytes);
  copy_companions(from, files.path(), options.dtype, config_options.ignored_fields);
  files.publish();
  return done;
}

}  // namespace tessera::pretrained
