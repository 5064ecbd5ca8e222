#pragma once

#include <string>
#include <vector>

#include "bench/default_sizes.h"
#include "bench/record.h"
#include "ops/mlp/mlp_sparse24.h"

namespace tessera::bench {

struct FfnBenchOptions {
  Device device = Device::cpu();
  std::vector<Precision> precisions = {};  // empty: the default of the device
  std::vector<FfnShape> shapes = {};       // empty: default_ffn_shapes
  /// Shares of zeros that activations have, by biases of the first layer that differ from column to column.
  std::vector<double> sparsities = {0.9};
  ops::MlpSparse24 how = {};
  /// Variants of ops::mlp_sparse24 to time next to the chosen one: fused, composed. On a GPU only.
  std::vector<std::string> variants = {};
  /// Of split GEMMs at each sparsity the smallest share of dense columns that keeps the dropped energy below
  /// this, in place of how.dense_share; 0: how.dense_share.
  double most_dropped = 0;
  bool gemms = true;  // also each GEMM by itself
  TimerOptions timer = {};
  Listener listener = {};
};

/// Feed-forward networks with 2:4 sparse activations next to dense ones, all in: forward and backward with
/// selection, compression, split and permutation (op "ffn", mode "fwd+bwd", attribute "ffn": swiglu of as
/// many parameters, relu2, relu2 counted, sparse24, and sparse24 with each of the variants), and where the
/// time goes: the six GEMMs, dense and sparse with a compressed operand that is there already, and each
/// compression (op "ffn gemm" and "ffn part"). FLOPs are those of the dense network. What they did with their
/// activations is in attributes: zeros, dense_share, dropped.
std::vector<Record> bench_ffn(const FfnBenchOptions& options);

}  // namespace tessera::bench
