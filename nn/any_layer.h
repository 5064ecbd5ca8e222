#pragma once

#include <functional>
#include <memory>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "nn/attention.h"
#include "nn/dropout.h"
#include "nn/linear.h"
#include "nn/mlp.h"

namespace tessera::nn {

class AnyLayer;

namespace any_layer {

// What walks over a model (nn::parameters, nn::load, io::save, nn::summary, ...) ask of a layer whose type
// they cannot know: its name for messages, its dtype, and what the summary prints.
struct Named {
  const LayerName& layer_name;
  void fields(auto&&) {}
};
struct Configured {
  struct {
    DType& dtype;
  } config;
  void fields(auto&&) {}
};
struct Described {
  const char* kKind;
  std::function<double(int64_t tokens)> flops;
  void fields(auto&&) {}
};

/// The leaves of fields() that a held layer may list.
using Leaves =
    std::variant<Tensor*, Rng*, std::string*, bool*, int32_t*, int64_t*, uint32_t*, uint64_t*, float*,
                 double*, std::vector<int32_t>*, std::vector<int64_t>*, std::vector<uint32_t>*,
                 std::vector<uint64_t>*, std::vector<float>*, std::vector<double>*>;
/// The layers that functions of the library look for by their type.
using Layers = std::variant<Linear*, GroupedLinear*, Mlp*, SelfAttention*, Dropout*>;

template <class Variant, class T>
inline constexpr bool kHas = false;
template <class... Held, class T>
inline constexpr bool kHas<std::variant<Held...>, T> = (std::is_same_v<Held, T*> || ...);

template <class... Variants>
struct Joined;
template <class... A, class... B>
struct Joined<std::variant<A...>, std::variant<B...>> {
  using Type = std::variant<A..., B..., Named, Configured, Described>;
};
using Part = Joined<Leaves, Layers>::Type;

struct NamedPart {
  std::string name;
  Part part;
};

/// Lists the parts of a layer, parents first; layers of known types whole.
struct Lister {
  template <class T>
  static constexpr bool kTakesWhole = kHas<Layers, T>;

  template <class T>
  void operator()(const std::string& name, T& node) const {
    if constexpr (Leaf<T>) {
      static_assert(
          kHas<Leaves, T>,
          "nn::AnyLayer: fields() of the layer lists a number of another type than bool, int32_t, int64_t, "
          "uint32_t, uint64_t, float and double");
      parts.push_back({name, &node});
    } else if constexpr (kHas<Layers, T>) {
      parts.push_back({name, &node});
    } else if constexpr (std::is_same_v<T, Named> || std::is_same_v<T, Configured> ||
                         std::is_same_v<T, Described>) {
      parts.push_back({name, node});  // of an AnyLayer within the layer
    } else if constexpr (HasFields<T>) {
      if constexpr (requires { node.layer_name.get(); }) parts.push_back({name, Named{node.layer_name}});
      if constexpr (requires(DType & dtype) { node.config.dtype = dtype; })
        parts.push_back({name, Configured{{node.config.dtype}}});
      Described described{"", [](int64_t) { return 0.0; }};
      if constexpr (requires { node.kKind; }) described.kKind = node.kKind;
      if constexpr (requires { node.flops(int64_t{1}); })
        described.flops = [&node](int64_t tokens) { return node.flops(tokens); };
      parts.push_back({name, std::move(described)});  // last: tensors belong to this row of a summary
    }
  }
  std::vector<NamedPart>& parts;
};

/// A layer of its own: operator()(x) const, and fields().
template <class Layer>
concept Holdable = !std::is_same_v<Layer, AnyLayer> && HasFields<Layer> &&
                   std::is_copy_constructible_v<Layer> && requires(const Layer& layer, const Tensor& x) {
  { layer(x) } -> std::same_as<Tensor>;
};

}  // namespace any_layer

/// A layer of any type Tensor -> Tensor, chosen at run time: a value that holds a copy of it. A list of them
/// is a part of a model like any other:
///
/// ```cpp
/// struct Net {
///   std::vector<nn::AnyLayer> layers;
///   Net(const std::vector<int64_t>& widths, const Rng& rng) {
///     for (size_t i = 0; i + 1 < widths.size(); ++i) {
///       if (i > 0) layers.push_back(nn::Gelu{});
///       layers.push_back(nn::Linear(widths[i], widths[i + 1], rng));
///     }
///   }
///   Tensor operator()(Tensor x) const {
///     for (const nn::AnyLayer& layer : layers) x = layer(x);
///     return x;
///   }
///   void fields(auto&& visit) { visit("layers", layers); }
/// };
/// ```
///
/// Its parts have the names that they would have without it ("layers.2.weight"): checkpoints and weights fit
/// models that spell the types out. nn::parameters, load, clone, freeze, to and summary, io::save and
/// io::load treat it as the layer that it holds. Functions that look for layers by type find Linear,
/// GroupedLinear, Mlp, SelfAttention and Dropout in it; of another type, nn::for_each does not, but
/// as<Layer>() does.
///
/// A copy is like one of the layer: it shares the weights. A held layer must list its parts in fields(), its
/// numbers as bool, int32_t, int64_t, uint32_t, uint64_t, float or double, or vectors of these, and must be
/// copyable; it is called with x alone.
class AnyLayer {
 public:
  template <any_layer::Holdable Layer>
  AnyLayer(Layer layer) : held_(std::make_unique<Holder<Layer>>(std::move(layer))) {}
  AnyLayer(const AnyLayer& other) : held_(other.held_ ? other.held_->copy() : nullptr) {}
  AnyLayer(AnyLayer&&) = default;
  AnyLayer& operator=(AnyLayer other) {
    held_ = std::move(other.held_);
    layer_name = LayerName();
    return *this;
  }

  Tensor operator()(const Tensor& x, Site site = Site::here()) const {
    const LayerCall call(*this, site);
    check(held_ != nullptr, "nn::AnyLayer: it was moved from; call the one that it moved to");
    return held_->call(x);
  }
  /// The layer, if it has exactly that type, else null.
  template <class Layer>
  Layer* as() {
    auto* const holder = dynamic_cast<Holder<Layer>*>(held_.get());
    return holder ? &holder->layer : nullptr;
  }
  template <class Layer>
  const Layer* as() const {
    return const_cast<AnyLayer*>(this)->as<Layer>();
  }
  void fields(auto&& visit) {
    if (!held_) return;
    for (any_layer::NamedPart& named : held_->parts())
      std::visit(
          [&](auto& part) {
            if constexpr (std::is_pointer_v<std::remove_reference_t<decltype(part)>>)
              visit(named.name, *part);
            else
              visit(named.name, part);
          },
          named.part);
  }
  LayerName layer_name;  // for messages

 private:
  struct Base {
    virtual ~Base() = default;
    virtual std::unique_ptr<Base> copy() const = 0;
    virtual Tensor call(const Tensor& x) const = 0;
    virtual std::vector<any_layer::NamedPart> parts() = 0;
  };
  template <class Layer>
  struct Holder : Base {
    explicit Holder(Layer layer) : layer(std::move(layer)) {}
    std::unique_ptr<Base> copy() const override { return std::make_unique<Holder>(layer); }
    Tensor call(const Tensor& x) const override { return layer(x); }
    std::vector<any_layer::NamedPart> parts() override {
      std::vector<any_layer::NamedPart> list;
      for_each_node(layer, any_layer::Lister{list});
      return list;
    }
    Layer layer;
  };

  std::unique_ptr<Base> held_;
};

}  // namespace tessera::nn
