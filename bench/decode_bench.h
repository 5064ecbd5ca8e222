#pragma once

#include <string>
#include <vector>

#include "bench/decode_sparse.h"
#include "bench/record.h"
#include "dist/world.h"
#include "nn/tensor_parallel.h"
#include "ops/generation/sample.h"
#include "tensor/tensor.h"

namespace tessera::bench {

/// A model to time next to others in one run:
///   dense        as it is: one persistent kernel per step where that can be
///   composed     the same weights, one operator after the other
///   FORMAT:W     compressed, a share W of its weights 0 (0 to 1); sell-delta4 in one kernel, too
///   FORMAT:W:X   the same under gates that leave out a share X of the inputs
///   composed:FORMAT:W   the same, one operator after the other
struct DecodeRow {
  std::string text;
  DecodeSparse sparse = {};
  bool composed = false;
};
/// Throws, naming what is wrong with the text.
DecodeRow parse_decode_row(const std::string& text);

struct DecodeBenchOptions {
  std::string shape = "llama-2-7b";  // of decode_shapes(), with random weights; or
  std::string model = {};            // a Hugging Face model directory, compressed or not
  std::string name = {};             // of a model in the records; default: that of its directory
  DecodeSparse sparse = {};          // of a shape
  std::vector<DecodeRow> rows = {};  // of a shape, instead: each model is made, timed and freed in turn
  std::optional<pretrained::SparseOptions> model_sparse =
      {};                             // of a directory; without it its layers run dense
  std::vector<int64_t> prompts = {};  // default: 32 and 2048, or the one of them that the model has room for
  int64_t new_tokens = 128;           // 2 or more
  int64_t batch = 1;
  ops::Sampling sampling = {.temperature = 0};
  Device device = Device::cpu();
  DType dtype = DType::f16;
  std::vector<bool> graph = {true};  // on a CPU there is none: measured once
  int repeats = 10, warmups = 2;
  Listener listener = {};
  dist::World world = {};         // several ranks: all call bench_decode, and
  nn::TensorParallel ranks = {};  // share the model out; the clock is each rank's own
};

/// The names that `shape` may have.
std::vector<std::string> decode_shapes();

/// Times generation by a clock on the host, as a user who waits for text does:
///   ttft  from the call, with the prompt's tokens on the host, until the first new token is there
///   tpot  the time between the first new token and the last, divided by their number less one
/// Percentiles are over repeats. Weights of a shape are drawn on the device, N(0, 0.02^2). Two records per
/// prompt length; bytes of tpot are the weights that a step reads and the cache at half of the new tokens.
/// FLOPs and bytes are those of all ranks, and a ceiling is that of all GPUs. Throws, before anything is
/// timed, if the model has no room for a prompt and the new tokens.
///
/// With `rows`, each record has the row as its attribute "row", and those of tpot say how long a layer takes:
/// the difference between a token of the model and one of its first block alone, divided by the other blocks.
std::vector<Record> bench_decode(const DecodeBenchOptions& options);

/// The rows of one run as a table: TTFT, TPOT, time per layer, bytes per token, and how many times faster
/// than the run's first row with the same prompt.
std::string decode_rows_text(const std::vector<Record>& records);

}  // namespace tessera::bench
