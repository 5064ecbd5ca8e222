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

struct DecodeBenchOptions {
  std::string shape = "llama-2-7b";  // of decode_shapes(), with random weights; or
  std::string model;                 // a Hugging Face model directory, compressed or not
  DecodeSparse sparse = {};          // of a shape
  std::optional<pretrained::SparseOptions> model_sparse =
      {};  // of a directory; without it its layers run dense
  std::vector<int64_t> prompts = {32, 2048};
  int64_t new_tokens = 128;  // 2 or more
  int64_t batch = 1;
  ops::Sampling sampling = {.temperature = 0};
  Device device = Device::best();
  DType dtype = DType::f16;
  std::vector<bool> graph = {true};  // on a CPU there is none: measured once
  int repeats = 10, warmups = 2;
  dist::World world = {};         // several ranks: all call bench_decode, and
  nn::TensorParallel ranks = {};  // share the model out; the clock is each rank's own
};

/// The names that `shape` may have.
std::vector<std::string> decode_shapes();

/// Times generation by a clock on the host, as a user who waits for text does:
///   ttft  from the call, with the prompt's tokens on the host, until the first new token is there
///   tpot  the time between the first new token and the last, divided by their number less one
/// Percentiles are over repeats. Weights of a shape are drawn on the device, N(0, 0.02^2). Two records a
/// prompt length; bytes of tpot are the weights that a step reads and the cache at half of the new tokens.
/// FLOPs and bytes are those of all ranks, and a ceiling is that of all GPUs.
std::vector<Record> bench_decode(const DecodeBenchOptions& options);

}  // namespace tessera::bench
