#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "io/safetensors.h"
#include "tensor/tensor.h"

/// Masks: which weights of a model's matrices are not zero, and the files that hold them.
///
/// A file of masks is a safetensors file. A tensor per matrix, by the name of its module in transformers
/// ("model.layers.3.self_attn.k_proj", see pretrained/layers.h): i32 [rows, ceil(columns / 32)], bit j of
/// word w is column 32 w + j, bits past the last column are 0. Rows are outputs and columns inputs of the
/// layer, for GPT-2's Conv1D too. Its metadata: "format" = "tessera masks 1", "columns" = a JSON object of
/// the columns of each matrix, "order" = a JSON list of the names in the model's order, and the fields of
/// MaskInfo.

namespace tessera::sparsity {

/// The mask of one matrix.
struct Mask {
  Tensor words;  // i32 [rows, ceil(columns / 32)], packed, in host memory
  int64_t columns = 0;

  int64_t rows() const { return words.size(0); }
  int64_t count() const { return rows() * columns; }
  int64_t ones() const;  // weights that are not zero
  double sparsity() const { return 1 - double(ones()) / double(count()); }
  bool at(int64_t row, int64_t column) const;
  /// u8 [rows, columns] of ones and zeros, in host memory.
  Tensor unpacked() const;
};

/// M = (W != 0) of a floating matrix [rows, columns] of any layout and device. -0.0 is zero, NaN is not.
Mask mask_of(const Tensor& weight);

/// Where masks come from. Texts are free of control characters; empty where it is not known.
struct MaskInfo {
  std::string fingerprint;  // of the model before it was pruned: fingerprint_of (pretrained/fingerprint.h)
  std::string model;        // the name of its folder
  std::string method;       // "wanda"
  std::string pattern;      // "unstructured", "2:4"
  std::string sparsity;     // that was asked for: "0.5"
  std::string seed;         // of the calibration samples
  bool operator==(const MaskInfo&) const = default;
};

/// The masks of a model, in its order.
struct Masks {
  MaskInfo info;
  std::vector<std::pair<std::string, Mask>> layers;

  bool has(const std::string& name) const;
  /// The mask of that name; throws, naming the nearest, if there is none.
  const Mask& at(const std::string& name) const;
};

/// Writes the file as io::AtomicFile does. Throws for a name given twice.
void save_masks(const std::string& path, const Masks& masks);

/// Reads a file of masks. Throws, naming path and matrix, if it is none, or if words, columns, order and
/// padding bits do not agree.
Masks load_masks(const std::string& path);

/// Reads masks of any kind; a model's come in the order of its layers.
/// - a file of masks;
/// - a Hugging Face model directory of gpt2, opt or the LLaMA family: (W != 0) of the linear layers of its
///   blocks;
/// - a .npy file, or a .pt file of torch.save that holds one bare tensor: (W != 0) of one matrix [rows,
///   columns] of finite numbers or bools. A name that parse_matrix_file_name takes apart gives the name
///   "layers.{N}.{component}", the pattern and the sparsity; any other file gives its stem as the name.
Masks read_masks(const std::string& path);

/// What the name of a file with one matrix says: "layer{N}-{component}-{i}-{j}-{sparsity}", with or without
/// the sparsity, whose point may be an underscore. i and j are the n and m of the n:m pattern that was asked
/// for, 0 and 0 for unstructured pruning.
struct MatrixFileName {
  int64_t block = 0;      // N
  std::string component;  // "mlp.down_proj", or "down_proj"
  std::string pattern;    // "unstructured", "2:4"
  std::string sparsity;   // "0.5"; "" if the name has none
};
/// Nothing for a stem (a name without its extension) of another form.
std::optional<MatrixFileName> parse_matrix_file_name(const std::string& stem);

/// The array of a .npy file, or the one bare tensor of a file of torch.save. Throws if there are several.
Tensor read_matrix_file(const std::string& path);

/// Throws, naming what differs, unless the masks are those of matrices of these names and shapes; `model` for
/// the message. A fingerprint that both have must be the same.
void check_same_model(const Masks& a, const Masks& b);

}  // namespace tessera::sparsity
