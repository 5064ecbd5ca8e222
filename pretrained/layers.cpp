#include "pretrained/layers.h"

#include <map>
#include <set>
#include <sstream>

#include "pretrained/names.h"

namespace tessera::pretrained {
namespace {

constexpr std::string_view kWeight = ".weight";

std::string without_weight(const std::string& name) {
  return name.substr(0, name.size() - kWeight.size());
}

template <class Model>
LinearModules modules_of(Model& model) {
  const NameTable table = name_table(model.config);
  std::map<std::string, const NameRule*> rules;
  for (const NameRule& rule : table.rules) rules.emplace(rule.ours, &rule);
  LinearModules modules{.prefix = table.prefix};
  nn::for_each<nn::Linear>(model, [&](const std::string& ours, nn::Linear& layer) {
    if (!layer.weight.defined() && nn::is_dense(layer.form)) {
      check(table.tied.size() == 1, "linear_modules: the table of names has no name of the tied layer '",
            ours, "'");
      modules.all.push_back({without_weight(table.tied[0]), ours, &layer, 0, layer.out});
      return;
    }
    const auto rule = rules.find(ours + std::string(kWeight));
    check(rule != rules.end(), "linear_modules: the table of names has no '", ours, kWeight, "'");
    for_each_part(*rule->second, [&](const NameRule::Part& part, int64_t row, int64_t rows) {
      modules.all.push_back({without_weight(part.theirs), ours, &layer, row, rows, rule->second->transposed});
    });
  });
  return modules;
}

/// Whether a component fits a pattern in which "*" stands for any characters.
bool component_fits(std::string_view pattern, std::string_view text) {
  if (pattern.empty()) return text.empty();
  if (pattern[0] != '*')
    return !text.empty() && text[0] == pattern[0] && component_fits(pattern.substr(1), text.substr(1));
  for (size_t skipped = 0; skipped <= text.size(); ++skipped)
    if (component_fits(pattern.substr(1), text.substr(skipped))) return true;
  return false;
}

/// The first component of a name, and what follows its dot.
std::pair<std::string_view, std::string_view> first_component(std::string_view name) {
  const size_t dot = name.find('.');
  return {name.substr(0, dot), dot == name.npos ? std::string_view() : name.substr(dot + 1)};
}

bool fits(std::string_view pattern, std::string_view name) {
  if (pattern.empty() || name.empty()) return pattern.empty() && name.empty();
  const auto [wanted, more] = first_component(pattern);
  const auto [text, rest] = first_component(name);
  if (wanted == "**") return (more.empty() ? true : fits(more, name)) || fits(pattern, rest);
  return component_fits(wanted, text) && fits(more, rest);
}

}  // namespace

const LinearModule& LinearModules::at(const std::string& name) const {
  for (const LinearModule& module : all)
    if (module.name == name || module.name == prefix + name) return module;
  fail_at(Site::here(), "linear_modules: this model has no linear module '", name, "'; its first is '",
          all.front().name, "', its last '", all.back().name, "'");
}

std::vector<LinearModule> LinearModules::matching(const std::string& pattern) const {
  std::vector<LinearModule> found;
  for (const LinearModule& module : all)
    if (fits(pattern, module.name) || fits(prefix + pattern, module.name)) found.push_back(module);
  check(!found.empty(), "linear_modules: no linear module of this model fits '", pattern,
        "'; the names are like '", all.front().name, "' and '", all.back().name, "'");
  return found;
}

std::vector<LayerParts> layer_parts(const LinearModules& modules) {
  std::vector<LayerParts> layers;
  for (const LinearModule& module : modules.all) {
    if (layers.empty() || layers.back().layer != module.layer)
      layers.push_back({module.ours, module.layer, {}});
    layers.back().rows.push_back(module.rows);
  }
  return layers;
}

std::vector<std::string> set_form(const LinearModules& modules, const std::string& patterns,
                                  const nn::Form& form) {
  std::set<std::string> named;
  std::istringstream list(patterns);
  for (std::string pattern; std::getline(list, pattern, ',');)
    for (const LinearModule& module : modules.matching(pattern == "all" ? "**" : pattern))
      named.insert(module.name);
  check(!named.empty(), "set_form: the list of patterns is empty; give names such as '",
        modules.all.front().name, "', or all");
  std::vector<std::string> layers;
  std::set<nn::Linear*> chosen;
  for (const LinearModule& module : modules.all) {
    if (!named.contains(module.name) || !chosen.insert(module.layer).second) continue;
    for (const LinearModule& other : modules.all)
      check(other.layer != module.layer || named.contains(other.name), "set_form: '", module.name,
            "' is one GEMM with '", other.name, "' (", module.ours, "), which '", patterns,
            "' leaves out; name both or neither");
    layers.push_back(module.ours);
  }
  for (nn::Linear* const layer : chosen) layer->form = form;
  return layers;
}

LinearModules linear_modules(models::LanguageRef model) {
  return model.visit([](auto& held) { return modules_of(held); });
}
LinearModules linear_modules(models::Bert& model) {
  return modules_of(model);
}

}  // namespace tessera::pretrained
