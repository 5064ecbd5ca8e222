#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "io/safetensors.h"
#include "ops/sparse_linear/sparse_weight.h"
#include "pretrained/layers.h"
#include "pretrained/load.h"

/// Model directories whose linear layers are compressed. Such a directory has config.json and the tokenizer's
/// files as any other, and one file with all tensors, sparse.safetensors; it has no model.safetensors, so
/// that no program mistakes what is there for the dense model.
///
/// A tensor that is not compressed has its name in transformers. The weight of module M is the arrays of
/// ops::SparseWeight, "M.weight.values", "M.weight.bitmaps", "M.weight.gaps", "M.weight.offsets",
/// "M.weight.info", always of [out, in]. The file's metadata are
///   tessera_sparse  the version of the format: 2; 1 is read, too, unless it has sell_delta4
///   layers          JSON: module -> {"format", "shape": [out, in], "stored", "most"}
///   checksums       JSON: tensor -> XXH3 of its elements
///   fingerprint     that of the dense model, with its zeros (pretrained/fingerprint.h)
///   checksum        XXH3 of the four before

namespace tessera::pretrained {

inline constexpr const char* kSparseFile = "sparse.safetensors";

/// Whether the folder is such a directory.
bool is_sparse_folder(const std::string& folder);
/// Throws if the folder has weights, compressed or not.
void check_no_model(const std::string& folder);

/// A linear module of a directory's file.
struct SparseLayer {
  std::string name;
  ops::SparseFormat format = ops::SparseFormat::tca_bme;
  int64_t out = 0, in = 0, stored = 0, most = 0;
};

/// The file of a folder. Its header and metadata are read and checked at once; tensors are read when they are
/// asked for, and compared with their checksums. Every failure names the file and the tensor. Host memory:
/// what is asked for, at most the file's size.
class SparseFile {
 public:
  explicit SparseFile(const std::string& folder);
  const std::string& path() const { return file_.path(); }
  const std::map<std::string, SparseLayer>& layers() const { return layers_; }
  const std::string& fingerprint() const { return fingerprint_; }
  /// Of all floating tensors in it: convert_sparse gives them one.
  DType dtype() const;
  bool has(const std::string& tensor) const { return file_.has(tensor); }
  const io::SafetensorsEntry& entry(const std::string& tensor) const { return file_.entry(tensor); }
  /// Tensors that belong to no layer.
  std::vector<std::string> dense_names() const;
  Tensor load(const std::string& tensor) const;
  /// On the CPU, validated.
  ops::SparseWeight load(const SparseLayer& layer) const;

 private:
  io::SafetensorsFile file_;
  std::map<std::string, SparseLayer> layers_;
  std::map<std::string, std::string> checksums_;
  std::string fingerprint_;
};

/// Whether the rule is that of a weight that such a directory has compressed: of a linear layer in a block.
bool is_compressed_rule(const NameRule& rule);
/// The module of a weight's name: without ".weight".
std::string module_of(const NameRule::Part& weight);

/// Throws, naming the first that is missing, unexpected or of another shape, unless the file has what the
/// model of the table needs.
void check_fits(const NameTable& table, const SparseFile& file);

struct SparseConversion {
  struct Layer {
    SparseLayer layer;
    uint64_t bytes = 0, dense_bytes = 0;
  };
  std::vector<Layer> layers;  // in the model's order
  DType dtype = DType::f32;
  uint64_t bytes = 0, dense_bytes = 0;  // of all tensors, compressed or not
  int64_t negative_zeros = 0;           // that became zeros
  std::string fingerprint;
};

/// Compresses the linear layers in the blocks of the model in folder `from` (dense, with zeros in its
/// weights) and writes folder `to`, all of it or nothing. `dtype`: of the tensors in it; else
/// stored_dtype(from). A weight of -0, which pruning by multiplication leaves, becomes 0. Throws if `from` is
/// compressed already, if a weight is not finite, if `to` has weights, for encoders, and, before anything is
/// written, if `fingerprint` is given and is not that of the weights in `from`. Host memory: the compressed
/// model and one block.
SparseConversion convert_sparse(const std::string& from, const std::string& to, ops::SparseFormat format,
                                std::optional<DType> dtype = {}, const ConfigOptions& config = {},
                                const std::string& fingerprint = {});

/// The reverse: a dense model with the same bits, as convert() writes it.
Conversion convert_dense(const std::string& from, const std::string& to,
                         uint64_t shard_bytes = uint64_t{5'000'000'000}, const ConfigOptions& config = {});

}  // namespace tessera::pretrained
