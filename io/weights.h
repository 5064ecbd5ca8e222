#pragma once

#include <functional>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "io/safetensors.h"
#include "io/torch_file.h"

/// The weights of a model as Hugging Face keeps them: safetensors or files of torch.save, one or several with
/// an index. Headers are read at once; tensors when they are asked for, straight into their place (io/file.h
/// says why files are read by position and not mapped), so that host memory of one tensor is enough, and of
/// storages of torch.save with several tensors in them.

namespace tessera::io {

struct WeightEntry {
  std::string name;
  DType dtype = DType::f32;
  Shape shape;
};

class WeightSource {
 public:
  /// A folder, of which it takes the first that is there of model.safetensors, model.safetensors.index.json,
  /// pytorch_model.bin and pytorch_model.bin.index.json; or one such file, told by its content. Throws,
  /// naming the file, if a shard holds what the index does not list, or the reverse, or lies elsewhere, and
  /// as check_no_adapter does.
  explicit WeightSource(const std::string& path);

  /// The file that was opened: an index, or the weights themselves.
  const std::string& path() const { return path_; }
  /// By name.
  const std::vector<WeightEntry>& entries() const { return entries_; }
  /// The contents of torch.save files that are not tensors, as TorchFile::others names them.
  const std::vector<std::string>& others() const { return others_; }
  /// The floating dtype of most elements; of as many the wider one; f32 if there are none.
  DType dtype() const;
  bool has(const std::string& name) const { return index_.contains(name); }
  const WeightEntry& entry(const std::string& name) const;  // throws if there is none, naming the nearest
  /// Row-major elements, in host memory.
  Tensor load(const std::string& name) const;
  /// Elements begin ... end of the first dimension alone. Of safetensors nothing else is read; of torch.save
  /// the whole tensor, which is in host memory as long as the result is.
  Tensor load_rows(const std::string& name, int64_t begin, int64_t end) const;

 private:
  struct Place {
    size_t entry, file;
  };
  void add(InputFile file, const std::map<std::string, std::string>* files, const std::string& own_name);

  std::string path_;
  std::vector<std::variant<SafetensorsFile, TorchFile>> files_;
  std::vector<WeightEntry> entries_;
  std::vector<std::string> others_;
  std::map<std::string, Place> index_;
};

/// All tensors of WeightSource(path), by name, on the device. Host memory of all of them.
std::map<std::string, Tensor> load_weights(const std::string& path, Device device = Device::cpu());

/// Throws if the folder has an adapter_config.json, as peft writes it: without the adapter, which is not
/// read, the model would be another one.
void check_no_adapter(const std::string& folder);

/// A tensor to write; `make` is called only when its turn comes.
struct WeightToWrite {
  WeightEntry entry;
  std::function<Tensor()> make;  // of that dtype and shape
};

/// Throws if the folder has weights, in any of the names that WeightSource knows: two would be ambiguous.
void check_no_weights(const std::string& folder);

/// Writes model.safetensors into the folder or, if the elements have more than `shard_bytes`, files
/// model-00001-of-0000N.safetensors of at most so many (a larger tensor has one to itself) and, last, the
/// index model.safetensors.index.json. transformers reads both. All files or none (AtomicFolder, which merges
/// them into a folder that is there). Host memory: one file's tensors. Throws as check_no_weights does.
void save_weights(const std::string& folder, const std::vector<WeightToWrite>& weights,
                  uint64_t shard_bytes = uint64_t{5'000'000'000});

}  // namespace tessera::io
