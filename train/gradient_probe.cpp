#include "train/gradient_probe.h"

#include <algorithm>
#include <cmath>

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

/// The form while it lives, then the other again.
class FormScope {
 public:
  FormScope(const pretrained::LinearModules& modules, const std::string& layers, const nn::Form& form,
            const nn::Form& after)
      : modules_(modules), layers_(layers), after_(after), names_(set_form(modules, layers, form)) {}
  ~FormScope() { set_form(modules_, layers_, after_); }
  FormScope(const FormScope&) = delete;
  const std::vector<std::string>& names() const { return names_; }

 private:
  const pretrained::LinearModules& modules_;
  const std::string& layers_;
  const nn::Form& after_;
  std::vector<std::string> names_;
};

}  // namespace

std::vector<GradientDistance> probe_gradient(const pretrained::LinearModules& modules,
                                             const std::string& layers, const nn::Slice& sliced,
                                             const optim::Optimizer& optimizer, int draws,
                                             const std::function<void()>& backward) {
  check(draws >= 1, "probe_gradient: ", draws, " draws; expected at least 1");
  const std::vector<nn::NamedParameter>& parameters = optimizer.parameters();
  const auto gradients = [&] {
    optimizer.zero_grad();
    backward();
    std::vector<Tensor> copies;
    for (const nn::NamedParameter& parameter : parameters) {
      const Tensor gradient = grad(parameter.tensor);
      copies.push_back(gradient.defined()
                           ? gradient.to(DType::f32).clone()
                           : Tensor::zeros(parameter.tensor.shape(), DType::f32, parameter.tensor.device()));
    }
    optimizer.zero_grad();
    return copies;
  };
  const nn::Form form = sliced;
  std::vector<std::string> names;
  std::vector<Tensor> dense;
  {
    const FormScope scope(modules, layers, nn::Dense{}, form);
    names = scope.names();
    dense = gradients();
  }
  std::vector<Sums> sums(parameters.size());
  std::vector<Tensor> means(parameters.size());
  for (int draw = 0; draw < draws; ++draw) {
    const std::vector<Tensor> drawn = gradients();
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
    const bool is_sliced = std::ranges::any_of(
        names, [&](const std::string& layer) { return parameters[i].name == layer + ".weight"; });
    if (is_sliced) distances.push_back(sums[i].distance(parameters[i].name, draws));
  }
  distances.push_back(all.distance("all", draws));
  return distances;
}

}  // namespace tessera::train
