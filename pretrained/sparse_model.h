#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "pretrained/load.h"
#include "pretrained/sparse_file.h"

/// Models whose linear layers run compressed, or under a gate, or both.

namespace tessera::pretrained {

/// Loads the model of a directory of sparse.safetensors (is_sparse_folder), its layers in nn::Compressed
/// form. `options.dtype`: of activations and of the tensors that are not compressed; on a GPU that of the
/// file. Blocks are made one after the other and the dense weights are never all there, so memory is that of
/// the compressed model and one block. With `dense`, the layers are decompressed as they are read, into the
/// dense model.
models::Gpt load_sparse_gpt(const std::string& folder, const Rng& rng, Device device,
                            const LoadOptions& options = {}, bool dense = false);
models::Llama load_sparse_llama(const std::string& folder, const Rng& rng, Device device,
                                const LoadOptions& options = {}, bool dense = false);

/// Gates of a model's linear modules, by their names in transformers.
struct Gates {
  std::map<std::string, ops::Gate> gates;  // without scales
  bool column_norms = false;               // |x_j| times the norm of column j is compared (WINA)
  std::string fingerprint = {};            // of the model that they were calibrated on; empty: not known
};

/// Reads a file such as
///   {"format": "tessera-gates", "fingerprint": "...", "scale": "one",
///    "layers": {"model.layers.0.self_attn.q_proj": 0.021, "model.layers.0.mlp.down_proj": {"top_k": 512}}}
/// "scale" is "one" (|x_j|, the default) or "column-norm"; "fingerprint" may be left out. A number is a
/// threshold. Throws, naming file and layer, for anything else.
Gates read_gates(const std::string& path);

/// What becomes of a layer that could run sparse. off: it is dense. automatic: it is sparse where that is
/// expected to be faster, else dense. required: it is sparse, or nothing runs.
enum class SparseMode : uint8_t { off, automatic, required };
SparseMode parse_sparse_mode(const std::string& name);  // "off", "auto", "required"

struct SparseOptions {
  SparseMode mode = SparseMode::required;
  std::optional<double> threshold = {};  // of the gates of all layers
  std::optional<Gates> gates = {};       // or each with its own
  int64_t tokens = 1;                    // of a step: texts of a batch
  bool whole_texts = false;              // instead of steps: on a GPU the variant "gemm"
  std::optional<double> prefill = {};    // of the gates: nn::Compressed::prefill, else 1
};

/// Checks what can be checked before anything is loaded; throws as make_sparse does.
void check_sparse(const std::string& folder, const SparseOptions& options);

/// A linear module as it will run.
struct SparseModule {
  std::string name;
  bool is_sparse = false;
  std::string reason;   // why it is sparse or dense
  std::string format;   // "tca-bme"; "dense"
  std::string variant;  // "bitmap"; "cpu", "dense"; "persistent": part of one kernel for all layers of a step
  uint64_t bytes = 0, dense_bytes = 0;
  double sparsity = 0;  // of the stored weight
  ops::Gate gate;
};

/// Puts gates on the linear layers in the model's blocks, of which dense ones become columns
/// (ops::SparseFormat::dense_columns), and decides which of them run sparse. `folder` is where the model came
/// from: the fingerprint of a compressed one is read there, of a dense one computed if the gates have one.
/// Throws, naming the layer and the reason, if gates are of another model, name a layer that is not there or
/// lack one that is, and, if the mode is `required`, for a layer that cannot run sparse. One entry per
/// module, in the model's order.
std::vector<SparseModule> make_sparse(models::LanguageRef model, const SparseOptions& options,
                                      const std::string& folder = {});

/// How often inputs counted on a text, of one linear module.
struct GateCounts {
  int64_t inputs = 0, counted = 0;     // of all tokens
  int64_t followed = 0, repeated = 0;  // inputs counted for a token that has one before it; those that also
                                       // counted for that one
  double sparsity() const { return inputs ? 1 - double(counted) / double(inputs) : 0; }
  /// Share of the inputs that count which counted for the token before as well.
  double overlap() const { return followed ? double(repeated) / double(followed) : 0; }
};

/// Runs the model on each text (a sequence of tokens) and counts at every gate. Eager; copies the inputs to
/// the host.
std::map<std::string, GateCounts> count_gates(models::LanguageRef model,
                                              const std::vector<std::vector<int64_t>>& texts);

}  // namespace tessera::pretrained
