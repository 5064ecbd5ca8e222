#include "ops/op.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <utility>

#include "runtime/gaussian.h"
#include "runtime/philox.h"
#include "runtime/text.h"

namespace tessera::ops {
namespace {

const char* type_name(const AttrValue& value) {
  constexpr const char* kNames[] = {"a flag (true or false)", "an integer", "a number", "a word"};
  return kNames[value.index()];
}

double normal(uint64_t seed, uint64_t input, int64_t index) {
  const Uint4 random = philox(seed, input, uint64_t(index));
  return gaussian_of(random.word[0], random.word[1]);
}

/// Whether an element, or a bit, is not 0.
bool kept(const InputCase& input, uint64_t seed, uint64_t number, uint64_t index) {
  const Uint4 random = philox(seed ^ 0xD1B54A32D192ED03u, number, index);
  return double(uniform_half_open(random.word[0])) < input.density;
}

/// Word `index` of packed rows of input.high columns.
int32_t random_bits(const InputCase& input, uint64_t seed, uint64_t number, int64_t index) {
  const int64_t first = index % input.shape[-1] * 32;
  uint32_t word = 0;
  for (int64_t bit = 0; bit < std::min<int64_t>(32, input.high - first); ++bit)
    word |= uint32_t(kept(input, seed, number, uint64_t(index * 32 + bit))) << bit;
  return int32_t(word);
}

double element(const InputCase& input, uint64_t seed, uint64_t number, int64_t index) {
  if (!input.values.empty()) return double(input.values[size_t(index)]);
  if (input.fill == Fill::bits) return double(random_bits(input, seed, number, index));
  if (input.density < 1 && !kept(input, seed, number, uint64_t(index))) return 0;
  const double z = normal(seed, number, index);
  switch (input.fill) {
    case Fill::positive:
      return input.scale * std::exp(z / 2);
    case Fill::away_from_0:
      return input.scale * (z + (z < 0 ? -0.1 : 0.1));
    case Fill::index: {
      const Uint4 random = philox(seed ^ 0x9E3779B97F4A7C15u, number, uint64_t(index));
      if (input.ignore != -1 && random.word[1] % 8 == 0) return double(input.ignore);
      return input.high > 0 ? double(random.word[0] % uint64_t(input.high)) : 0;
    }
    default:
      return input.scale * z;
  }
}

/// An uninitialised tensor of the shape that lies as `placement` says.
Tensor place(const Shape& shape, Placement placement, DType dtype) {
  const Device cpu = Device::cpu();
  if (shape.rank() >= 2 && placement == Placement::transposed) {
    Shape swapped = shape.with(-1, shape[-2]).with(-2, shape[-1]);
    return Tensor::empty(swapped, dtype, cpu).transpose(-1, -2);
  }
  if (shape.rank() >= 1 && placement == Placement::strided) {
    // Twice as many rows, three more columns; every second row from the second on, columns from the second
    // on.
    Shape wide = shape.with(-1, shape[-1] + 3);
    if (shape.rank() >= 2) wide = wide.with(-2, 2 * shape[-2] + 1);
    Tensor view = Tensor::zeros(wide, dtype, cpu).slice(-1, 1, shape[-1] + 1);
    return shape.rank() >= 2 ? view.slice(-2, 1, 2 * shape[-2] + 1, 2) : view;
  }
  return Tensor::empty(shape, dtype, cpu);
}

/// The same view of the same bytes on another device: layout and gaps survive, which Tensor::to would pack
/// away.
Tensor move_placed(const Tensor& tensor, Device device) {
  if (device.is_cpu()) return tensor;
  const int64_t elements = int64_t(tensor.storage()->bytes / size_of(tensor.dtype()));
  const Tensor flat = Tensor::view_of(tensor.storage(), Layout::packed({elements}), tensor.dtype());
  return Tensor::view_of(flat.to(device).storage(), tensor.layout(), tensor.dtype());
}

}  // namespace

template <class T>
const T& Attrs::get(const std::string& name) const {
  const auto found = values_.find(name);
  const std::string of = op_.empty() ? "" : op_ + ": ";
  check(found != values_.end(), of, "attribute \"", name, "\" is missing");
  const T* const value = std::get_if<T>(&found->second);
  check(value != nullptr, of, "attribute \"", name, "\" is ", type_name(found->second), ", not ",
        type_name(AttrValue(T{})));
  return *value;
}
int Attrs::dimension(const std::string& name) const {
  const int64_t value = integer(name);
  check(std::in_range<int>(value), op_, op_.empty() ? "" : ": ", "attribute \"", name, "\" is ", value,
        "; no tensor has such a dimension");
  return int(value);
}
std::vector<int64_t> Attrs::integers(const std::string& name) const {
  const std::string& text = word(name);
  std::vector<int64_t> values;
  for (std::string_view rest = text; !rest.empty();) {
    const size_t comma = std::min(rest.find(','), rest.size());
    int64_t value = 0;
    const auto [end, code] = std::from_chars(rest.data(), rest.data() + comma, value);
    check(code == std::errc{} && end == rest.data() + comma &&
              (comma == rest.size() || comma + 1 < rest.size()),
          op_, op_.empty() ? "" : ": ", "attribute \"", name, "\" is \"", text,
          "\"; expected integers with commas between and no spaces, for example 2,3,-1");
    values.push_back(value);
    rest.remove_prefix(std::min(comma + 1, rest.size()));
  }
  return values;
}
template const bool& Attrs::get<bool>(const std::string&) const;
template const int64_t& Attrs::get<int64_t>(const std::string&) const;
template const double& Attrs::get<double>(const std::string&) const;
template const std::string& Attrs::get<std::string>(const std::string&) const;

bool is_set(const Dims& dims, const std::string& name) {
  const auto found = dims.find(name);
  return found != dims.end() && found->second != 0;
}

std::vector<DType> index_dtypes() {
  return {DType::i64, DType::i32};
}
std::vector<DType> sum_dtypes() {
  return {DType::f32, DType::f64};
}

const OpSpec& find_op(std::string_view name) {
  std::vector<std::string> names;
  for (const OpSpec& op : all_ops()) {
    if (op.name == name) return op;
    names.push_back(op.name);
  }
  const std::string near = did_you_mean(name, names);
  fail_at(Site::here(), "operator \"", name, "\" does not exist",
          near.empty() ? "; see `tessera op --list`" : near);
}

namespace {

const AttrSpec& find_attr(const OpSpec& op, const std::string& name) {
  std::vector<std::string> names;
  for (const AttrSpec& attr : op.attrs) {
    if (attr.name == name) return attr;
    names.push_back(attr.name);
  }
  fail_at(Site::here(), op.name, ": attribute \"", name, "\" does not exist", did_you_mean(name, names));
}

}  // namespace

Attrs complete(const OpSpec& op, const Attrs& given) {
  Attrs all;
  all.set_op(op.name);
  for (const AttrSpec& attr : op.attrs) all.set(attr.name, attr.fallback);
  for (const auto& [name, value] : given.values()) {
    const AttrSpec& attr = find_attr(op, name);
    AttrValue accepted = value;
    if (std::holds_alternative<double>(attr.fallback) && std::holds_alternative<int64_t>(value))
      accepted = double(std::get<int64_t>(value));
    check(accepted.index() == attr.fallback.index(), op.name, ": attribute \"", name, "\" is ",
          type_name(attr.fallback), ", not ", type_name(value));
    if (const auto* word = std::get_if<std::string>(&accepted); word && !attr.choices.empty()) {
      const bool known = std::ranges::find(attr.choices, *word) != attr.choices.end();
      check(known, op.name, ": attribute \"", name, "\" is \"", *word, "\"; expected one of ",
            joined(attr.choices));
    }
    all.set(name, accepted);
  }
  return all;
}

void check_used(const OpSpec& op, const Attrs& given) {
  const Attrs all = complete(op, given);
  for (const AttrSpec& attr : op.attrs) {
    const auto& [other, value] = attr.only_with;
    check(!given.has(attr.name) || other.empty() || all.word(other) == value, op.name, ": attribute \"",
          attr.name, "\" has an effect with ", other, "=", value, " alone, and ", other, " is ",
          other.empty() ? "" : all.word(other), "; leave it out");
  }
}

void check_listed(const char* op, double values) {
  check(values <= double(1 << 28), op, ": these sizes need a list of ", values,
        " values; expected at most 2^28");  // 2 GiB
}

void set_attr(const OpSpec& op, Attrs& attrs, std::string_view key_value) {
  const size_t equals = key_value.find('=');
  check(equals != std::string_view::npos, op.name, ": attribute \"", key_value, "\": expected key=value");
  const std::string key(key_value.substr(0, equals)), text(key_value.substr(equals + 1));
  const AttrSpec& attr = find_attr(op, key);
  const auto number = [&]<class T>(T) {
    T value{};
    const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), value);
    check(code != std::errc::result_out_of_range, op.name, ": attribute \"", key, "\" is ", text, ", which ",
          type_name(attr.fallback), " of 64 bits cannot hold");
    check(code == std::errc{} && end == text.data() + text.size(), op.name, ": attribute \"", key, "\" is ",
          type_name(attr.fallback), ", not \"", text, "\"");
    return value;
  };
  if (std::holds_alternative<bool>(attr.fallback)) {
    check(text == "true" || text == "false", op.name, ": attribute \"", key,
          "\" is a flag (true or false), not \"", text, "\"");
    attrs.set(key, text == "true");
  } else if (std::holds_alternative<int64_t>(attr.fallback)) {
    attrs.set(key, number(int64_t{}));
  } else if (std::holds_alternative<double>(attr.fallback)) {
    const double value = number(double{});
    check(std::isfinite(value), op.name, ": attribute \"", key, "\" must be finite, not ", text);
    attrs.set(key, value);
  } else {
    attrs.set(key, text);
  }
  complete(op, attrs);
}

