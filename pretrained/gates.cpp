#include <cmath>
#include <nlohmann/json.hpp>

#include "io/file.h"
#include "io/json.h"
#include "nn/observe.h"
#include "nn/prefill_scope.h"
#include "pretrained/sparse_model.h"

namespace tessera::pretrained {

namespace {

using nlohmann::json;

ops::Gate gate_of(const json& value, const std::string& where) {
  if (value.is_number()) {
    const double threshold = value.get<double>();
    check(std::isfinite(threshold) && threshold >= 0, where, " is ", threshold,
          "; expected a threshold of 0 or more");
    return {.kind = ops::Gate::Kind::threshold, .threshold = threshold};
  }
  const bool is_top_k = value.is_object() && value.size() == 1 && value.contains("top_k") &&
                        value["top_k"].is_number_integer() && value["top_k"] >= 0 &&
                        value["top_k"] <= int64_t{1} << 31;
  check(is_top_k, where, " is neither a threshold nor {\"top_k\": a whole number}");
  return {.kind = ops::Gate::Kind::top_k, .keep = value["top_k"].get<int64_t>()};
}

}  // namespace

Gates read_gates(const std::string& path) {
  constexpr uint64_t kMost = uint64_t{1} << 20;
  // A layer that is named twice would have one gate of two.
  const json file = io::parse_object("gates: " + path, io::read_file(path, kMost));
  check(file.value("format", json()) == "tessera-gates" && file.contains("layers") &&
            file["layers"].is_object(),
        "gates: ", path, ": expected an object with \"format\": \"tessera-gates\" and \"layers\"");
  for (const auto& [key, value] : file.items())
    check(key == "format" || key == "layers" || key == "scale" || key == "fingerprint", "gates: ", path,
          ": unknown field '", io::shown(key), "'; expected format, fingerprint, scale or layers");
  const json scale = file.value("scale", json("one")), fingerprint = file.value("fingerprint", json(""));
  check(scale == "one" || scale == "column-norm", "gates: ", path,
        ": \"scale\" is neither \"one\" nor \"column-norm\"");
  check(fingerprint.is_string(), "gates: ", path, ": \"fingerprint\" is no text");
  Gates gates{.column_norms = scale == "column-norm", .fingerprint = fingerprint.get<std::string>()};
  for (const auto& [name, value] : file["layers"].items())
    gates.gates.emplace(name, gate_of(value, "gates: " + path + ": the gate of '" + io::shown(name) + "'"));
  return gates;
}

// ---- counting ----

namespace {

/// Adds what gate and inputs of one call, [T, in] of one text, say.
void count_call(GateCounts& counts, const Tensor& x, const ops::Gate& gate) {
  const auto inputs = ops::counting_inputs(x, gate);
  std::vector<bool> before;
  for (const std::vector<int32_t>& token : inputs) {
    counts.inputs += x.size(1), counts.counted += int64_t(token.size());
    std::vector<bool> now(size_t(x.size(1)), false);
    for (const int32_t j : token) now[size_t(j)] = true;
    if (!before.empty()) {
      counts.followed += int64_t(token.size());
      for (const int32_t j : token) counts.repeated += before[size_t(j)];
    }
    before = std::move(now);
  }
}

/// A layer's module with a gate.
struct Gated {
  std::string name;
  ops::Gate gate;  // on the CPU
  double prefill;
};

/// By our names of the layers.
std::map<std::string, std::vector<Gated>> gated_modules(models::LanguageRef model) {
  std::map<std::string, std::vector<Gated>> layers;
  std::map<const nn::Linear*, size_t> next;
  for (const LinearModule& module : linear_modules(model).all)
    if (const auto* const form = std::get_if<nn::Compressed>(&module.layer->form)) {
      ops::Gate gate = form->parts.at(next[module.layer]++).gate;
      if (gate.scales.defined()) gate.scales = gate.scales.to(Device::cpu());
      layers[module.ours].push_back({module.name, gate, form->prefill});
    }
  return layers;
}

}  // namespace

std::map<std::string, GateCounts> count_gates(models::LanguageRef model,
                                              const std::vector<std::vector<int64_t>>& texts) {
  const std::map<std::string, std::vector<Gated>> layers = gated_modules(model);
  std::map<std::string, GateCounts> counts;
  const auto count = [&](const nn::LinearCall& call) {
    const auto found = layers.find(call.name);
    if (found == layers.end()) return;
    const Tensor x = call.input.to(Device::cpu()), rows = x.reshaped({x.count() / x.size(-1), x.size(-1)});
    for (const Gated& gated : found->second) {
      const auto some = nn::PrefillScope::gated_rows(rows.size(0), gated.prefill);
      for (const auto& [begin, end] : some.value_or(nn::PrefillScope::Ranges{{0, rows.size(0)}}))
        count_call(counts[gated.name], rows.slice(0, begin, end), gated.gate);
    }
  };
  const NoTape no_tape;
  model.visit([&](const auto& held) {
    const nn::Observe scope(held, {.forward = count});
    for (const std::vector<int64_t>& text : texts)
      if (!text.empty()) held(Tensor::from(text, {1, int64_t(text.size())}, model.device()));
  });
  return counts;
}

}  // namespace tessera::pretrained
