#pragma once

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "runtime/rng.h"
#include "tensor/tensor.h"

/// The fields convention: a struct lists its parts once, and every walk over parts (parameters, saving,
/// loading, moving, counting, printing) is a few lines over `for_each_field`.
///
/// ```cpp
/// struct Head {
///   Tensor bias;
///   void fields(auto&& visit) { visit("bias", bias); }
/// };
/// struct Layer {
///   Tensor weight;
///   std::vector<Head> heads;
///   void fields(auto&& visit) { visit("weight", weight), visit("heads", heads); }
/// };
/// ```
///
/// ```cpp
/// Layer layer;
/// for_each_field(layer, [](const std::string& name, auto& leaf) {  // "weight", "heads.0.bias"
///   std::printf("%s has rank %d\n", name.c_str(), leaf.rank());
/// });
/// ```
///
/// A part listed as "" has the name of the struct that lists it. Parts are visited in the order listed.
/// Leaves are Tensor, Rng, std::string, arithmetic types, enumerations and vectors of arithmetic types (a
/// curve, a permutation). Containers name their elements by index: std::vector, std::array, std::tuple,
/// std::pair. std::optional, std::unique_ptr and std::variant are transparent: an empty one has no parts, a
/// full one has the name of its value. Anything else must have fields().

namespace tessera {

namespace fields_detail {

struct AnyVisitor {
  template <class T>
  void operator()(std::string_view, T&) const {}
};

/// Whether T is a class made of that template.
template <class T, template <class...> class Of>
inline constexpr bool kIs = false;
template <class... Arguments, template <class...> class Of>
inline constexpr bool kIs<Of<Arguments...>, Of> = true;
template <class T>
inline constexpr bool kIsHolder = kIs<T, std::optional> || kIs<T, std::unique_ptr>;
template <class T>
inline constexpr bool kIsTuple = kIs<T, std::tuple> || kIs<T, std::pair>;
template <class T>
inline constexpr bool kIsArray = false;
template <class T, size_t kSize>
inline constexpr bool kIsArray<std::array<T, kSize>> = true;
template <class T>
inline constexpr bool kIsNumbers = false;
template <class T>
inline constexpr bool kIsNumbers<std::vector<T>> = std::is_arithmetic_v<T> && !std::is_same_v<T, bool>;
template <class T>
inline constexpr bool kUnsupported = false;

}  // namespace fields_detail

/// A struct that lists its parts.
template <class T>
concept HasFields = requires(std::remove_const_t<T>& object) {
  object.fields(fields_detail::AnyVisitor{});
};

/// A field that is a value by itself.
template <class T>
concept Leaf = std::is_same_v<T, Tensor> || std::is_same_v<T, Rng> || std::is_same_v<T, std::string> ||
    std::is_arithmetic_v<T> || std::is_enum_v<T> || fields_detail::kIsNumbers<T>;

namespace fields_detail {

/// Whether a visitor takes structs of that type whole: their parts are not visited.
template <class Visitor, class Node>
concept TakesWhole = requires {
  requires Visitor::template kTakesWhole<Node>;
};

/// Depth first, parents before their parts; `name` grows and shrinks in place. With a const object the
/// visitor gets const parts: fields() itself only lists, so calling it on a const object changes nothing.
template <class T, class Visitor>
void walk(std::string& name, T& node, Visitor& visitor) {
  using Plain = std::remove_const_t<T>;
  const auto step = [&](std::string_view part, auto& child) {
    const size_t length = name.size();
    if (length && !part.empty()) name += '.';
    name += part;
    walk(name, child, visitor);
    name.resize(length);
  };
  if constexpr (kIsHolder<Plain>) {
    using Held = std::remove_reference_t<decltype(*node)>;
    using Part = std::conditional_t<std::is_const_v<T>, const Held, Held>;
    if (node) walk<Part>(name, *node, visitor);
  } else if constexpr (kIs<Plain, std::variant>) {
    std::visit([&](auto& held) { walk(name, held, visitor); }, node);
  } else if constexpr (Leaf<Plain>) {
    visitor(std::as_const(name), node);
  } else if constexpr (kIs<Plain, std::vector> || kIsArray<Plain>) {
    visitor(std::as_const(name), node);
    for (size_t i = 0; i < node.size(); ++i) step(std::to_string(i), node[i]);
  } else if constexpr (kIsTuple<Plain>) {
    visitor(std::as_const(name), node);
    size_t index = 0;
    std::apply([&](auto&... parts) { (step(std::to_string(index++), parts), ...); }, node);
  } else if constexpr (HasFields<Plain>) {
    visitor(std::as_const(name), node);
    if constexpr (!TakesWhole<Visitor, Plain>)
      const_cast<Plain&>(node).fields([&](std::string_view part, auto& child) {
        if constexpr (std::is_const_v<T>)
          step(part, std::as_const(child));
        else
          step(part, child);
      });
  } else if constexpr (std::is_same_v<Plain, std::monostate>) {
    return;
  } else {
    static_assert(kUnsupported<T>,
                  "for_each_field: this type is neither a leaf nor a container and has no fields()");
  }
}

}  // namespace fields_detail

/// Calls `visitor(const std::string& name, auto& node)` for the object (name "" unless a prefix is given) and
/// every part below it: structs, containers and leaves; parents first. For finding layers by type.
template <class T, class Visitor>
void for_each_node(T& object, Visitor&& visitor, std::string prefix = "") {
  fields_detail::walk(prefix, object, visitor);
}

/// Calls `visitor(const std::string& name, auto& leaf)` for every leaf, with dotted names:
/// "blocks.3.attention.weight".
template <class T, class Visitor>
void for_each_field(T& object, Visitor&& visitor, std::string prefix = "") {
  auto leaves = [&](const std::string& name, auto& node) {
    if constexpr (Leaf<std::remove_cvref_t<decltype(node)>>) visitor(name, node);
  };
  fields_detail::walk(prefix, object, leaves);
}

}  // namespace tessera