namespace {

/// Checks that inputs made from others are given together, or can be made. Whether they are to be made.
bool lacks_derived(const OpSpec& op, const std::vector<Tensor>& inputs) {
  const InputSpec *given = nullptr, *missing = nullptr;
  for (size_t i = 0; i < inputs.size(); ++i)
    if (op.inputs[i].is_derived()) (inputs[i].defined() ? given : missing) = &op.inputs[i];
  if (!missing) return false;
  check(!given, op.name, ": input \"", missing->name, "\" is missing, but \"", given ? given->name : "",
        "\" is given; expected all inputs that are made from others, or none");
  for (const InputSpec& derived : op.inputs)
    for (const std::string& source : derived.from) {
      const auto found = std::ranges::find(op.inputs, source, &InputSpec::name);
      check(inputs[size_t(found - op.inputs.begin())].defined(), op.name, ": input \"", derived.name, "\" ",
            derived.shape, " is missing, and so is \"", source, "\", from which it could be made");
    }
  return true;
}

std::string listed(const std::vector<DType>& dtypes) {
  std::string text;
  for (const DType dtype : dtypes) text += std::string(text.empty() ? "" : " or ") + name_of(dtype);
  return text;
}

bool among(const std::vector<DType>& dtypes, DType dtype) {
  return std::ranges::find(dtypes, dtype) != dtypes.end();
}

/// The first input in the operator's floating dtype, or none.
const Tensor* first_floating(const OpSpec& op, const std::vector<Tensor>& inputs) {
  for (size_t i = 0; i < inputs.size(); ++i)
    if (inputs[i].defined() && op.inputs[i].dtypes.empty()) return &inputs[i];
  return nullptr;
}

}  // namespace

