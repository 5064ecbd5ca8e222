#pragma once

#include "io/checkpoint.h"

/// Conversion of a leaf to a checkpoint's value and back. Included by io/checkpoint.h.

namespace tessera::io {
namespace leaf {

template <class T>
inline constexpr bool kIsNamed = false;
template <class T>
inline constexpr bool kIsNamed<Named<T>> = true;

/// A vector of numbers is stored as a tensor of rank 1: in its own dtype if there is one, else (the other
/// integers) as i64 with the same bits.
template <class T>
constexpr bool has_dtype =
    std::is_same_v<T, double> || std::is_same_v<T, float> || std::is_same_v<T, int64_t> ||
    std::is_same_v<T, int32_t> || std::is_same_v<T, uint8_t>;
template <class T>
using Stored = std::conditional_t<has_dtype<T>, T, int64_t>;

template <class T>
constexpr const char* scalar_type() {
  if constexpr (std::is_same_v<T, bool>)
    return "bool";
  else if constexpr (std::is_same_v<T, float>)
    return "f32";
  else if constexpr (std::is_same_v<T, double>)
    return "f64";
  else if constexpr (std::is_enum_v<T>)
    return scalar_type<std::underlying_type_t<T>>();
  else if constexpr (std::is_integral_v<T>)
    return std::is_signed_v<T> ? "i64" : "u64";
  else if constexpr (std::is_same_v<T, std::string>)
    return "string";
  else
    return "rng";
}

/// The shortest text that reads back as the same number; bool as 0 or 1.
template <class T>
std::string text_of(T value) {
  char digits[64];
  const auto end = std::to_chars(digits, digits + sizeof digits, value).ptr;
  return std::string(digits, end);
}

/// False unless the text is one number of the type and nothing else.
template <class T>
bool parse(std::string_view text, T& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

bool parse_rng(std::string_view text, Rng::State& state);

template <class T>
bool parse_scalar(const std::string& text, T& value) {
  if constexpr (std::is_same_v<T, std::string>) {
    value = text;
    return true;
  } else if constexpr (std::is_same_v<T, bool>) {
    value = text == "1";
    return text == "1" || text == "0";
  } else if constexpr (std::is_enum_v<T>) {
    std::underlying_type_t<T> number{};
    const bool fits = parse_scalar(text, number);
    value = T(number);
    return fits;
  } else if constexpr (std::is_integral_v<T>) {
    std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t> wide = 0;
    const bool fits = parse(text, wide) && decltype(wide)(T(wide)) == wide;
    value = T(wide);
    return fits;
  } else {
    return parse(text, value);
  }
}

/// "f32[2, 3]", "i64".
std::string describe(const Checkpoint::Value& value);
/// Why a tensor cannot take new values; null if it can.
const char* unwritable(const Tensor& tensor);
/// Whether two values are tensors of the same bytes, dtype and shape.
bool are_equal(const Checkpoint::Value& a, const Checkpoint::Value& b);

}  // namespace leaf

template <class T>
Checkpoint::Value encode(const T& value) {
  static_assert(!std::is_same_v<T, long double>, "checkpoint: a long double has no portable text");
  if constexpr (std::is_same_v<T, Tensor>) {
    return value;
  } else if constexpr (fields_detail::kIsNumbers<T>) {
    using Stored = leaf::Stored<typename T::value_type>;
    return Tensor::from(std::vector<Stored>(value.begin(), value.end()), {int64_t(value.size())});
  } else if constexpr (std::is_same_v<T, std::string>) {
    return Checkpoint::Scalar{"string", value};
  } else if constexpr (std::is_same_v<T, Rng>) {
    const Rng::State state = value.state();
    return Checkpoint::Scalar{"rng", leaf::text_of(state.seed) + ' ' + leaf::text_of(state.offset)};
  } else if constexpr (std::is_same_v<T, bool>) {
    return Checkpoint::Scalar{"bool", value ? "1" : "0"};
  } else if constexpr (std::is_enum_v<T>) {
    return encode(static_cast<std::underlying_type_t<T>>(value));
  } else if constexpr (std::is_integral_v<T>) {
    using Wide = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
    return Checkpoint::Scalar{leaf::scalar_type<T>(), leaf::text_of(Wide(value))};
  } else {
    return Checkpoint::Scalar{leaf::scalar_type<T>(), leaf::text_of(value)};
  }
}

/// The type that a leaf expects in a checkpoint: "f32[2, 3]", "i64[any]", "i64 of 32 bits", "rng".
template <class T>
std::string wanted(const T& value) {
  if constexpr (std::is_same_v<T, Tensor>)
    return !value.defined()          ? "nothing (the tensor is undefined)"
           : leaf::unwritable(value) ? leaf::describe(value) + ", " + leaf::unwritable(value)
                                     : leaf::describe(value);
  else if constexpr (fields_detail::kIsNumbers<T>)
    return std::string(name_of(dtype_of<leaf::Stored<typename T::value_type>>)) + "[any]";
  else if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool> && sizeof(T) < sizeof(int64_t))
    return leaf::scalar_type<T>() + (" of " + std::to_string(8 * sizeof(T)) + " bits");
  else
    return leaf::scalar_type<T>();
}

/// Whether the leaf can take the stored value; if `assign`, it does.
template <class T>
bool decode(const Checkpoint::Value& stored, T& value, bool assign) {
  const auto* const tensor = std::get_if<Tensor>(&stored);
  const auto* const scalar = std::get_if<Checkpoint::Scalar>(&stored);
  if constexpr (std::is_same_v<T, Tensor>) {
    if (!tensor || !value.defined() || tensor->dtype() != value.dtype() || tensor->shape() != value.shape() ||
        leaf::unwritable(value))
      return false;
    if (assign) value.copy_from(*tensor);
    return true;
  } else if constexpr (fields_detail::kIsNumbers<T>) {
    using Stored = leaf::Stored<typename T::value_type>;
    if (!tensor || tensor->dtype() != dtype_of<Stored> || tensor->rank() != 1) return false;
    const std::vector<Stored> numbers = tensor->to_vector<Stored>();
    for (const Stored number : numbers)
      if constexpr (std::is_integral_v<Stored>)
        if (Stored(typename T::value_type(number)) != number) return false;
    if (assign) value.assign(numbers.begin(), numbers.end());
    return true;
  } else {
    if (!scalar || scalar->type != leaf::scalar_type<T>()) return false;
    if constexpr (std::is_same_v<T, Rng>) {
      Rng::State state;
      if (!leaf::parse_rng(scalar->text, state)) return false;
      if (assign) value.set_state(state);
    } else {
      T parsed{};
      if (!leaf::parse_scalar(scalar->text, parsed)) return false;
      if (assign) value = std::move(parsed);
    }
    return true;
  }
}

template <class T>
Checkpoint& Checkpoint::add(const std::string& name, const T& thing) {
  for_each_field(
      thing, [&](const std::string& field, const auto& leaf) { put(field, encode(leaf)); }, name);
  return *this;
}

template <class F, class... Things>
void Checkpoint::for_each_thing(F&& f, Things&&... things) {
  const auto plain_name = [](size_t index, bool is_leaf) -> std::string {
    return sizeof...(Things) > 1 ? std::to_string(index) : is_leaf ? "value" : "";
  };
  size_t index = 0;
  const auto one = [&](auto& thing) {
    using Thing = std::remove_cvref_t<decltype(thing)>;
    if constexpr (leaf::kIsNamed<Thing>)
      f(thing.name, thing.object);
    else
      f(plain_name(index, Leaf<Thing>), thing);
    ++index;
  };
  (one(things), ...);
}

template <class... Things>
Checkpoint Checkpoint::of(Things&&... things) {
  Checkpoint checkpoint;
  for_each_thing([&](const std::string& name, auto& thing) { checkpoint.add(name, thing); }, things...);
  return checkpoint;
}

class Checkpoint::Restoring {
 public:
  explicit Restoring(const Checkpoint& from) : from_(&from) {}
  template <class T>
  void compare(const std::string& name, const T& thing) {
    for_each_field(
        thing, [&](const std::string& field, const auto& leaf) { compare_leaf(field, leaf); }, name);
  }
  /// Throws, as restore() does, unless every name of the checkpoint was asked for once and fits.
  void finish() {
    for (const auto& [name, value] : from_->values_)
      if (!claimed_.contains(name)) mismatches_.push_back({name, leaf::describe(value), kUnexpected});
    if (!mismatches_.empty()) from_->refuse(std::move(mismatches_));
  }
  template <class T>
  void assign(const std::string& name, T& thing) const {
    for_each_field(
        thing,
        [&](const std::string& field, auto& leaf) {
          if (const Value* const stored = from_->find(field)) decode(*stored, leaf, true);
        },
        name);
  }

