#include "sparsity/prune_report.h"

#include <fmt/format.h>

#include <map>
#include <nlohmann/json.hpp>

namespace tessera::sparsity {

nlohmann::ordered_json matrices_to_json(const std::vector<PrunedMatrix>& matrices) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const PrunedMatrix& matrix : matrices) {
    list.push_back({{"name", matrix.name},
                    {"rows", matrix.rows},
                    {"columns", matrix.columns},
                    {"zeros", matrix.zeros},
                    {"sparsity", matrix.sparsity()},
                    {"asked", matrix.asked},
                    {"dead_inputs", matrix.dead},
                    {"damping", matrix.damping},
                    {"damping_raised", matrix.raised},
                    {"relative_output_error",
                     matrix.error ? nlohmann::ordered_json(*matrix.error) : nlohmann::ordered_json()}});
    if (matrix.gate_error) list.back()["gate_error"] = *matrix.gate_error;
    if (matrix.corrected_error) list.back()["corrected_error"] = *matrix.corrected_error;
  }
  return list;
}

std::vector<PrunedMatrix> matrices_from_json(const nlohmann::ordered_json& json, const std::string& path) {
  std::vector<PrunedMatrix> matrices;
  try {
    for (const nlohmann::ordered_json& one : json) {
      PrunedMatrix& matrix = matrices.emplace_back();
      matrix.name = one.at("name").get<std::string>();
      matrix.rows = one.at("rows").get<int64_t>(), matrix.columns = one.at("columns").get<int64_t>();
      matrix.zeros = one.at("zeros").get<int64_t>(), matrix.asked = one.at("asked").get<double>();
      matrix.dead = one.at("dead_inputs").get<int64_t>(), matrix.damping = one.at("damping").get<double>();
      matrix.raised = one.at("damping_raised").get<int64_t>();
      if (!one.at("relative_output_error").is_null())
        matrix.error = one.at("relative_output_error").get<double>();
      if (one.contains("gate_error")) matrix.gate_error = one.at("gate_error").get<double>();
      if (one.contains("corrected_error")) matrix.corrected_error = one.at("corrected_error").get<double>();
    }
  } catch (const nlohmann::json::exception&) {
    fail_at(Site::here(), "prune: ", path, " does not describe the matrices of a block; it is damaged");
  }
  return matrices;
}

namespace {

/// "model.layers.3.self_attn.k_proj" as "model.layers.3" and "k_proj".
std::pair<std::string, std::string> block_and_part(const std::string& name) {
  for (size_t at = 0; (at = name.find('.', at)) != std::string::npos; ++at) {
    const size_t end = name.find_first_not_of("0123456789", at + 1);
    if (end != std::string::npos && end > at + 1 && name[end] == '.')
      return {name.substr(0, end), name.substr(name.rfind('.') + 1)};
  }
  return {"", name};
}

/// GPT-2 calls two projections of a block c_proj.
std::string column_of(const std::string& name, const std::string& part) {
  return part == "c_proj" ? name.substr(name.rfind('.', name.size() - part.size() - 2) + 1) : part;
}

}  // namespace

std::string sparsity_table(const std::vector<PrunedMatrix>& matrices) {
  std::vector<std::string> blocks, columns;
  std::map<std::pair<std::string, std::string>, const PrunedMatrix*> cells;
  const auto remember = [](std::vector<std::string>& list, const std::string& name) {
    if (std::find(list.begin(), list.end(), name) == list.end()) list.push_back(name);
  };
  size_t width = 0;
  for (const PrunedMatrix& matrix : matrices) {
    const auto [block, part] = block_and_part(matrix.name);
    const std::string column = column_of(matrix.name, part);
    remember(blocks, block), remember(columns, column);
    width = std::max(width, block.size());
    cells[{block, column}] = &matrix;
  }
  std::string text = fmt::format("{:<{}}", "sparsity", width);
  for (const std::string& column : columns)
    text += fmt::format("  {:>{}}", column, std::max<size_t>(6, column.size()));
  text += "     all\n";
  for (const std::string& block : blocks) {
    text += fmt::format("{:<{}}", block, width);
    Pruned whole;
    for (const std::string& column : columns) {
      const size_t size = std::max<size_t>(6, column.size());
      const auto found = cells.find({block, column});
      text += found == cells.end() ? fmt::format("  {:>{}}", "-", size)
                                   : fmt::format("  {:>{}.4f}", found->second->sparsity(), size);
      if (found != cells.end()) whole.matrices.push_back(*found->second);
    }
    text += fmt::format("  {:.4f}\n", whole.sparsity());
  }
  return text;
}

}  // namespace tessera::sparsity
