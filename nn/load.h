#pragma once

#include <functional>
#include <map>
#include <ranges>
#include <string>
#include <vector>

#include "nn/module.h"

namespace tessera::nn {

struct LoadOptions {
  /// Throws if a tensor of the model is missing from the weights, or one of the weights has no place in the
  /// model. false: those of the model keep their values, those of the weights are left out, and the report
  /// lists them.
  bool strict = true;
  /// The name in the model of the tensor that the weights call `name`; "" leaves it out. Empty: the same.
  std::function<std::string(const std::string& name)> rename = {};
};

/// What did not fit, in the order of names; empty if all did.
struct LoadReport {
  std::vector<std::string> missing;     // names in the model; of tied tensors the first one
  std::vector<std::string> unexpected;  // names in the weights
};

/// Copies weights into the tensors of the model with the same names, parameters or not, on any device. The
/// weights are any range of names and tensors:
///
/// ```cpp
/// nn::Linear model(2, 3, rng), other(2, 3, rng);
/// nn::load(model, io::load_weights("model.pt"));  // or safetensors, or a Hugging Face model directory
/// nn::load(model, io::Checkpoint::read("run.safetensors").part("model").tensors());
/// nn::load(model, nn::parameters(other));
/// ```
///
/// Shapes must be the same. A floating tensor may have another floating dtype than the model's and is rounded
/// once; others must have the model's. Tied tensors of the model need their values under one of their names
/// at least, and the same bits under all that are there.
///
/// Throws, with a list of all that does not fit: missing and unexpected names, other shapes and dtypes, two
/// tensors for one name, tied ones that differ, tensors of the model that cannot be written (expanded ones
/// and results of a tape); or if finite values would become infinite in the model's dtype. The model is
/// unchanged then. An optimizer that was made before needs sync_masters() afterwards.
template <class Model, std::ranges::input_range Weights>
LoadReport load(Model& model, const Weights& weights, const LoadOptions& options = {});

/// Collects what does not fit together, for one message.
class Misfits {
 public:
  void add(const std::string& kind, const std::string& what) { kinds_[kind].push_back(what); }
  bool empty() const { return kinds_.empty(); }
  /// Lines of a message, each beginning with its kind, some of each kind: names that all begin in another way
  /// are missing and unexpected, and only both tell why.
  std::string lines() const;

 private:
  std::map<std::string, std::vector<std::string>> kinds_;
};

namespace detail {

LoadReport load_tensors(const std::vector<NamedParameter>& tensors,
                        const std::vector<NamedParameter>& weights, const LoadOptions& options);

}  // namespace detail

template <class Model, std::ranges::input_range Weights>
LoadReport load(Model& model, const Weights& weights, const LoadOptions& options) {
  std::vector<NamedParameter> tensors, given;
  for_each<Tensor>(model, [&](const std::string& name, Tensor& tensor) {
    if (tensor.defined()) tensors.push_back({name, tensor});
  });
  for (const auto& [name, tensor] : weights) given.push_back({name, tensor.detach()});
  return detail::load_tensors(tensors, given, options);
}

}  // namespace tessera::nn
