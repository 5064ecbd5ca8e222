#pragma once

#include <atomic>
#include <cstring>
#include <string>
#include <type_traits>

#include "runtime/call_site.h"
#include "tensor/fields.h"

/// Messages name the layer that failed, "blocks.3.mlp.down", as fields() names it. A layer that is to be
/// named holds a `nn::LayerName layer_name;` and begins its functions with `const LayerCall call(*this,
/// site);`, where `site` is their defaulted last parameter.

namespace tessera::nn {

/// The name of a layer in its model, as far as it is known; a copy of a layer has none, since it may become
/// part of another model.
class LayerName {
 public:
  LayerName() = default;
  LayerName(const LayerName&) {}
  LayerName& operator=(const LayerName&) {
    name_ = nullptr;
    return *this;
  }
  /// Never deleted; null if the name is unknown.
  const char* get() const { return name_.load(std::memory_order_relaxed); }
  /// A layer that several walks have seen keeps its longest name: that in the outermost model.
  void set(const std::string& name) const {
    const char* const known = get();
    if (!known || std::strlen(known) < name.size()) name_ = intern_name(name);
  }

 private:
  mutable std::atomic<const char*> name_ = nullptr;  // threads may call one model at once
};

/// Gives every layer of the model its name. The first call of a model does this, and nn::parameters.
template <class Model>
void name_layers(const Model& model) {
  for_each_node(model, [](const std::string& name, auto& node) {
    if constexpr (requires { node.layer_name.get(); }) node.layer_name.set(name);
  });
}

/// A CallScope that names the layer. Costs one more load, and allocates only when a model is called for the
/// first time.
class LayerCall : public CallScope {
 public:
  template <class Layer>
  LayerCall(const Layer& layer, Site site) : CallScope(site, name_of(layer)) {}

 private:
  template <class Layer>
  static const char* name_of(const Layer& layer) {
    const char* const name = layer.layer_name.get();
    if (name || CallScope::current().module) [[likely]]
      return name;
    name_layers(layer);
    return layer.layer_name.get();
  }
};

}  // namespace tessera::nn