 private:
  template <class T>
  void compare_leaf(const std::string& name, const T& leaf) {
    const Value* const stored = from_->find(name);
    if constexpr (std::is_same_v<T, Tensor>)
      if (!stored && !leaf.defined()) return;  // as saved
    if (++claimed_[name] > 1)
      mismatches_.push_back(
          {name, stored ? leaf::describe(*stored) : "missing", "once; it is asked for twice"});
    else if (!stored || !decode(*stored, const_cast<T&>(leaf), false))
      mismatches_.push_back({name, stored ? leaf::describe(*stored) : "missing", wanted(leaf)});
    else if constexpr (std::is_same_v<T, Tensor>)
      compare_tied(name, leaf, *stored);
  }
  /// A tensor under two names takes one value: those of the file must be equal.
  void compare_tied(const std::string& name, const Tensor& tensor, const Value& stored);

  const Checkpoint* from_;
  std::vector<Mismatch> mismatches_;
  std::map<std::string, int> claimed_;
  struct NamedMemory {
    std::weak_ptr<Storage> storage;
    DType dtype;
    Layout layout;
    std::string name;
  };
  std::multimap<const void*, NamedMemory> tensors_;  // by address, under their first names
};

template <class... Things>
void Checkpoint::restore(Things&&... things) const {
  Restoring restoring(*this);
  for_each_thing([&](const std::string& name, auto& thing) { restoring.compare(name, thing); }, things...);
  restoring.finish();
  for_each_thing([&](const std::string& name, auto& thing) { restoring.assign(name, thing); }, things...);
}

template <Leaf T>
T Checkpoint::get(const std::string& name) const {
  const Value* const stored = find(name);
  if constexpr (std::is_same_v<T, Tensor>) {
    if (const Tensor* const tensor = stored ? std::get_if<Tensor>(stored) : nullptr) return *tensor;
  } else if constexpr (std::is_same_v<T, Rng>) {
    Rng rng(0);
    if (stored && decode(*stored, rng, true)) return rng;
  } else {
    T value{};
    if (stored && decode(*stored, value, true)) return value;
  }
  std::string type = "tensor";
  if constexpr (!std::is_same_v<T, Tensor> && !fields_detail::kIsNumbers<T>) type = leaf::scalar_type<T>();
  refuse({{name, stored ? leaf::describe(*stored) : "missing", type}});
}

}  // namespace tessera::io
