#include <fmt/format.h>

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "io/checksum.h"
#include "io/file.h"
#include "io/safetensors.h"
#include "io/utf8.h"
#include "report/table.h"
#include "sparsity/gate_calibration.h"

namespace tessera::sparsity {
namespace {

using nlohmann::ordered_json;
namespace fs = std::filesystem;

constexpr const char* kFormat = "tessera-calibration";
constexpr uint64_t kMostBytes = uint64_t{256} << 20;

std::string checksum_of(const ordered_json& json) {
  io::Xxh3 sum;
  sum.add(json.dump());
  return sum.digits();
}

ordered_json to_json(const Calibration& calibration) {
  ordered_json json{{"format", kFormat},
                    {"version", 1},
                    {"model", io::utf8_text(calibration.model)},
                    {"fingerprint", calibration.fingerprint},
                    {"rule", name_of(calibration.rule)},
                    {"scale", calibration.column_norms ? "column-norm" : "one"},
                    {"gate", calibration.top_k ? "top-k" : "threshold"},
                    {"prefill", calibration.prefill},
                    {"samples", calibration.samples},
                    {"length", calibration.length},
                    {"seed", calibration.seed},
                    {"shares", calibration.shares},
                    {"layers", ordered_json::array()},
                    {"greedy", ordered_json::array()},
                    {"inputs", ordered_json::array()}};
  for (const CalibratedLayer& layer : calibration.layers)
    json["layers"].push_back({{"name", layer.name},
                              {"block", layer.block},
                              {"rows", layer.rows},
                              {"columns", layer.columns},
                              {"thresholds", layer.thresholds}});
  for (const GreedyBlock& block : calibration.greedy) {
    ordered_json steps = ordered_json::array();
    for (const GreedyBlock::Step& step : block.steps)
      steps.push_back({{"sparsity", step.sparsity},
                       {"error", step.error},
                       {"baseline", step.baseline},
                       {"shares", step.shares}});
    json["greedy"].push_back({{"layers", block.layers}, {"steps", std::move(steps)}});
  }
  for (const InputBars& input : calibration.inputs)
    json["inputs"].push_back({{"name", input.name}, {"limit", input.limit}, {"shares", input.shares}});
  json["checksum"] = checksum_of(json);
  return json;
}

/// "model.layers.3.self_attn.q_proj" without the "model.layers.3." of its block.
std::string part_of(const std::string& name, int64_t block) {
  const std::string middle = "." + std::to_string(block) + ".";
  const size_t at = name.find(middle);
  return at == std::string::npos ? name : name.substr(at + middle.size());
}

/// The original's results.csv.
std::string results_csv(const GreedyBlock& block, int64_t number) {
  report::Table table{"results", {"Effective Sparsity", "Activation Error", "Baseline Error"}, {}};
  for (const std::string& layer : block.layers) table.columns.push_back(part_of(layer, number));
  for (const GreedyBlock::Step& step : block.steps) {
    auto& row = table.rows.emplace_back();
    row = {step.sparsity, step.error, step.baseline};
    row.insert(row.end(), step.shares.begin(), step.shares.end());
  }
  return report::csv_text(table);
}

std::string file_of(const std::string& path) {
  std::error_code ignored;
  return fs::is_directory(path, ignored) ? (fs::path(path) / kCalibrationFile).string() : path;
}

/// Takes what the JSON says; at() and get() throw for what is not there.
Calibration from_json(const ordered_json& json) {
  Calibration result{.model = json.at("model").get<std::string>(),
                     .fingerprint = json.at("fingerprint").get<std::string>(),
                     .rule = parse_threshold_rule(json.at("rule").get<std::string>()),
                     .column_norms = json.at("scale").get<std::string>() == "column-norm",
                     .top_k = json.at("gate").get<std::string>() == "top-k",
                     .prefill = json.at("prefill").get<double>(),
                     .samples = json.at("samples").get<int64_t>(),
                     .length = json.at("length").get<int64_t>(),
                     .seed = json.at("seed").get<uint64_t>(),
                     .shares = json.at("shares").get<std::vector<double>>(),
                     .layers = {},
                     .greedy = {},
                     .inputs = {}};
  for (const ordered_json& layer : json.at("layers"))
    result.layers.push_back({layer.at("name").get<std::string>(), layer.at("block").get<int64_t>(),
                             layer.at("rows").get<int64_t>(), layer.at("columns").get<int64_t>(),
                             layer.at("thresholds").get<std::vector<double>>()});
  for (const ordered_json& block : json.at("greedy")) {
    GreedyBlock& greedy = result.greedy.emplace_back();
    greedy.layers = block.at("layers").get<std::vector<std::string>>();
    for (const ordered_json& step : block.at("steps"))
      greedy.steps.push_back({step.at("sparsity").get<double>(), step.at("error").get<double>(),
                              step.at("baseline").get<double>(),
                              step.at("shares").get<std::vector<double>>()});
  }
  for (const ordered_json& input : json.at("inputs"))
    result.inputs.push_back({input.at("name").get<std::string>(), input.at("limit").get<double>(),
                             input.at("shares").get<std::vector<double>>()});
  return result;
}

/// What users of a calibration rely on.
bool is_consistent(const Calibration& calibration) {
  if (calibration.shares.size() < 2 || calibration.layers.empty()) return false;
  for (const CalibratedLayer& layer : calibration.layers) {
    const size_t expected = calibration.top_k ? 0 : calibration.shares.size();
    if (layer.thresholds.size() != expected || layer.rows < 0 || layer.columns < 0) return false;
    for (const double threshold : layer.thresholds)
      if (!std::isfinite(threshold) || threshold < 0) return false;
  }
  for (const GreedyBlock& block : calibration.greedy) {
    if (block.steps.empty()) return false;
    for (const GreedyBlock::Step& step : block.steps)
      if (step.shares.size() != block.layers.size()) return false;
  }
  return true;
}

void check_no_calibration(const std::string& folder) {
  std::error_code ignored;
  check(!fs::exists(file_of(folder), ignored), "calibrate: ", folder, " has a ", kCalibrationFile,
        " already; name another folder");
}

}  // namespace

void save_calibration(const Calibration& calibration, const std::string& folder) {
  io::AtomicFolder files(folder, io::AtomicFolder::Existing::merge, check_no_calibration);
  for (size_t block = 0; block < calibration.greedy.size(); ++block) {
    const std::string layer = fmt::format("{}/layer-{}", files.path(), block);
    io::make_folder(layer);
    io::write_file(layer + "/results.csv", results_csv(calibration.greedy[block], int64_t(block)));
  }
  io::write_file(files.path() + "/" + kCalibrationFile, to_json(calibration).dump(1) + "\n");
  files.publish();
}

bool is_calibration(const std::string& path) {
  std::error_code ignored;
  const std::string file = file_of(path);
  if (!fs::is_regular_file(file, ignored) || fs::file_size(file, ignored) > kMostBytes) return false;
  const std::string text = io::read_file(file, kMostBytes);
  return text.substr(0, 200).find(kFormat) != std::string::npos;
}

Calibration read_calibration(const std::string& path) {
  const std::string file = file_of(path);
  const std::string text = io::read_file(file, kMostBytes);
  try {
    ordered_json json = ordered_json::parse(text);
    check(json.is_object() && json.value("format", "") == kFormat, "gates: ", file,
          " is no calibration of tessera calibrate");
    check(json.value("version", 0) == 1, "gates: ", file, " is of version ", json.value("version", 0),
          "; this program reads version 1");
    const std::string expected = json.value("checksum", "");
    json.erase("checksum");
    check(expected == checksum_of(json), "gates: ", file,
          " does not agree with its checksum: it is damaged, or was edited; calibrate again");
    Calibration calibration = from_json(json);
    check(is_consistent(calibration), "gates: ", file, " is damaged: its thresholds do not fit its layers");
    return calibration;
  } catch (const nlohmann::json::exception&) {
    fail_at(Site::here(), "gates: ", file, " is damaged: no JSON of a calibration");
  }
}

}  // namespace tessera::sparsity
