#pragma once

#include "io/weights.h"
#include "pretrained/config.h"
#include "pretrained/names.h"

/// Models from Hugging Face model directories, and folders from models.

namespace tessera::pretrained {

struct LoadOptions {
  ConfigOptions config = {};
  std::optional<DType> dtype = {};  // of the parameters; else that of the weights (stored_dtype)
  /// A head (classifier, masked language head) that the file lacks keeps its initial values; else it is
  /// missing.
  bool fresh_head = true;
  /// A layer of the head that the file has for another number of classes keeps its initial values too; else
  /// it is mis-shaped. For training on another task.
  bool fresh_classes = false;
  /// Of a llama: the ranks that share it out. Each calls load_llama and reads its own rows alone (of layers
  /// whose inputs are shared out, and of torch.save, the host reads whole tensors, one at a time).
  nn::TensorParallel ranks = {};
};

/// What became of the names of a file that was loaded.
struct LoadReport {
  std::vector<std::string> fresh;    // our parameters that kept their initial values
  std::vector<std::string> ignored;  // names in the file that this model lacks: other heads, buffers
};

/// Which tensor of the file is which of the table. Throws, listing all names that are missing, unexpected or
/// of another shape (at most 20 lines), without having read an element. Old names ("LayerNorm.gamma") and
/// those of the bare model, without the table's prefix, are understood.
struct Matched {
  std::map<std::string, std::string> names;  // name in the table -> name in the file
  LoadReport report;
};
Matched match_names(const NameTable& table, const io::WeightSource& source, bool fresh_head,
                    bool fresh_classes = false);

/// The name that transformers gives to the tensor `in_file` if it is part of a head or pooler that the
/// table's model lacks; "" for a tensor of the model, a buffer or an unknown name.
std::string name_of_other(const NameTable& table, const std::string& in_file);

/// Copies the tensors into the parameters, converting their dtype. Parameters as nn::parameters lists them;
/// a parameter that the table lacks is an error, as is a tied tensor that differs from the token embedding,
/// and a finite value that the parameters' dtype would make infinite.
void copy_weights(const std::vector<nn::NamedParameter>& parameters, const NameTable& table,
                  const Matched& matched, const io::WeightSource& source);

/// The dtype that a model has by itself: that of most elements of its weights, whatever config.json states;
/// f32 for f64 and 8 bits, in which no model is computed. `folder` may hold compressed weights.
DType stored_dtype(const std::string& folder);
DType stored_dtype(const io::WeightSource& source);

/// Read config.json and weights of the folder. `rng` draws what the file does not have, and dropout masks.
/// The shapes in the file are compared with config.json before any memory is taken for the model. A model
/// comes ready for evaluation (nn::set_training(model, true) turns dropout on).
models::Gpt load_gpt(const std::string& folder, const Rng& rng, Device device,
                     const LoadOptions& options = {}, LoadReport* report = nullptr);
models::Llama load_llama(const std::string& folder, const Rng& rng, Device device,
                         const LoadOptions& options = {}, LoadReport* report = nullptr);
models::Bert load_bert(const std::string& folder, const Rng& rng, Device device,
                       const LoadOptions& options = {}, LoadReport* report = nullptr);

/// Our tensors (parameters, or their gradients, by our names) under the names of transformers. Undefined ones
/// are left out.
io::NamedTensors export_tensors(const io::NamedTensors& ours, const NameTable& table);

struct SaveOptions {
  std::optional<DType> dtype = {};  // of the files; else that of the parameters. Throws as convert()
  uint64_t shard_bytes = uint64_t{5'000'000'000};
  /// A model directory whose config.json (with the dtype of the files), tokenizer and licence go along; "":
  /// none, and a config.json of the model's own configuration.
  std::string companions = "";
};

/// Writes config.json and safetensors that transformers and load_* read, all or nothing; frozen parameters,
/// too, and weights as layers multiply them: of factors, or under a mask (nn::Weights24). Throws if the
/// folder has weights already; to replace a folder, save into an io::AtomicFolder.
void save(const models::Gpt& model, const std::string& folder, const SaveOptions& options = {});
void save(const models::Llama& model, const std::string& folder, const SaveOptions& options = {});
void save(const models::Bert& model, const std::string& folder, const SaveOptions& options = {});

struct Conversion {
  size_t tensors = 0;
  uint64_t bytes = 0;
  std::vector<std::string> ignored;  // as LoadReport's, and what is no tensor: "epoch (an integer)"
};
/// Weights of one folder (or file) as safetensors in another, which gets a copy of config.json (with
/// another dtype if there is one, and without the fields that may be ignored) and of the tokenizer's files.
/// With a config.json of a known model, the names are its own, checked as loading does; otherwise they are
/// kept. Heads and poolers that config.json's architecture does not use are converted too. Integer tensors
/// keep their dtype. Throws if finite weights would become infinite in the new dtype. One shard in memory at
/// a time.
Conversion convert(const std::string& from, const std::string& to, const SaveOptions& options = {},
                   const ConfigOptions& config = {});

}  // namespace tessera::pretrained
