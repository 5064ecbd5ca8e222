#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "ops/pointwise/pointwise.h"
#include "pretrained/fingerprint.h"
#include "runtime/parallel.h"
#include "sparsity/chain.h"
#include "sparsity/histogram.h"
#include "sparsity/split.h"
#include "sparsity/walk.h"
#include "tests/io/files.h"
#include "tests/sparsity/small.h"

// Histograms, thresholds, and their distribution over the projections of a block.

namespace tessera::sparsity {
namespace {

using io::test::throws;
using namespace test;

std::vector<float> normals(int64_t count, uint64_t seed, double mean = 0) {
  Rng rng(seed);
  const Tensor x = Tensor::empty({count}, DType::f32, kCpu);
  ops::fill_normal(x, mean, 1, rng);
  return x.to_vector<float>();
}

/// The value at a share of sorted numbers lies between two of them; a bin is 2.5e-4 of its value wide.
void expect_quantile(std::vector<float> values, double share, double found) {
  std::sort(values.begin(), values.end());
  const double at = share * double(values.size());
  const double low = values[size_t(std::clamp(std::floor(at) - 1, 0.0, double(values.size() - 1)))];
  const double high = values[size_t(std::clamp(std::ceil(at), 0.0, double(values.size() - 1)))];
  EXPECT_GE(found, low - 2.5e-4 * std::abs(low)) << share;
  EXPECT_LE(found, high + 2.5e-4 * std::abs(high)) << share;
}

TEST(GateHistogram, QuantilesAreThoseOfTheNumbers) {
  const std::vector<float> values = normals(30000, 1, 0.3);
  std::vector<float> magnitudes;
  for (const float value : values) magnitudes.push_back(std::abs(value));
  Histogram histogram;
  histogram.add(Tensor::from(values, {300, 100}));
  EXPECT_EQ(histogram.count(), 30000);
  for (const double share : {0.0, 0.001, 0.1, 0.38, 0.5, 0.75, 0.9, 0.999, 1.0}) {
    expect_quantile(values, share, histogram.quantile(share));
    expect_quantile(magnitudes, share, histogram.magnitude_quantile(share));
  }
  EXPECT_EQ(histogram.largest_magnitude(), *std::max_element(magnitudes.begin(), magnitudes.end()));
  const std::vector<double> bars = histogram.bars(16, 2);
  EXPECT_NEAR(std::accumulate(bars.begin(), bars.end(), 0.0), 1, 1e-12);
  EXPECT_NEAR(
      bars[8],
      double(std::count_if(values.begin(), values.end(), [](float v) { return v >= 0 && v < 0.25f; })) /
          30000,
      1e-3);
}

TEST(GateHistogram, DoesNotDependOnPiecesThreadsOrDtype) {
  const std::vector<float> values = normals(400000, 2);
  const Tensor all = Tensor::from(values, {1000, 400}).to(DType::bf16);
  Histogram whole, pieces;
  whole.add(all);
  set_cpu_threads(3);
  for (const auto& [begin, end] : {std::pair{500, 1000}, {0, 3}, {3, 500}})
    pieces.add(all.slice(0, begin, end));
  pieces.add(Tensor::empty({0, 400}, DType::f32, kCpu));
  set_cpu_threads(1);
  for (const double share : {0.0, 0.2, 0.5, 0.93, 1.0}) {
    EXPECT_EQ(whole.quantile(share), pieces.quantile(share));
    EXPECT_EQ(whole.magnitude_quantile(share), pieces.magnitude_quantile(share));
  }
}

TEST(GateHistogram, SpecialNumbers) {
  Histogram histogram;
  EXPECT_EQ(histogram.quantile(0.5), 0);
  const float inf = std::numeric_limits<float>::infinity();
  histogram.add(Tensor::from(std::vector<float>{0, -0.0f, 1e-20f, 3e30f, inf, -inf, std::nanf("")}, {7}));
  EXPECT_EQ(histogram.count(), 4);
  EXPECT_EQ(histogram.not_finite(), 3);
  EXPECT_EQ(histogram.magnitude_quantile(1), double(3e30f));
  EXPECT_LT(histogram.magnitude_quantile(0.5), 1e-9);
  Histogram scaled;
  scaled.add(Tensor::from(std::vector<float>{1, 2, 3, -4}, {2, 2}),
             Tensor::from(std::vector<float>{10, 0}, {2}));
  EXPECT_NEAR(scaled.magnitude_quantile(1), 30, 0);
  EXPECT_NEAR(scaled.magnitude_quantile(0.5), 0, 1e-9);
  EXPECT_THROW(
      scaled.add(Tensor::from(std::vector<float>{1, 2, 3}, {1, 3}), Tensor::from(std::vector<float>{1}, {1})),
      Error);
}

TEST(Split, OneFollowsFromTheOtherTwo) {
  EXPECT_DOUBLE_EQ(total_sparsity(0.2, 0.375), 0.5);
  EXPECT_DOUBLE_EQ(activations_for(0.5, 0.2), 0.375);
  EXPECT_DOUBLE_EQ(activations_for(0.5, 0), 0.5);
  EXPECT_TRUE(throws([] { activations_for(0.5, 0.5); }, "0 <= weights < total < 1"));
  EXPECT_TRUE(throws([] { activations_for(0.4, 0.5); }, "0.5"));
  EXPECT_TRUE(throws([] { activations_for(1, 0.5); }, "total"));
  EXPECT_TRUE(throws([] { total_sparsity(-0.1, 0); }, "-0.1"));
  EXPECT_EQ(parse_shares("0.1:0.3:0.05", "--total"), (std::vector<double>{0.1, 0.15, 0.2, 0.25, 0.3}));
  EXPECT_EQ(parse_shares("0.3,0.5", "--total"), (std::vector<double>{0.3, 0.5}));
  EXPECT_EQ(parse_shares("0.5", "--total"), (std::vector<double>{0.5}));
  for (const char* const bad : {"", "x", "0.1:0.3", "0.3:0.1:0.1", "0.1:0.3:0", "1", "0.1,,0.2", "-0.1",
                                "nan", "0:0.9:0.0001", "0.1:0.2:0.1:0.1"})
    EXPECT_TRUE(throws([&] { parse_shares(bad, "--total"); }, "--total")) << bad;
}

GateOptions quick(bool greedy = true) {
  return {.greedy = greedy, .step = 0.2, .greedy_samples = 2, .batch = 3};
}

TEST(GateCalibration, ThresholdsLeaveOutTheirShareOfTheText) {
  const Samples samples = small_samples(8);
  for (const bool norms : {false, true})
    for (const bool top_k : {false, true}) {
      SmallLlama small;
      GateOptions options = quick(false);
      options.rule = ThresholdRule::magnitude, options.column_norms = norms, options.top_k = top_k;
      options.prefill = 1;
      const std::string before = pretrained::fingerprint_of(small.model);
      const Calibration found = calibrate(small.model, samples, options);
      EXPECT_EQ(found.fingerprint, before);
      EXPECT_EQ(found.layers.size(), 14u);
      EXPECT_EQ(found.inputs.size(), norms ? 14u : 8u);
      auto sparse = options_of(found, 0.4, false);
      sparse.whole_texts = true;
      pretrained::make_sparse(small.model, sparse);
      std::vector<std::vector<int64_t>> texts;
      for (int64_t i = 0; i < samples.count(); ++i)
        texts.emplace_back(samples.sample(i).begin(), samples.sample(i).end());
      for (const auto& [name, counts] : pretrained::count_gates(small.model, texts)) {
        // Of the first block on the very text, of the second on what the gated first one makes of it.
        const bool first = name.find(".0.") != std::string::npos;
        EXPECT_NEAR(counts.sparsity(), 0.4, top_k ? 0.05 : first ? 0.02 : 0.12) << name << norms << top_k;
      }
    }
}

TEST(GateCalibration, AShareOfNothingLeavesNothingOut) {
  const Samples samples = small_samples(4);
  for (const ThresholdRule rule : {ThresholdRule::symmetric, ThresholdRule::magnitude}) {
    SmallGpt small;
    GateOptions options = quick(false);
    options.rule = rule;
    const Calibration found = calibrate(small.model, samples, options);
    for (const CalibratedLayer& layer : found.layers) {
      EXPECT_EQ(found.gate(layer, 0).threshold, 0) << layer.name;
      EXPECT_GT(found.gate(layer, 0.9).threshold, 0) << layer.name;
    }
  }
}

TEST(GateCalibration, SymmetricThresholdsAreQuantilesOfTheNumbersThemselves) {
  const Samples samples = small_samples(8);
  SmallGpt small;
  std::vector<float> inputs;
  {
    const NoTape no_tape;
    const nn::Observe scope(small.model, {.forward = [&](const nn::LinearCall& call) {
                              if (call.name != "blocks.0.mlp.up") return;
                              const std::vector<float> x = call.input.clone().to_vector<float>();
                              inputs.insert(inputs.end(), x.begin(), x.end());
                            }});
    small.model(Tensor::from(samples.tokens, {samples.count(), samples.length}));
  }
  const Calibration found = calibrate(small.model, samples, quick(false));
  const auto layer = std::ranges::find(found.layers, "transformer.h.0.mlp.c_fc", &CalibratedLayer::name);
  ASSERT_NE(layer, found.layers.end());
  for (const double share : {0.1, 0.5, 0.8})
    expect_quantile(inputs, 0.5 + share / 2, found.gate(*layer, share).threshold);
  // Between two shares of the table by interpolation.
  const double low = found.gate(*layer, 0.5).threshold, high = found.gate(*layer, 0.505).threshold;
  EXPECT_DOUBLE_EQ(found.gate(*layer, 0.5025).threshold, (low + high) / 2);
}

/// The error of the first block's output under gates, with the model's own gates as the way to apply them.
double error_of(const Calibration& calibration, const std::vector<double>& shares, const Samples& samples,
                int64_t count) {
  SmallLlama dense, gated;
  pretrained::Gates gates = calibration.gates(0, false);
  for (size_t i = 0; i < 7; ++i)
    gates.gates[calibration.layers[i].name] = calibration.gate(calibration.layers[i], shares[i]);
  pretrained::make_sparse(gated.model, {.gates = gates, .whole_texts = true, .prefill = 0.5});
  const NoTape no_tape;
  double squares = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Tensor tokens = Tensor::from(samples.sample(i), {samples.length});
    const auto stream = [&](const models::Llama& model) {
      const nn::AttentionPass pass = model.begin(tokens, nn::Sequences::uniform(1, samples.length));
      const models::Residual x = model.block(0, model.embed(tokens, pass), pass);
      return ops::add(x.sum, x.branch);
    };
    const Tensor a = stream(dense.model), b = stream(gated.model);
    for (int64_t t = samples.length - samples.length / 4; t < samples.length; ++t)
      for (int64_t j = 0; j < a.size(1); ++j) {
        const double difference = a.at({t, j}).item() - b.at({t, j}).item();
        squares += difference * difference;
      }
  }
  return std::sqrt(squares);
}

TEST(GateCalibration, GreedyStepsTakeTheLeastError) {
  const Samples samples = small_samples(4);
  SmallLlama small;
  const std::string before = pretrained::fingerprint_of(small.model);
  GateOptions options = quick();
  options.batch = 2, options.most = 0.45;
  const Calibration found = calibrate(small.model, samples, options);
  EXPECT_EQ(pretrained::fingerprint_of(small.model), before);  // dense again
  ASSERT_EQ(found.greedy.size(), 2u);
  const GreedyBlock& block = found.greedy[0];
  ASSERT_EQ(block.layers.size(), 7u);
  double weights = 0;
  for (size_t i = 0; i < 7; ++i) weights += double(found.layers[i].rows * found.layers[i].columns);
  for (size_t s = 1; s < block.steps.size(); ++s) {
    const GreedyBlock::Step &last = block.steps[s - 1], &step = block.steps[s];
    double least = 1e30, sum = 0;
    std::vector<double> best;
    for (size_t i = 0; i < 7; ++i) {
      if (last.shares[i] >= 0.99) continue;
      std::vector<double> trial = last.shares;
      const double cost = double(found.layers[i].rows * found.layers[i].columns) / 144;  // d_model^2
      trial[i] = std::min(0.99, trial[i] + 0.2 / cost);
      const double error = error_of(found, trial, samples, 2);
      if (error < least) least = error, best = trial;
    }
    EXPECT_EQ(step.shares, best) << s;
    EXPECT_NEAR(step.error, least, 1e-5 * least);
    for (size_t i = 0; i < 7; ++i)
      sum += step.shares[i] * double(found.layers[i].rows * found.layers[i].columns);
    EXPECT_NEAR(step.sparsity, sum / weights, 1e-12);
    EXPECT_NEAR(step.baseline, error_of(found, std::vector<double>(7, step.sparsity), samples, 2),
                1e-5 * step.baseline);
  }
  EXPECT_GE(block.steps.back().sparsity, 0.45);
  // A distribution is that of the nearest step of each block.
  const auto shares = found.shares_at(0.3, true);
  for (const GreedyBlock& one : found.greedy) {
    const auto nearest = std::ranges::min_element(
        one.steps, {}, [](const GreedyBlock::Step& step) { return std::abs(step.sparsity - 0.3); });
    for (size_t i = 0; i < 7; ++i) EXPECT_EQ(shares.at(one.layers[i]), nearest->shares[i]);
  }
  EXPECT_TRUE(throws([&] { found.gates(0.8, true); }, "the greedy distribution ends at"));
  EXPECT_TRUE(throws([&] { found.gates(1, false); }, "less than 1"));
}

TEST(GateCalibration, FilesReadBackAsTheyWereAndNameWhatIsWrong) {
  const TemporaryFolder folder;
  SmallGpt small;
  GateOptions options = quick();
  options.most = 0.3;
  const Calibration found = calibrate(small.model, small_samples(), options);
  save_calibration(found, folder / "c");
  EXPECT_TRUE(is_calibration(folder / "c"));
  EXPECT_TRUE(is_calibration(folder / "c/calibration.json"));
  EXPECT_FALSE(is_calibration(folder / "nothing"));
  const Calibration back = read_calibration(folder / "c");
  EXPECT_EQ(back.fingerprint, found.fingerprint);
  for (size_t i = 0; i < found.layers.size(); ++i)
    EXPECT_EQ(back.layers[i].thresholds, found.layers[i].thresholds);
  EXPECT_EQ(back.greedy[1].steps.back().shares, found.greedy[1].steps.back().shares);
  EXPECT_EQ(back.shares, found.shares);
  const std::string csv = io::read_file(folder / "c/layer-1/results.csv", 1 << 20);
  EXPECT_TRUE(
      csv.starts_with("Effective Sparsity,Activation Error,Baseline Error,attn.c_attn,attn.c_proj,mlp.c_fc,"
                      "mlp.c_proj"))
      << csv.substr(0, 200);
  EXPECT_EQ(size_t(std::count(csv.begin(), csv.end(), '\n')), found.greedy[1].steps.size() + 1);
  EXPECT_TRUE(throws([&] { save_calibration(found, folder / "c"); }, "already"));
  const std::string text = io::read_file(folder / "c/calibration.json", 1 << 24);
  const auto refused = [&](std::string changed, const char* says) {
    io::write_file(folder / "bad.json", changed);
    EXPECT_TRUE(throws([&] { read_calibration(folder / "bad.json"); }, says)) << says;
  };
  const auto replaced = [&](const char* from, const char* to) {
    std::string changed = text;
    changed.replace(changed.find(from), std::string(from).size(), to);
    return changed;
  };
  refused(text.substr(0, text.size() / 2), "damaged");
  refused("{}", "no calibration");
  refused("[1]", "no calibration");
  refused(replaced("\"version\": 1", "\"version\": 2"), "version 2");
  refused(replaced("\"prefill\": 0.5", "\"prefill\": 0.6"), "checksum");
  refused(replaced("\"thresholds\"", "\"thresh0lds\""), "checksum");
}

TEST(GateCalibration, RefusesWhatItCannotDo) {
  SmallGpt small;
  const Samples samples = small_samples();
  const auto refused = [&](GateOptions options, const char* says) {
    EXPECT_TRUE(throws([&] { calibrate(small.model, samples, options); }, says)) << says;
  };
  GateOptions options = quick();
  options.step = 0;
  refused(options, "greedy steps of 0");
  options = quick(), options.most = 0.99;
  refused(options, "less than 0.99");
  options = quick(), options.prefill = 0.2;
  refused(options, "last quarter");
  options = quick(), options.prefill = 2;
  refused(options, "0 to 1");
  options = quick(), options.column_norms = true;
  refused(options, "magnitude");
  options = quick(), options.greedy_samples = 0;
  refused(options, "samples");
  EXPECT_TRUE(throws([&] { calibrate(small.model, Samples{}, quick()); }, "no samples"));
  small.model.blocks[1].mlp.up.weight.detach().at({0, 0}).fill(std::nan(""));
  EXPECT_TRUE(
      throws([&] { calibrate(small.model, samples, quick(false)); }, "inputs of transformer.h.1.mlp.c_proj"));
  SmallGpt sparse;
  pretrained::make_sparse(sparse.model, {.threshold = 0.1});
  EXPECT_TRUE(
      throws([&] { calibrate(sparse.model, samples, quick()); }, "compressed; expected a dense model"));
}

}  // namespace
}  // namespace tessera::sparsity