bool takes_floating(const OpSpec& op) {
  return std::ranges::any_of(op.inputs, [](const InputSpec& input) { return input.dtypes.empty(); });
}

void check_inputs(const OpSpec& op, const std::vector<Tensor>& inputs) {
  check(inputs.size() == op.inputs.size(), op.name, ": ", inputs.size(), " inputs; expected ",
        op.inputs.size());
  lacks_derived(op, inputs);
  const Tensor* const first = first_floating(op, inputs);
  const Tensor* device_of = nullptr;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const InputSpec& spec = op.inputs[i];
    if (!inputs[i].defined()) {
      check(spec.optional || spec.is_derived(), op.name, ": input \"", spec.name, "\" ", spec.shape,
            " is missing");
      continue;
    }
    if (!spec.dtypes.empty()) {
      check(among(spec.dtypes, inputs[i].dtype()), op.name, ": input \"", spec.name, "\" is ",
            inputs[i].dtype(), "; expected ", listed(spec.dtypes));
    } else {
      check(inputs[i].dtype() == first->dtype(), op.name, ": input \"", spec.name, "\" is ",
            inputs[i].dtype(), ", but \"", op.inputs[size_t(first - inputs.data())].name, "\" is ",
            first->dtype(), "; floating inputs share one dtype");
    }
    if (!device_of) device_of = &inputs[i];
    check(inputs[i].device() == device_of->device(), op.name, ": input \"", spec.name, "\" is on ",
          inputs[i].device().name(), ", another on ", device_of->device().name());
  }
  if (!first) return;
  const auto& dtypes = first->device().is_cpu() ? op.cpu_dtypes : op.cuda_dtypes;
  std::string list;
  for (const DType dtype : dtypes) {
    if (dtype == first->dtype()) return;
    list += std::string(list.empty() ? "" : ", ") + name_of(dtype);
  }
  fail_at(Site::here(), op.name, ": dtype ", first->dtype(), " is not supported on device ",
          first->device().name(), "; expected ", list);
}

