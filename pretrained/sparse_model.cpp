#include "pretrained/sparse_model.h"

#include <algorithm>

#include "nn/form.h"
#include "nn/narrowed.h"
#include "ops/variant.h"
#include "pretrained/check_gates.h"
#include "pretrained/fingerprint.h"
#include "runtime/text.h"

namespace tessera::pretrained {
namespace {

using ops::text_of;

/// Fills a model from a file: dense tensors into parameters, compressed ones into the forms of their layers.
template <class Model>
class Filler {
 public:
  Filler(Model& model, const NameTable& table, const SparseFile& file, bool dense)
      : model_(model), file_(file), dense_(dense) {
    for (const NameRule& rule : table.rules) rules_.emplace(rule.ours, &rule);
  }

  /// Fills the parameters that the model has by now and that are not filled yet.
  void fill() {
    std::map<std::string, nn::Linear*> layers;
    nn::for_each<nn::Linear>(model_, [&](const std::string& ours, nn::Linear& layer) {
      layers.emplace(ours + ".weight", &layer);
    });
    for (const auto& [name, parameter] : nn::parameters(model_)) {
      if (!done_.insert(name).second) continue;
      const NameRule& rule = *rules_.at(name);
      if (is_compressed_rule(rule) && !dense_) {
        nn::Linear& layer = *layers.at(name);
        const Device device = layer.weight.device();
        nn::Compressed form;
        for (const NameRule::Part& part : rule.parts)
          form.parts.push_back({file_.load(file_.layers().at(module_of(part))).to(device), {}});
        layer.weight = Tensor();
        layer.form = std::move(form);
        continue;
      }
      for_each_part(rule, [&, &parameter = parameter](const NameRule::Part& part, int64_t row, int64_t rows) {
        const Tensor to = parameter.detach().slice(0, row, row + rows);
        if (is_compressed_rule(rule)) {
          nn::copy_narrowed(to, ops::to_dense(file_.load(file_.layers().at(module_of(part)))), part.theirs);
          return;
        }
        const Tensor tensor = file_.load(part.theirs);
        nn::copy_narrowed(to, rule.transposed ? tensor.transpose(0, 1) : tensor, part.theirs);
      });
    }
  }

