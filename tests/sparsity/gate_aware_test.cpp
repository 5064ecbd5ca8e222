#include "sparsity/gate_aware.h"

#include <gtest/gtest.h>

#include <cmath>

#include "pretrained/fingerprint.h"
#include "runtime/parallel.h"
#include "sparsity/gate_calibration.h"
#include "sparsity/prune.h"
#include "tests/io/files.h"
#include "tests/sparsity/matrices.h"
#include "tests/sparsity/small.h"

// Pruning for gates: the least squares of one layer, and the two passes through a model.

namespace tessera::sparsity {
namespace {

using io::test::throws;
using namespace test;

/// The solution z of z a = b, row by row, by elimination.
Matrix solve(const Matrix& a, const Matrix& b) {
  const size_t n = a.size();
  Matrix z;
  for (const std::vector<double>& right : b) {
    Matrix work = a;  // symmetric: z a = b is a z^T = b^T
    std::vector<double> x = right;
    for (size_t i = 0; i < n; ++i)
      for (size_t r = 0; r < n; ++r) {
        if (r == i) continue;
        const double factor = work[r][i] / work[i][i];
        for (size_t j = 0; j < n; ++j) work[r][j] -= factor * work[i][j];
        x[r] -= factor * x[i];
      }
    for (size_t i = 0; i < n; ++i) x[i] /= work[i][i];
    z.push_back(x);
  }
  return z;
}

double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

/// sum over tokens and rows of (V x~ - W x)^2, as a share of (W x)^2
double error_by_hand(const Matrix& w, const Matrix& v, const Matrix& dense, const Matrix& gated) {
  double error = 0, whole = 0;
  for (size_t t = 0; t < dense.size(); ++t)
    for (size_t r = 0; r < w.size(); ++r) {
      const double target = dot(w[r], dense[t]), found = dot(v[r], gated[t]);
      error += (found - target) * (found - target), whole += target * target;
    }
  return error / whole;
}

TEST(GateAware, TheCorrectionIsTheLeastSquaresSolution) {
  constexpr int64_t kIn = 13, kOut = 5, kTokens = 90;
  Rng rng(9);
  const Tensor x = Tensor::empty({kTokens, kIn}, DType::f32, kCpu),
               noise = Tensor::empty({kTokens, kIn}, DType::f32, kCpu),
               w = Tensor::empty({kOut, kIn}, DType::f32, kCpu);
  ops::fill_normal(x, 0.3, 1, rng), ops::fill_normal(noise, 0, 0.1, rng), ops::fill_normal(w, 0, 1, rng);
  // A gate that never opens for input 4, and inputs that pruned layers before changed.
  Matrix dense = matrix_of(x), gated = dense;
  const Matrix change = matrix_of(noise), weight = matrix_of(w);
  std::vector<float> rows;
  for (size_t t = 0; t < gated.size(); ++t)
    for (size_t j = 0; j < size_t(kIn); ++j) {
      const float value = float(gated[t][j] + change[t][j]);
      gated[t][j] = std::abs(value) <= 0.6f || j == 4 ? 0 : double(value);
      rows.push_back(float(gated[t][j]));
    }
  const Tensor y = Tensor::from(rows, {kTokens, kIn});
  GatedStatistics statistics;
  statistics.add(y.slice(0, 0, 31), x.slice(0, 0, 31));
  statistics.add(y.slice(0, 31, kTokens), x.slice(0, 31, kTokens));
  const HessianFactor factor = factor_hessian(statistics.inputs(), 6, 0.02, "layer");
  const Tensor v = correct_for_gates(w, statistics, factor);

  // (sum x~ x~^T + shift) on the right of V, sum W x x~^T + shift W on the other side.
  Matrix h(kIn, std::vector<double>(kIn)), b(kOut, std::vector<double>(kIn));
  for (size_t t = 0; t < gated.size(); ++t)
    for (size_t i = 0; i < size_t(kIn); ++i) {
      for (size_t j = 0; j < size_t(kIn); ++j) h[i][j] += gated[t][i] * gated[t][j];
      for (size_t r = 0; r < size_t(kOut); ++r) b[r][i] += dot(weight[r], dense[t]) * gated[t][i];
    }
  double mean = 0;
  for (size_t i = 0; i < size_t(kIn); ++i) mean += (i == 4 ? 3 : h[i][i]) / double(kIn);
  for (size_t i = 0; i < size_t(kIn); ++i) {
    const double shift = (i == 4 ? 3 : 0) + 0.02 * mean;
    h[i][i] += shift;
    for (size_t r = 0; r < size_t(kOut); ++r) b[r][i] += shift * weight[r][i];
  }
  const Matrix expected = solve(h, b), found = matrix_of(v);
  for (size_t r = 0; r < size_t(kOut); ++r)
    for (size_t i = 0; i < size_t(kIn); ++i) EXPECT_NEAR(found[r][i], expected[r][i], 3e-7) << r << " " << i;
  for (size_t r = 0; r < size_t(kOut); ++r) EXPECT_EQ(found[r][4], weight[r][4]);

  const double corrected = error_by_hand(weight, found, dense, gated),
               plain = error_by_hand(weight, weight, dense, gated);
  EXPECT_NEAR(gated_output_error(w, v, statistics), corrected, 1e-12);
  EXPECT_NEAR(gated_output_error(w, w, statistics), plain, 1e-12);
  EXPECT_NEAR(corrected, error_by_hand(weight, expected, dense, gated), 1e-8);
  EXPECT_LT(corrected, 0.9 * plain);  // the inputs are nearly independent: little can be made up for
  EXPECT_TRUE(throws([&] { statistics.add(y, x.slice(0, 0, 3)); }, "the same tokens"));
}

PruneGates gates_for(models::Llama& model, const Samples& samples, bool column_norms = false,
                     bool top_k = false) {
  GateOptions options{
      .rule = ThresholdRule::magnitude, .column_norms = column_norms, .top_k = top_k, .greedy = false};
  return {.gates = calibrate(model, samples, options).gates(0.5, false), .prefill = 0.5};
}

PruneOptions options_for(const PruneGates& gates) {
  return {.score = Score::sparsegpt,
          .update = Update::obs,
          .sparsity = 0.4,
          .block_size = 8,
          .gates = gates,
          .batch = 4};
}

/// Inputs of every linear layer on all samples, by our names.
std::map<std::string, Tensor> inputs_of(const models::Llama& model, const Samples& samples) {
  const NoTape no_tape;
  std::map<std::string, Tensor> inputs;
  const nn::Observe scope(
      model, {.forward = [&](const nn::LinearCall& call) { inputs[call.name] = call.input.clone(); }});
  model(Tensor::from(samples.tokens, {samples.count(), samples.length}));
  return inputs;
}

TEST(GateAware, TheErrorsAreThoseOfTheGatedModelAgainstTheDenseOne) {
  const Samples samples = small_samples(8);
  for (const auto& [norms, top_k] : {std::pair{false, false}, {true, false}, {true, true}}) {
    SmallLlama small, dense, gated;
    const PruneGates gates = gates_for(dense.model, samples, norms, top_k);
    const Pruned pruned = prune(small.model, samples, options_for(gates));
    EXPECT_EQ(pruned.masks.info.method, "gate-aware sparsegpt");
    // What the second block gets: the first one pruned and gated.
    const auto from = block_modules(small.model), to = block_modules(gated.model),
               whole = block_modules(dense.model);
    for (size_t i = 0; i < to.size(); ++i)
      if (block_of(to[i]) == 0) weight_of(to[i]).copy_from(weight_of(from[i]));
    pretrained::Gates free = gates.gates;
    free.fingerprint.clear();
    pretrained::make_sparse(gated.model, {.gates = free, .whole_texts = true, .prefill = gates.prefill});
    const auto x = inputs_of(dense.model, samples), y = inputs_of(gated.model, samples);
    for (size_t i = 0; i < whole.size(); ++i) {
      const PrunedMatrix& matrix = pruned.matrices[i];
      ASSERT_EQ(matrix.name, whole[i].name);
      EXPECT_LT(*matrix.corrected_error, *matrix.gate_error) << matrix.name;
      EXPECT_GT(*matrix.error, *matrix.corrected_error) << matrix.name;
      if (block_of(whole[i]) != 1) continue;
      ops::Gate gate = gates.gates.gates.at(matrix.name);
      if (norms)
        gate.scales =
            ops::column_norms(ops::compress(weight_of(whole[i]).clone(), ops::SparseFormat::dense_columns));
      Matrix inputs = matrix_of(y.at(whole[i].ours));
      const Matrix after = matrix_of(ops::apply_gate(y.at(whole[i].ours), gate));
      for (size_t t = 0; t < inputs.size(); ++t)
        if (t % size_t(samples.length) >= size_t(samples.length) / 2) inputs[t] = after[t];
      const Matrix w = matrix_of(weight_of(whole[i])), targets = matrix_of(x.at(whole[i].ours));
      EXPECT_NEAR(*matrix.gate_error, error_by_hand(w, w, targets, inputs), 1e-5) << matrix.name;
      EXPECT_NEAR(*matrix.error, error_by_hand(w, matrix_of(weight_of(from[i])), targets, inputs), 1e-5)
          << matrix.name;
    }
  }
}

std::string bits_of(models::Llama& model) {
  return pretrained::fingerprint_of(model);
}

TEST(GateAware, ThreadsBatchesOfFilesAndStopsChangeNothing) {
  const Samples samples = small_samples(8);
  SmallLlama one, three, stopped, resumed;
  PruneOptions options = options_for(gates_for(one.model, samples));
  prune(one.model, samples, options);
  set_cpu_threads(3);
  prune(three.model, samples, options);
  set_cpu_threads(1);
  EXPECT_EQ(bits_of(one.model), bits_of(three.model));
  const TemporaryFolder folder;
  options.progress = folder / "partial";
  options.on_block = [](int64_t, const auto&) { check(false, "enough"); };
  EXPECT_TRUE(throws([&] { prune(stopped.model, samples, options); }, "enough"));
  options.on_block = {};
  const Pruned again = prune(resumed.model, samples, options);
  EXPECT_EQ(again.resumed, 1);
  EXPECT_TRUE(again.matrices[0].gate_error && again.matrices[0].corrected_error);
  EXPECT_EQ(bits_of(one.model), bits_of(resumed.model));
}

TEST(GateAware, GatesThatLeaveNothingOutAreNone) {
  const Samples samples = small_samples(8);
  SmallLlama small, plain;
  PruneGates gates = gates_for(small.model, samples);
  for (auto& [name, gate] : gates.gates.gates) gate.threshold = 0;
  PruneOptions options = options_for(gates);
  options.only = {"q_proj", "k_proj", "v_proj"}, options.last_block = 1;
  const Pruned pruned = prune(small.model, samples, options);
  options.gates.reset();
  prune(plain.model, samples, options);
  EXPECT_EQ(bits_of(small.model), bits_of(plain.model));
  EXPECT_EQ(pruned.matrices[0].gate_error, 0.0);
}

TEST(GateAware, WithAdmmAndOtherScores) {
  const Samples samples = small_samples(8);
  SmallLlama dense;
  PruneOptions options = options_for(gates_for(dense.model, samples));
  for (const Score score : {Score::magnitude, Score::wanda})
    for (const Update update : {Update::obs, Update::admm}) {
      SmallLlama small, plain;
      options.score = score, options.update = update;
      const Pruned pruned = prune(small.model, samples, options);
      PruneOptions without = options;
      without.gates.reset();
      EXPECT_EQ(pruned.sparsity(), prune(plain.model, samples, without).sparsity())
          << name_of(score) << name_of(update);
      EXPECT_NE(bits_of(small.model), bits_of(plain.model));
      for (const PrunedMatrix& matrix : pruned.matrices) {
        EXPECT_LT(*matrix.corrected_error, *matrix.gate_error) << matrix.name;
        EXPECT_GT(matrix.damping, 0) << matrix.name;
      }
      EXPECT_EQ(pruned.masks.info.method,
                std::string("gate-aware ") + name_of(score) + " + " + name_of(update));
    }
}

TEST(GateAware, WhatDoesNotFitIsRefused) {
  const Samples samples = small_samples(8);
  SmallLlama small;
  const PruneGates gates = gates_for(small.model, samples);
  const std::string before = bits_of(small.model);
  const auto refused = [&](auto&& change, const char* says) {
    PruneOptions options = options_for(gates);
    change(options);
    EXPECT_TRUE(throws([&] { prune(small.model, samples, options); }, says));
    EXPECT_EQ(bits_of(small.model), before);
  };
  refused([](PruneOptions& o) { o.gates->gates.fingerprint = "0123"; }, "calibrate them on this model");
  refused([](PruneOptions& o) { o.gates->gates.gates.erase("model.layers.1.mlp.up_proj"); },
          "none for layer model.layers.1.mlp.up_proj");
  refused([](PruneOptions& o) { o.gates->gates.gates["model.layers.2.mlp.up_proj"] = {}; },
          "no layer 'model.layers.2.mlp.up_proj'");
  refused([](PruneOptions& o) { o.score = Score::wanda, o.update = Update::none; }, "choose the update obs");
  refused([](PruneOptions& o) { o.sequential = true; }, "--true-sequential");
  refused([](PruneOptions& o) { o.gates->prefill = 1.5; }, "expected 0 to 1");
  refused(
      [](PruneOptions& o) {
        o.gates->gates.gates.at("model.layers.0.self_attn.q_proj") = {.kind = ops::Gate::Kind::top_k,
                                                                      .keep = 1000};
      },
      "keeps 1000 inputs");
  refused([](PruneOptions& o) { o.gates->gates.gates.at("model.layers.1.mlp.up_proj").threshold = -1; },
          "threshold is -1");
}

}  // namespace
}  // namespace tessera::sparsity
