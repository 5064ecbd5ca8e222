#include "sparsity/gate_calibration.h"

#include <algorithm>
#include <cmath>

#include "pretrained/fingerprint.h"
#include "runtime/text.h"
#include "sparsity/greedy.h"
#include "sparsity/histogram.h"
#include "sparsity/modules.h"
#include "sparsity/walk.h"

namespace tessera::sparsity {
namespace {

constexpr int64_t kShares = 200;  // steps of Calibration::shares
constexpr int64_t kBars = 120;

/// What is collected of the inputs of one block: a histogram per layer, or, if columns have norms, per
/// module.
struct BlockInputs {
  std::map<std::string, Histogram> histograms;  // by key_of
  std::map<std::string, Tensor> scales;         // by module, on the CPU
};

std::string key_of(const pretrained::LinearModule& module, bool column_norms) {
  return column_norms ? module.name : module.ours;
}

Tensor norms_of(const pretrained::LinearModule& module) {
  return ops::column_norms(
      ops::compress(weight_of(module).to(Device::cpu()).clone(), ops::SparseFormat::dense_columns));
}

BlockInputs inputs_of(const BlockWalk& walk, const std::vector<pretrained::LinearModule>& modules,
                      const GateOptions& options) {
  BlockInputs inputs;
  if (options.column_norms)
    for (const pretrained::LinearModule& module : modules) inputs.scales[module.name] = norms_of(module);
  const nn::Observe scope = walk.observe([&](const nn::LinearCall& call) {
    const Tensor x = call.input.to(Device::cpu());
    std::set<std::string> done;
    for (const pretrained::LinearModule& module : modules) {
      const std::string key = key_of(module, options.column_norms);
      if (module.ours != call.name || !done.insert(key).second) continue;
      inputs.histograms[key].add(x, options.column_norms ? inputs.scales.at(module.name) : Tensor());
    }
  });
  walk.run();
  for (const pretrained::LinearModule& module : modules) {
    const Histogram& histogram = inputs.histograms.at(key_of(module, options.column_norms));
    check(
        histogram.not_finite() == 0, "calibrate: ", histogram.not_finite(), " inputs of ", module.name,
        " are not finite; the model's weights are damaged, or its activations overflow (load it with a dtype "
        "of a larger range: --dtype bf16 or f32)");
  }
  return inputs;
}

std::vector<double> thresholds_of(const Histogram& histogram, const std::vector<double>& shares,
                                  ThresholdRule rule) {
  std::vector<double> thresholds;
  for (const double share : shares) {
    const double found = share == 0                         ? 0  // no gates, whatever the median
                         : rule == ThresholdRule::symmetric ? histogram.quantile(0.5 + share / 2)
                                                            : histogram.magnitude_quantile(share);
    thresholds.push_back(std::max(0.0, found));
  }
  return thresholds;
}

void check_dense(models::LanguageRef model) {
  for (const pretrained::LinearModule& module : block_modules(model))
    check(nn::is_dense(module.layer->form), "calibrate: layer ", module.name, " is ",
          nn::name_of(module.layer->form), "; expected a dense model");
}

constexpr const char* kRules[] = {"symmetric", "magnitude"};

}  // namespace

const char* name_of(ThresholdRule rule) {
  return kRules[size_t(rule)];
}

ThresholdRule parse_threshold_rule(const std::string& text) {
  return parse_name<ThresholdRule>("calibrate: there is no rule for thresholds", kRules, text);
}

void GateOptions::validate() const {
  check(step > 0 && step <= 1, "calibrate: greedy steps of ", step, "; expected more than 0 and at most 1");
  check(most > 0 && most < kMostShare, "calibrate: a greedy distribution up to ", most,
        "; expected more than 0 and less than ", kMostShare);
  check(greedy_samples >= 1, "calibrate: ", greedy_samples, " samples for the greedy distribution");
  check(prefill >= 0 && prefill <= 1, "calibrate: gates for a share of ", prefill,
        " of a text; expected 0 to 1");
  check(!greedy || prefill >= 0.25, "calibrate: gates for a share of ", prefill,
        " of a text: the greedy distribution measures errors on its last quarter; expected 0.25 or more");
  check(!column_norms || rule == ThresholdRule::magnitude || top_k,
        "calibrate: inputs times column norms have thresholds by magnitude; expected that rule");
}

ops::Gate Calibration::gate(const CalibratedLayer& layer, double share) const {
  if (top_k)
    return {.kind = ops::Gate::Kind::top_k, .keep = std::llround((1 - share) * double(layer.columns))};
  const double at = std::clamp(share, 0.0, 1.0) * double(shares.size() - 1);
  const size_t below = std::min(size_t(at), shares.size() - 2);
  const double low = layer.thresholds[below], high = layer.thresholds[below + 1];
  return {.kind = ops::Gate::Kind::threshold, .threshold = low + (high - low) * (at - double(below))};
}

std::map<std::string, double> Calibration::shares_at(double sparsity, bool by_greedy) const {
  check(sparsity >= 0 && sparsity < 1, "gates: an activation sparsity of ", sparsity,
        "; expected 0 or more and less than 1");
  std::map<std::string, double> chosen;
  for (const CalibratedLayer& layer : layers) chosen[layer.name] = sparsity;
  if (!by_greedy) return chosen;
  check(!greedy.empty(),
        "gates: the calibration has no greedy distribution; take the uniform one, or "
        "calibrate with it");
  for (const GreedyBlock& block : greedy) {
    const double most = block.steps.back().sparsity;
    check(sparsity <= most + 0.01, "gates: an activation sparsity of ", sparsity,
          "; the greedy distribution ends at ", most, " (take the uniform one)");
    const auto nearest = std::ranges::min_element(
        block.steps, {}, [&](const GreedyBlock::Step& step) { return std::abs(step.sparsity - sparsity); });
    for (size_t i = 0; i < block.layers.size(); ++i) chosen[block.layers[i]] = nearest->shares[i];
  }
  return chosen;
}

pretrained::Gates Calibration::gates(double sparsity, bool by_greedy) const {
  const std::map<std::string, double> chosen = shares_at(sparsity, by_greedy);
  pretrained::Gates gates{.gates = {}, .column_norms = column_norms, .fingerprint = fingerprint};
  for (const CalibratedLayer& layer : layers) gates.gates[layer.name] = gate(layer, chosen.at(layer.name));
  return gates;
}

Calibration calibrate(models::LanguageRef model, const Samples& samples, const GateOptions& options) {
  const NoTape no_tape;
  options.validate();
  check(samples.count() > 0, "calibrate: there are no samples of a text");
  check_dense(model);
  Calibration result{.model = "",
                     .fingerprint = pretrained::fingerprint_of(model),
                     .rule = options.rule,
                     .column_norms = options.column_norms,
                     .top_k = options.top_k,
                     .prefill = options.prefill,
                     .samples = samples.count(),
                     .length = samples.length,
                     .seed = samples.seed,
                     .shares = {},
                     .layers = {},
                     .greedy = {},
                     .inputs = {}};
  for (int64_t i = 0; i <= kShares; ++i) result.shares.push_back(double(i) / double(kShares));
  BlockWalk walk(model, samples, options.batch);
  for (int64_t block = 0; block < walk.blocks(); ++block) {
    const std::vector<pretrained::LinearModule> modules = modules_of_block(model, block);
    const BlockInputs inputs = inputs_of(walk, modules, options);
    for (const auto& [name, histogram] : inputs.histograms) {
      const double limit = histogram.magnitude_quantile(0.99);
      result.inputs.push_back({name, limit, histogram.bars(kBars, limit)});
    }
    std::vector<CalibratedLayer> layers;
    for (const pretrained::LinearModule& module : modules) {
      CalibratedLayer layer{module.name, block, module.rows, module.layer->in, {}};
      if (!options.top_k)
        layer.thresholds = thresholds_of(inputs.histograms.at(key_of(module, options.column_norms)),
                                         result.shares, options.rule);
      layers.push_back(std::move(layer));
    }
    if (options.greedy) result.greedy.push_back(distribute_greedily(model, walk, result, layers, options));
    result.layers.insert(result.layers.end(), layers.begin(), layers.end());
    if (block + 1 < walk.blocks()) walk.advance();
    if (options.on_block) options.on_block(block, walk.blocks());
  }
  return result;
}

}  // namespace tessera::sparsity
