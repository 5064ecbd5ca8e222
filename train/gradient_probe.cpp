#include "train/gradient_probe.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "ops/pointwise/pointwise.h"
#include "ops/reduce/reduce.h"

namespace tessera::train {
namespace {

double dot(const Tensor& a, const Tensor& b) {
  return ops::sum(ops::mul(a, b)).item<double>();
}

/// What the distances are made of.
struct Sums {
  double dense = 0, first = 0, cross = 0;  // |g|^2, |g'|^2 of the first draw, g g'
  double squares = 0;                      // of all draws
  double mean = 0, off = 0;                // |mean|^2, |mean - g|^2

  Sums& operator+=(const Sums& other) {
    dense += other.dense, first += other.first, cross += other.cross, squares += other.squares;
    mean += other.mean, off += other.off;
    return *this;
  }
  GradientDistance distance(std::string name, int draws) const {
    GradientDistance to{.name = std::move(name)};
    if (dense > 0 && first > 0) to.cosine = cross / std::sqrt(dense * first);
    if (dense > 0) to.bias = std::sqrt(off / dense);
    if (dense > 0 && draws > 1) to.variance = std::max(0.0, (squares - draws * mean) / (draws - 1) / dense);
    return to;
  }
};

}  // namespace

DenseScope::DenseScope(std::vector<pretrained::LayerParts> layers) : layers_(std::move(layers)) {
  for (const pretrained::LayerParts& layer : layers_)
    forms_.push_back(std::exchange(layer.layer->form, nn::Dense{}));
}

DenseScope::~DenseScope() {
  for (size_t i = 0; i < layers_.size(); ++i) layers_[i].layer->form = forms_[i];
}

std::vector<Tensor> copy_gradients(const optim::Optimizer& optimizer, const std::function<void()>& backward) {
  optimizer.zero_grad();
  backward();
  std::vector<Tensor> copies;
  for (const nn::NamedParameter& parameter : optimizer.parameters()) {
    const Tensor gradient = grad(parameter.tensor);
    copies.push_back(gradient.defined()
                         ? gradient.to(DType::f32).clone()
                         : Tensor::zeros(parameter.tensor.shape(), DType::f32, parameter.tensor.device()));
  }
  optimizer.zero_grad();
  return copies;
}

double squared_distance(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  check(a.size() == b.size(), "squared_distance: ", a.size(), " and ", b.size(), " tensors");
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const Tensor off = ops::sub(a[i], b[i]);
    sum += dot(off, off);
  }
  return sum;
}

std::vector<GradientDistance> probe_gradient(const std::vector<pretrained::LayerParts>& layers,
                                             const optim::Optimizer& optimizer, int draws,
                                             const std::function<void()>& backward) {
  check(draws >= 1, "probe_gradient: ", draws, " draws; expected at least 1");
  const std::vector<nn::NamedParameter>& parameters = optimizer.parameters();
  std::vector<Tensor> dense;
  {
    const DenseScope scope(layers);
    dense = copy_gradients(optimizer, backward);
  }
  std::vector<Sums> sums(parameters.size());
  std::vector<Tensor> means(parameters.size());
  for (int draw = 0; draw < draws; ++draw) {
    const std::vector<Tensor> drawn = copy_gradients(optimizer, backward);
    for (size_t i = 0; i < drawn.size(); ++i) {
      const double square = dot(drawn[i], drawn[i]);
      sums[i].squares += square;
      if (draw == 0) sums[i].first = square, sums[i].cross = dot(dense[i], drawn[i]);
      const Tensor share = ops::scale(drawn[i], 1.0 / draws);
      means[i] = draw == 0 ? share : ops::add(means[i], share);
    }
  }
  Sums all;
  std::vector<GradientDistance> distances;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Tensor off = ops::sub(means[i], dense[i]);
    sums[i].dense = dot(dense[i], dense[i]), sums[i].mean = dot(means[i], means[i]),
    sums[i].off = dot(off, off);
    all += sums[i];
    const bool is_sliced = std::ranges::any_of(layers, [&](const pretrained::LayerParts& layer) {
      return parameters[i].name == layer.name + ".weight";
    });
    if (is_sliced) distances.push_back(sums[i].distance(parameters[i].name, draws));
  }
  distances.push_back(all.distance("all", draws));
  return distances;
}

}  // namespace tessera::train
