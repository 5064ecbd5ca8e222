#include "train/auto_rows.h"

#include <algorithm>
#include <cmath>

#include "nn/observe.h"
#include "ops/select/select.h"
#include "train/gradient_probe.h"

namespace tessera::train {
namespace {

std::vector<double> norms_of(const Tensor& rows, int64_t count) {
  const Tensor norms = ops::row_norms(rows.reshape_with({-1, rows.size(-1)}));
  return norms.slice(0, 0, std::min(count, norms.size(0))).to(DType::f64).to_vector<double>();
}

}  // namespace

AutoRows::AutoRows(models::Bert& model, const std::vector<pretrained::LayerParts>& sliced,
                   const SliceSettings& settings, const Rng& rows)
    : model_(model), settings_(settings), rows_(rows) {
  const auto find = [&](const nn::Linear& layer) {
    return std::ranges::find(sliced, &layer, &pretrained::LayerParts::layer);
  };
  std::vector<const nn::Linear*> grouped;
  for (size_t i = 0; i < model.blocks.size(); ++i) {
    const nn::Mlp& mlp = model.blocks[i].mlp;
    const auto up = find(mlp.up), down = find(mlp.down);
    if (up == sliced.end() || down == sliced.end()) continue;
    groups_.push_back({.name = "blocks." + std::to_string(i) + ".mlp", .layers = {*up, *down}});
    grouped.insert(grouped.end(), {up->layer, down->layer});
  }
  for (const pretrained::LayerParts& layer : sliced)
    if (std::ranges::find(grouped, layer.layer) == grouped.end())
      groups_.push_back({.name = layer.name, .layers = {layer}});
  check(!groups_.empty(), "auto rows: there is no sliced layer");
  gpu_ = groups_[0].layers[0].layer->weight.device().is_cuda();
  shares = Tensor::full({int64_t(groups_.size())}, 1, DType::f64, Device::cpu());
  factor = Tensor::zeros({1}, DType::f64, Device::cpu());
}

std::vector<std::string> AutoRows::groups() const {
  std::vector<std::string> names;
  for (const Group& group : groups_) names.push_back(group.name);
  return names;
}

void AutoRows::apply() const {
  const std::vector<double> values = shares.to_vector<double>();
  for (size_t g = 0; g < groups_.size(); ++g) {
    nn::SlicedBackward slice = settings_.slice(rows_);
    slice.share = values[g];
    for (const pretrained::LayerParts& layer : groups_[g].layers) layer.layer->form = slice;
  }
}

AutoRows::Batch AutoRows::observe(const optim::Optimizer& optimizer, const Passes& passes, int i) const {
  Batch seen{.norms = std::vector<RowNorms>(groups_.size()), .gradients = {}};
  const BatchRows rows = passes.load(i);
  std::vector<pretrained::LayerParts> layers;
  for (const Group& group : groups_) layers.insert(layers.end(), group.layers.begin(), group.layers.end());
  const auto see = [&](const nn::LinearCall& call, const Tensor& dy) {
    for (size_t g = 0; g < groups_.size(); ++g)
      for (const pretrained::LayerParts& layer : groups_[g].layers) {
        if (layer.name != call.name) continue;
        const int64_t all = dy.count() / dy.size(-1), valid = all == rows.rows ? rows.valid : all;
        std::vector<double> dy_norms = norms_of(dy, valid);
        const std::vector<double> x_norms = norms_of(call.input, valid);
        RowNorms& to = seen.norms[g];
        to.squares.resize(dy_norms.size());
        for (size_t row = 0; row < dy_norms.size(); ++row)
          to.squares[row] += dy_norms[row] * dy_norms[row] * x_norms[row] * x_norms[row];
        if (&layer == &groups_[g].layers.back()) to.norms = std::move(dy_norms);
      }
  };
  const DenseScope dense(layers);
  const nn::Observe scope(model_, {.forward = {}, .backward = see});
  seen.gradients = copy_gradients(optimizer, passes.backward);
  return seen;
}

std::vector<std::vector<ShareOption>> AutoRows::options_of(const std::vector<Batch>& batches) const {
  std::vector<std::vector<ShareOption>> options(groups_.size());
  for (size_t g = 0; g < groups_.size(); ++g) {
    double multiply_adds = 0;
    for (const pretrained::LayerParts& layer : groups_[g].layers)
      multiply_adds += double(layer.layer->in) * double(layer.layer->out);
    const double columns = double(groups_[g].layers.back().layer->out);
    for (const double share : share_steps()) {
      ShareOption option{.share = share, .variance = 0, .seconds = 0};
      for (const Batch& batch : batches) {
        const auto rows = int64_t(batch.norms[g].norms.size());
        if (rows == 0) continue;
        const int64_t k = ops::share_of_rows(rows, share);
        if (share < 1) option.variance += sampling_variance(batch.norms[g], k) / double(batches.size());
        // Where all rows are chosen the backward pass is the dense one. dx and dW: 2 FLOPs each.
        option.seconds += backward_seconds(double(rows), 4 * double(rows) * multiply_adds, columns,
                                           double(k) / double(rows), gpu_) /
                          double(batches.size());
      }
      options[g].push_back(option);
    }
  }
  return options;
}

double AutoRows::measure(const optim::Optimizer& optimizer, const Passes& passes,
                         const std::vector<Batch>& batches) const {
  double sum = 0;
  for (int i = 0; i < kBatches; ++i) {
    passes.load(i);
    for (int draw = 0; draw < kDraws; ++draw)
      sum += squared_distance(copy_gradients(optimizer, passes.backward), batches[size_t(i)].gradients);
  }
  return sum / (kBatches * kDraws);
}

void AutoRows::set_shares(const std::vector<std::vector<ShareOption>>& options,
                          const std::vector<size_t>& chosen) {
  std::vector<double> values;
  for (size_t g = 0; g < groups_.size(); ++g) values.push_back(options[g][chosen[g]].share);
  shares.copy_from(Tensor::from(values, {int64_t(values.size())}));
  apply();
}

RowEstimate AutoRows::estimate(const optim::Optimizer& optimizer, const Passes& passes) {
  RowEstimate found;
  std::vector<Batch> batches;
  for (int i = 0; i < kBatches; ++i) batches.push_back(observe(optimizer, passes, i));
  found.passes = kBatches;
  static_assert(kBatches == 2);  // sum |g_i - mean|^2 / (kBatches - 1)
  found.batch_variance = squared_distance(batches[0].gradients, batches[1].gradients) / 2;
  const double bound = settings_.variance * found.batch_variance;
  const std::vector<std::vector<ShareOption>> options = options_of(batches);
  const double kept = factor.to_vector<double>()[0];
  bool known = kept > 0;
  double ratio = known ? kept : 1;  // of measured to predicted variance
  std::vector<size_t> chosen(groups_.size(), 0);
  found.held = false;
  for (int round = 0; round < kRounds && std::isfinite(bound) && !found.held; ++round) {
    chosen = choose_options(options, kAim * bound / ratio);
    set_shares(options, chosen);
    double predicted = 0;
    for (size_t g = 0; g < groups_.size(); ++g) predicted += options[g][chosen[g]].variance;
    const bool all_rows = std::ranges::all_of(chosen, [](size_t option) { return option == 0; });
    const double added = all_rows ? 0 : measure(optimizer, passes, batches);
    found.passes += all_rows ? 0 : kBatches * kDraws;
    found.held = added <= bound && (known || all_rows);
    found.added_variance = bound > 0 ? added / found.batch_variance : 0;
    // All rows measure nothing: the next estimate tries fewer again.
    if (all_rows) ratio /= 2;
    if (predicted > 0) ratio = found.held ? (ratio + added / predicted) / 2 : added / predicted;
    known = true;
  }
  if (!found.held) {
    chosen.assign(groups_.size(), 0), found.added_variance = 0;
    set_shares(options, chosen);
  }
  factor.fill(std::isfinite(ratio) ? ratio : 0);
  for (size_t g = 0; g < groups_.size(); ++g) {
    found.seconds_dense += options[g][0].seconds;
    found.seconds_sliced += options[g][chosen[g]].seconds;
  }
  return found;
}

}  // namespace tessera::train