void derive_inputs(const OpSpec& op, std::vector<Tensor>& inputs, const Attrs& attrs) {
  const bool are_made = lacks_derived(op, inputs);
  if (!are_made && !op.check_given) return;
  std::vector<Tensor> sources;
  Device device = Device::cpu();
  for (const Tensor& input : inputs) {
    if (input.defined()) device = input.device();
    sources.push_back(input.defined() ? input.detach().to(Device::cpu()) : Tensor());
  }
  if (!are_made) return op.check_given(sources, attrs);
  const std::vector<Tensor> made = op.derive(sources, attrs);
  check(std::ptrdiff_t(made.size()) == std::ranges::count_if(op.inputs, &InputSpec::is_derived), op.name,
        ": OpSpec::derive made ", made.size(), " inputs; expected one for each that names others");
  size_t next = 0;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const InputSpec& spec = op.inputs[i];
    if (!spec.is_derived()) continue;
    const Tensor& x = made[next++];
    check(x.defined() && (spec.dtypes.empty() ? is_floating(x.dtype()) : among(spec.dtypes, x.dtype())),
          op.name, ": OpSpec::derive made \"", spec.name, "\" as ", describe(x), "; expected ",
          spec.dtypes.empty() ? "the dtype of the floating inputs" : listed(spec.dtypes));
    inputs[i] = move_placed(x, device);
  }
}

void check_outputs(const OpSpec& op, const std::vector<Tensor>& inputs, const std::vector<Tensor>& outputs) {
  check(outputs.size() == op.outputs.size(), op.name, ": ", outputs.size(), " outputs; expected ",
        op.outputs.size());
  const Tensor* const floating = first_floating(op, inputs);
  for (size_t n = 0; n < outputs.size(); ++n) {
    const OutputSpec& spec = op.outputs[n];
    if (spec.dtypes.empty() && !floating) continue;
    const std::vector<DType> dtypes = spec.dtypes.empty() ? std::vector{floating->dtype()} : spec.dtypes;
    check(among(dtypes, outputs[n].dtype()), op.name, ": output \"", spec.name, "\" is ", outputs[n].dtype(),
          "; expected ", listed(dtypes));
  }
}

SeededRng::SeededRng(int64_t seed, int streams)
    : rng_(uint64_t(seed)),
      streams_([&] {
        std::vector<RandomStream> first;
        for (int i = 0; i < streams; ++i) first.push_back({.seed = uint64_t(seed), .delta = uint64_t(i)});
        return first;
      }()),
      replay_(RandomReplay::Mode::replay, streams_) {}

Tensor input_values(const InputCase& input, uint64_t seed, size_t number) {
  std::vector<double> values(size_t(input.shape.count()));
  for (size_t k = 0; k < values.size(); ++k) values[k] = element(input, seed, number, int64_t(k));
  return Tensor::from(values, input.shape);
}

std::vector<Tensor> make_inputs(const OpSpec& op, const Problem& problem, const Attrs& attrs,
                                Placement placement, DType dtype, Device device, uint64_t seed) {
  check(problem.inputs.size() == op.inputs.size(), op.name, ": the problem names ", problem.inputs.size(),
        " inputs of ", op.inputs.size());
  std::vector<Tensor> inputs(op.inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    const InputCase& input = problem.inputs[i];
    if (input.fill == Fill::absent || op.inputs[i].is_derived()) continue;
    const std::vector<DType>& own = op.inputs[i].dtypes;
    inputs[i] = place(input.shape, placement, own.empty() ? dtype : own.front());
    inputs[i].copy_from(input_values(input, seed, i));
  }
  derive_inputs(op, inputs, attrs);
  for (Tensor& input : inputs)
    if (input.defined()) input = move_placed(input, device);
  return inputs;
}

std::vector<Tensor> oracle_inputs(const OpSpec& op, const std::vector<Tensor>& inputs, Placement placement) {
  std::vector<Tensor> wide = inputs;
  for (size_t i = 0; i < wide.size(); ++i) {
    if (!wide[i].defined() || !op.inputs[i].dtypes.empty()) continue;
    wide[i] = op.inputs[i].is_derived() ? Tensor::empty(inputs[i].shape(), DType::f64, Device::cpu())
                                        : place(inputs[i].shape(), placement, DType::f64);
    wide[i].copy_from(inputs[i]);
  }
  return wide;
}

}  // namespace tessera::ops
