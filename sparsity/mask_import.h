#pragma once

#include <string>
#include <vector>

#include "sparsity/masks.h"

/// Masks that other programs made, as a file of masks that is checked against the model they are of.

namespace tessera::sparsity {

struct ImportOptions {
  std::string method;    // "wanda"; "": what the inputs say, which may be nothing
  std::string seed;      // of the calibration samples; likewise
  bool partial = false;  // matrices of the model that no input has may be missing
};

/// One matrix that was imported.
struct ImportedMatrix {
  std::string name;      // of its module in the model
  std::string from;      // the input, or the file of a folder
  std::string pattern;   // that the input names; "" if it does not
  std::string sparsity;  // that was asked for, likewise
};

struct Imported {
  Masks masks;                           // in the model's order; info.fingerprint is that of the dense model
  std::vector<ImportedMatrix> matrices;  // in the same order
};

/// Reads masks from the inputs, each of which is
/// - a .pt or .npy file of one matrix [outputs, inputs], weights with zeros or a mask (1 is kept). Its name
///   is "layer{N}-{component}-{i}-{j}-{sparsity}" (parse_matrix_file_name), where the component is the name
///   of the module in block N ("mlp.down_proj") or the end of it ("down_proj"); or the whole name of the
///   module;
/// - a pruned Hugging Face model directory, with what its masks.safetensors says of its origin if it has one;
/// - a file of masks;
/// - any other folder: all .pt and .npy files directly in it.
///
/// `model` is the folder of the dense model. Throws, naming input and matrix, for
/// - a file that cannot be read, or of another kind; a name that is not of the form, or of a block, component
///   or module that the model does not have, or that fits two;
/// - a matrix of another shape, or given by two inputs;
/// - a mask that is not of the n:m pattern of its file's name, or whose sparsity there is not n / m;
/// - files without a pattern whose names give a sparsity that their masks do not have, to 0.01, taken
/// together
///   over the files of that sparsity;
/// - masks of another model: they carry another fingerprint, or the weights that they come with are not
///   related to the model's (cosine below 0.5 over the kept ones; it is 1 if they were not updated, and 0
///   within 1 / sqrt(weights) for independent ones). Matrices of zeros and ones are not compared;
/// - matrices of the model that are missing, unless options.partial.
Imported import_masks(const std::vector<std::string>& inputs, const std::string& model,
                      const ImportOptions& options = {});

}  // namespace tessera::sparsity
