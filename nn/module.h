#pragma once

#include <functional>
#include <map>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

#include "autograd/tape.h"
#include "nn/layer_call.h"
#include "tensor/fields.h"

/// Functions for models. A model is any struct that lists its parts in fields(). There is no base class and
/// no registration. A layer may name itself for the summary (`static constexpr const char* kKind`) and tell
/// the work of one forward pass over `tokens` rows beyond that of its parts (`double flops(int64_t tokens)
/// const`).
///
/// A model is as cheap to copy as its tensors, which are handles: the copy has the same weights and
/// gradients, and training one trains both. A second model with weights of its own is made and filled with
/// io::load, or by copying each parameter.

namespace tessera::nn {

struct NamedParameter {
  std::string name;  // "blocks.3.mlp.up.weight"
  Tensor tensor;     // shares storage and gradient with the model's
};

/// Makes a tensor a parameter: it requires a gradient, which is f32 for bf16 and f16, else of its own dtype.
void make_parameter(Tensor& tensor);

namespace detail {

/// One walk for all functions: a model's parts are many types, and a walk is compiled for each visitor.
template <class Part, class Model>
void for_each_part(Model& model, const std::function<void(const std::string&, Part&)>& f) {
  for_each_node(model, [&](const std::string& name, auto& node) {
    if constexpr (std::is_same_v<decltype(node), Part&>) f(name, node);
  });
}

}  // namespace detail

/// Calls `f(const std::string& name, Part& part)` for every part of that type, such as a layer: a finished
/// model can be re-equipped. Of a const model the parts are const.
template <class Part, class Model, class F>
void for_each(Model& model, F&& f) {
  detail::for_each_part<std::conditional_t<std::is_const_v<Model>, const Part, Part>>(model, std::ref(f));
}

/// The tensors of the model that require a gradient, in the order of fields(). A tensor that appears twice
/// (tied weights) is listed once, by its first name. Names begin with the prefix, and a point, if one is
/// given: those of several models may go to one optimizer. Names the layers for messages (nn/layer_call.h).
template <class Model>
std::vector<NamedParameter> parameters(const Model& model, const std::string& prefix = "") {
  name_layers(model);
  std::vector<NamedParameter> list;
  std::set<const GradState*> known;
  for_each<Tensor>(model, [&](const std::string& name, const Tensor& leaf) {
    if (leaf.defined() && requires_grad(leaf) && known.insert(leaf.grad_state().get()).second)
      list.push_back({prefix.empty() || name.empty() ? prefix + name : prefix + '.' + name, leaf});
  });
  return list;
}

/// Number of elements in the model's parameters.
template <class Model>
int64_t count_parameters(const Model& model) {
  int64_t count = 0;
  for (const NamedParameter& parameter : parameters(model)) count += parameter.tensor.count();
  return count;
}

/// Forgets the gradients of all parameters; see tessera::zero_grad.
template <class Model>
void zero_grad(const Model& model) {
  for (const NamedParameter& parameter : parameters(model)) tessera::zero_grad(parameter.tensor);
}

namespace detail {

/// Whether two tensors are one: the same parameter, or, without gradients (frozen ones), the same elements.
inline bool are_tied(const Tensor& a, const Tensor& b) {
  if (requires_grad(a) || requires_grad(b)) return a.grad_state() == b.grad_state();
  return a.same_elements(b);
}

/// Replaces every tensor of the model by convert(tensor); tied tensors stay tied, parameters stay parameters.
/// The old parameters note `by`, unless it is null, as the function that took them out of the model.
template <class Model, class Convert>
void replace_tensors(Model& model, const char* by, Convert&& convert) {
  // By storage: tensors that others share, and what became of them. They stay alive: none gets their address.
  std::multimap<const void*, std::pair<Tensor, Tensor>> moved;
  for_each<Tensor>(model, [&](const std::string&, Tensor& leaf) {
    if (!leaf.defined()) return;
    const Tensor old = leaf;
    for (auto [at, end] = moved.equal_range(old.storage().get()); at != end; ++at) {
      if (!are_tied(at->second.first, old)) continue;
      leaf = at->second.second;
      return;
    }
    Tensor next = convert(old.detach());
    if (next.shares_storage(old)) return;
    if (requires_grad(old)) {
      make_parameter(next);
      if (by) old.grad_state()->replaced_by = by;
    }
    leaf = next;
    if (old.storage().use_count() > 1) moved.emplace(old.storage().get(), std::pair(old, next));
  });
}

}  // namespace detail

/// Stops training the parameters whose names `which(const std::string& name)` accepts: they get no gradient
/// any more, tied ones under none of their names. Make the optimizer afterwards.
///
/// A frozen copy of a model shares its weights, and backward passes through it leave their gradients alone.
/// A pass within a loss needs that, such as one for the gradient of an input (adversarial examples): through
/// the model itself it adds to the gradients of all its parameters, as every pass does.
///
/// ```cpp
/// auto frozen = model;
/// nn::freeze(frozen, [](const std::string&) { return true; });
/// ```
template <class Model, class Which>
void freeze(Model& model, Which&& which) {
  std::set<std::shared_ptr<GradState>> frozen;
  for_each<Tensor>(model, [&](const std::string& name, Tensor& leaf) {
    if (leaf.defined() && requires_grad(leaf) && which(name)) frozen.insert(leaf.grad_state());
  });
  for_each<Tensor>(model, [&](const std::string&, Tensor& leaf) {
    if (leaf.defined() && frozen.contains(leaf.grad_state())) leaf = leaf.detach();
  });
  for (const std::shared_ptr<GradState>& state : frozen) state->replaced_by = "nn::freeze";
}

/// A copy of the model with tensors of its own, as target networks, ensembles and the best weights so far
/// need it: a plain copy, `auto b = a`, shares the weights. Tied tensors are tied in the copy, parameters are
/// parameters, without gradients, frozen tensors are frozen; dtypes, devices, forms and training mode are
/// those of the model. What fields() does not list is copied as the model's types copy it: a Dropout of the
/// copy draws from the generator of the model's.
template <class Model>
Model clone(const Model& model) {
  Model copy = model;
  detail::replace_tensors(copy, nullptr, [](const Tensor& tensor) { return tensor.clone(); });
  return copy;
}

/// Moves the model. Its tensors are new ones: make the optimizer afterwards.
template <class Model>
void to(Model& model, Device device) {
  detail::replace_tensors(model, "nn::to", [&](const Tensor& tensor) { return tensor.to(device); });
}

/// Converts the floating tensors of the model, and sets `config.dtype` where a model or a part of it has one.
/// Its tensors are new ones: make the optimizer afterwards.
template <class Model>
void to(Model& model, DType dtype) {
  check(is_floating(dtype), "nn::to: parameters cannot be ", dtype, "; expected a floating dtype");
  detail::replace_tensors(model, "nn::to", [&](const Tensor& tensor) {
    return is_floating(tensor.dtype()) ? tensor.to(dtype) : tensor;
  });
  for_each_node(model, [&](const std::string&, auto& node) {
    if constexpr (requires(DType & setting) { setting = node.config.dtype; }) node.config.dtype = dtype;
  });
}

}  // namespace tessera::nn
