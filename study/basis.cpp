#include "study/basis.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "train/mlm_run.h"

namespace tessera::study {

using nlohmann::json;

namespace {

/// Longer values are fingerprints, which tell a reader nothing.
constexpr size_t kShown = 12;

}  // namespace

Basis basis_of(const json& run, const std::string& metric) {
  Basis basis;
  const json model = run.value("model", json());
  const bool masked = train::is_mlm_run(run), tnp = model == "tnp";
  if (model != "gpt" && model != "llama" && !masked && !tnp) return basis;
  const auto add = [&](const std::string& name, const json& value) {
    if (!value.is_null()) basis[name] = value.is_string() ? value.get<std::string>() : value.dump();
  };
  const json job = run.value("job", json::object()), evaluation = run.value("evaluation", json::object());
  if (tnp) {
    if (metric != "loss" && !metric.starts_with("eval_")) return basis;  // of steps, such as their time
    if (job.is_object())
      for (const auto& [name, key] : {std::pair("prior", "prior"),
                                      {"features", "model.features"},
                                      {"context points", "context"},
                                      {"target points", "targets"}})
        add(name, job.value(key, json()));
    if (metric != "loss" && evaluation.is_object()) add("evaluated tasks", evaluation.value("tasks", json()));
    return basis;
  }
  const bool per_byte = metric.ends_with("_per_byte");
  if (job.is_object() && !per_byte) add("tokenizer", job.value("fingerprint", json()));
  if (metric == "loss") {
    if (job.is_object()) add("length", job.value(masked ? "max_length" : "length", json()));
    return basis;
  }
  if (!evaluation.is_object()) return basis;
  for (const auto& [name, value] : evaluation.items())
    if (!(per_byte && name == "targets")) add(name == "text" ? "held-out text" : name, value);
  // Without the text of an older run its tokens must do.
  if (per_byte && !evaluation.contains("text")) {
    if (job.is_object()) add("tokenizer", job.value("fingerprint", json()));
    add("targets", evaluation.value("targets", json()));
  }
  return basis;
}

std::string difference_of(const Basis& a, const Basis& b) {
  std::set<std::string> names;
  for (const Basis* const basis : {&a, &b})
    for (const auto& [name, value] : *basis) names.insert(name);
  std::string text;
  const auto value_in = [](const Basis& basis, const std::string& name) {
    const auto found = basis.find(name);
    return found == basis.end() ? std::string("unknown") : found->second;
  };
  for (const std::string& name : names) {
    const std::string first = value_in(a, name), second = value_in(b, name);
    if (first == second) continue;
    text += (text.empty() ? "" : ", ") + name;
    if (first.size() <= kShown && second.size() <= kShown) text += fmt::format(" ({}, {})", first, second);
  }
  return text;
}

}  // namespace tessera::study