 private:
  Model& model_;
  const SparseFile& file_;
  bool dense_;
  std::map<std::string, const NameRule*> rules_;
  std::set<std::string> done_;
};

/// On a GPU weights and activations have one dtype.
void check_dtypes(const SparseFile& file, Device device, DType dtype) {
  for (const auto& [name, layer] : file.layers()) {
    const DType held = file.entry(name + ".weight.values").dtype;
    const bool wider = device.is_cpu() && dtype == DType::f32;
    check(held == dtype || wider, "sparse weights: ", file.path(), ": layer '", name, "' is ", held, ", and ",
          device.name(), " is to run in ", dtype, "; give --dtype ", held,
          device.is_cpu() && held != DType::f32 ? " or f32" : "",
          ", or convert the dense model with --dtype ", dtype);
  }
}

template <class Model, class Block, class ModelConfig>
Model load_by_blocks(const char* what, const std::string& folder, const Rng& rng, Device device,
                     const LoadOptions& options, bool dense) {
  const Config config = read_config(folder, options.config);
  const auto* const found = std::get_if<ModelConfig>(&config.model);
  check(found != nullptr, "load: ", folder, " holds a model of type ", config.type, ", not ", what);
  ModelConfig wanted = *found;
  const SparseFile file(folder);
  wanted.dtype = options.dtype ? *options.dtype : file.dtype();
  const NameTable table = name_table(wanted);
  check_fits(table, file);
  if (!dense) check_dtypes(file, device, wanted.dtype);
  ModelConfig first = wanted;
  first.layers = 1;
  Model model(first, rng, device, models::Start::blank);
  model.config = wanted;
  model.blocks.reserve(size_t(wanted.layers));
  Filler<Model> filler(model, table, file, dense);
  filler.fill();
  while (int64_t(model.blocks.size()) < wanted.layers) {
    model.blocks.push_back(Block(wanted, rng, device));
    filler.fill();
  }
  nn::set_training(model, false);
  return model;
}

// ---- gates and the choice ----

/// From which share of zeros on a format without a gate is taken instead of dense weights. On a GPU as
/// measured on an H200 (docs/ops/sparse_linear.md): sell_delta4 by the number of tokens, of 50, 70 and 90 %
/// the first that was no slower from 4096 x 4096 on; mma_delta4 by steps of Llama-2-7B, of 50 to 90 % in
/// steps of ten the first that was no slower; the kernels of bitmaps take longer than dense ones at 50 %, and
/// more was not measured. On the CPU, where time is about the same, by the bytes.
double break_even(const ops::SparseWeight& weight, int64_t tokens) {
  if (weight.format == ops::SparseFormat::dense_columns) return 1;
  if (weight.device().is_cpu()) return 0.3;
  if (weight.format == ops::SparseFormat::mma_delta4) return tokens == 1 ? 0.8 : tokens <= 8 ? 0.6 : 1;
  if (weight.format != ops::SparseFormat::sell_delta4) return 1;
  return tokens <= 2 ? 0.5 : tokens <= 4 ? 0.7 : 0.9;
}

/// The modules of one of our layers, from its first row on.
struct Layer {
  nn::Linear* linear;
  std::vector<LinearModule> modules;
};

std::vector<Layer> layers_in_blocks(models::LanguageRef model) {
  std::vector<Layer> layers;
  for (const LinearModule& module : linear_modules(model).all) {
    if (!module.ours.starts_with("blocks.")) continue;
    if (layers.empty() || layers.back().linear != module.layer) layers.push_back({module.layer, {}});
    layers.back().modules.push_back(module);
  }
  return layers;
}

void check_tokens(const std::string& name, ops::SparseFormat format, const SparseOptions& options) {
  const int64_t most = ops::most_sparse_tokens(format);
  check(options.whole_texts || options.tokens <= most, "--sparse required: layer ", name,
        " cannot run sparse: a step has ", options.tokens, " tokens, and the kernel of ", name_of(format),
        " takes at most ", most, "; use --sparse auto, or a smaller batch");
}

/// The gate of a module; its scales on the device of the weight.
ops::Gate gate_of(const SparseOptions& options, const std::string& name, const ops::SparseWeight& weight) {
  if (options.threshold) return {.kind = ops::Gate::Kind::threshold, .threshold = *options.threshold};
  if (!options.gates) return {};
  ops::Gate gate = options.gates->gates.at(name);
  if (options.gates->column_norms) gate.scales = ops::column_norms(weight).to(weight.device());
  gate.validate("gates: layer " + name, weight.in);
  return gate;
}

/// Whether a part runs sparse, and why.
std::pair<bool, std::string> judge(const ops::SparsePart& part, const SparseOptions& options) {
  const bool as_they_are = options.whole_texts && part.weight.format == ops::SparseFormat::dense_columns;
  const std::string lacks =
      as_they_are ? "" : ops::sparse_kernel_lacks(part.weight, options.whole_texts ? 1 : options.tokens);
  if (!lacks.empty())
    return {false, text_of("a step has ", options.tokens, " tokens in ", part.weight.dtype(),
                           ", and the kernel of ", name_of(part.weight.format), " needs ", lacks)};
  if (options.mode == SparseMode::required) return {true, "required"};
  if (part.gate.kind != ops::Gate::Kind::none && !ops::reads_all_inputs(part.weight.format))
    return {true, "inputs that its gate leaves out are not read"};
  const double from = break_even(part.weight, options.whole_texts ? 1 : options.tokens);
  const bool pays = part.weight.sparsity() >= from;
  return {pays, text_of(int(100 * part.weight.sparsity() + 0.5), " % of the weights are zero, ",
                        pays ? "at least" : "less than", " the break-even of ", int(100 * from), " %")};
}

void compress_columns(const Layer& layer) {
  nn::Compressed form;
  const Tensor weight = layer.linear->weight.detach();
  for (const LinearModule& module : layer.modules)
    form.parts.push_back({ops::compress(weight.slice(0, module.first, module.first + module.rows),
                                        ops::SparseFormat::dense_columns),
                          {}});
  layer.linear->weight = Tensor();
  layer.linear->form = std::move(form);
}

/// `dtype`: the model's, in which its activations come; the compressed weight may be narrower (check_dtypes).
void make_dense(nn::Linear& linear, DType dtype) {
  const nn::Compressed form = std::get<nn::Compressed>(linear.form);
  Tensor weight = Tensor::empty({linear.out, linear.in}, dtype, form.parts.at(0).weight.device());
  int64_t row = 0;
  for (const ops::SparsePart& part : form.parts) {
    weight.slice(0, row, row + part.weight.out).copy_from(ops::to_dense(part.weight));
    row += part.weight.out;
  }
  nn::make_parameter(weight);
  linear.weight = weight;
  linear.form = nn::Dense{};
}

SparseModule describe_dense(const LinearModule& module, const std::string& reason) {
  const uint64_t bytes =
      uint64_t(module.rows) * uint64_t(module.layer->in) * size_of(module.layer->weight.dtype());
  return {.name = module.name,
          .reason = reason,
          .format = "dense",
          .variant = "dense",
          .bytes = bytes,
          .dense_bytes = bytes};
}

/// Decides over one layer, whose gates are set, of a model in `dtype`.
void decide(const Layer& layer, DType dtype, const SparseOptions& options, std::vector<SparseModule>& all) {
  std::vector<SparseModule> modules;
  std::string against, why;  // the first part that cannot, and its reason
  const nn::Compressed form = std::get<nn::Compressed>(layer.linear->form);
  for (size_t i = 0; i < layer.modules.size(); ++i) {
    const ops::SparsePart& part = form.parts.at(i);
    const auto [is_sparse, reason] = judge(part, options);
    const std::string& name = layer.modules[i].name;
    check(is_sparse || options.mode != SparseMode::required, "--sparse required: layer ", name,
          " cannot run sparse: ", reason, "; use --sparse auto, or a smaller batch");
    if (!is_sparse && against.empty()) against = name, why = reason;
    modules.push_back({.name = name,
                       .is_sparse = true,
                       .reason = reason,
                       .format = name_of(part.weight.format),
                       .bytes = part.weight.bytes(),
                       .dense_bytes = part.weight.dense_bytes(),
                       .sparsity = part.weight.sparsity(),
                       .gate = part.gate});
    // Of whole texts: any number of tokens that the formats' own kernels do not take.
    const int64_t tokens = options.whole_texts ? 1024 : options.tokens;
    if (is_sparse) modules.back().variant = ops::sparse_linear_variant(part.weight, tokens);
  }
  if (against.empty()) {
    all.insert(all.end(), modules.begin(), modules.end());
    return;
  }
  // Rows of one weight: a part of it that is dense makes all of it dense.
  make_dense(*layer.linear, dtype);
  for (const LinearModule& module : layer.modules)
    all.push_back(describe_dense(module, module.name == against ? why : against + ": " + why));
}

/// The checks that are possible before a layer is changed.
void check_required(const std::vector<Layer>& layers, const SparseOptions& options) {
  for (const Layer& layer : layers) {
    const auto* const form = std::get_if<nn::Compressed>(&layer.linear->form);
    check(form || options.threshold || options.gates, "--sparse required: layer ", layer.modules[0].name,
          " cannot run sparse: its weight is dense, and it has no gate; compress the model (tessera convert "
          "--format), or give --gate-threshold or --gates");
    for (size_t i = 0; i < layer.modules.size(); ++i)
      check_tokens(layer.modules[i].name,
                   form ? form->parts.at(i).weight.format : ops::SparseFormat::dense_columns, options);
  }
}

/// Whether a step of one token is one kernel for all layers.
bool steps_persistently(models::LanguageRef model) {
  return model.visit(
      [](auto& held) { return std::string_view(held.step_variant(held.make_cache(1, 1))) == "persistent"; });
}

}  // namespace

models::Gpt load_sparse_gpt(const std::string& folder, const Rng& rng, Device device,
                            const LoadOptions& options, bool dense) {
  return load_by_blocks<models::Gpt, models::GptBlock, models::GptConfig>("gpt2 or opt", folder, rng, device,
                                                                          options, dense);
}
models::Llama load_sparse_llama(const std::string& folder, const Rng& rng, Device device,
                                const LoadOptions& options, bool dense) {
  return load_by_blocks<models::Llama, models::LlamaBlock, models::LlamaConfig>(
      "llama, mistral, qwen2, qwen3, phi3 or arcee", folder, rng, device, options, dense);
}

void check_gates(const Gates& gates, const std::vector<LinearModule>& modules,
                 const std::string& fingerprint) {
  check(gates.fingerprint.empty() || gates.fingerprint == fingerprint,
        "gates: they were calibrated on the model with fingerprint ", gates.fingerprint, ", this one has ",
        fingerprint, "; calibrate them on this model");
  std::set<std::string> known;
  for (const LinearModule& module : modules) {
    known.insert(module.name);
    check(gates.gates.contains(module.name), "gates: there is none for layer ", module.name,
          "; a threshold of 0 leaves out zeros alone");
  }
  for (const auto& [name, gate] : gates.gates) {
    if (known.contains(name)) continue;
    const std::string near = nearest(name, known);
    fail_at(Site::here(), "gates: this model has no layer '", io::shown(name), "'",
            near.empty() ? "" : "; did you mean '" + io::shown(near) + "'?");
  }
}

SparseMode parse_sparse_mode(const std::string& name) {
  return parse_name<SparseMode>("sparse: there is no mode", {"off", "auto", "required"}, name);
}

void check_sparse(const std::string& folder, const SparseOptions& options) {
  if (options.mode != SparseMode::required) return;
  const bool has_gates = options.threshold || options.gates;
  if (is_sparse_folder(folder)) {
    const SparseFile file(folder);
    for (const auto& [name, layer] : file.layers()) check_tokens(name, layer.format, options);
    return;
  }
  const Config config = read_config(folder);
  const NameTable table = std::visit([](const auto& model) { return name_table(model); }, config.model);
  const auto rule = std::ranges::find_if(table.rules, is_compressed_rule);
  check(rule != table.rules.end(), "--sparse required: the model of ", folder,
        " has no linear layers in blocks");
  const std::string first = module_of(rule->parts.at(0));
  check(has_gates, "--sparse required: layer ", first,
        " cannot run sparse: its weight is dense, and it has no gate; compress the model (tessera convert "
        "--format), or give --gate-threshold or --gates");
  check_tokens(first, ops::SparseFormat::dense_columns, options);
}

std::vector<SparseModule> make_sparse(models::LanguageRef model, const SparseOptions& options,
                                      const std::string& folder) {
  check(options.mode != SparseMode::off, "make_sparse: the mode is off; then there is nothing to do");
  check(!options.threshold || !options.gates,
        "make_sparse: a threshold for all gates and gates; expected one of them");
  const bool has_gates = options.threshold || options.gates;
  const double prefill = options.prefill.value_or(1);
  check(prefill >= 0 && prefill <= 1, "make_sparse: gates for a share of ", prefill,
        " of a text; expected 0 to 1");
  check(!options.prefill || has_gates, "make_sparse: a prefill of ", prefill,
        " without gates; give gates or a threshold too");
  const std::vector<Layer> layers = layers_in_blocks(model);
  if (options.gates) {
    const bool is_compressed =
        std::ranges::none_of(layers, [](const Layer& layer) { return nn::is_dense(layer.linear->form); });
    std::string fingerprint;
    if (!options.gates->fingerprint.empty()) {
      check(!is_compressed || !folder.empty(),
            "make_sparse: the gates have a fingerprint, and the model is compressed; name its folder");
      fingerprint = is_compressed ? SparseFile(folder).fingerprint() : fingerprint_of(model);
    }
    std::vector<LinearModule> modules;
    for (const Layer& layer : layers)
      modules.insert(modules.end(), layer.modules.begin(), layer.modules.end());
    check_gates(*options.gates, modules, fingerprint);
  }
  if (options.mode == SparseMode::required) check_required(layers, options);
  std::vector<SparseModule> all;
  for (const Layer& layer : layers) {
    nn::Form& form = layer.linear->form;
    if (nn::is_dense(form)) {
      if (!has_gates) {
        for (const LinearModule& module : layer.modules)
          all.push_back(describe_dense(module, "its weight is dense, and it has no gate"));
        continue;
      }
      compress_columns(layer);
    }
    nn::Compressed* const compressed = std::get_if<nn::Compressed>(&form);
    check(compressed != nullptr, "make_sparse: layer ", layer.modules[0].name, " is ", nn::name_of(form),
          "; expected a dense or a compressed one");
    compressed->prefill = prefill;
    for (size_t i = 0; i < layer.modules.size(); ++i)
      compressed->parts.at(i).gate = gate_of(options, layer.modules[i].name, compressed->parts[i].weight);
    decide(layer, model.dtype(), options, all);
  }
  const std::string* const forced = ops::ForceVariant::forced("decoder_layers");
  if (options.tokens == 1 && !options.whole_texts && !(forced && *forced == "composed") &&
      steps_persistently(model))
    for (SparseModule& module : all) module.variant = "persistent";
  return all;
}
}  // namespace tessera::pretrained
