#include "sparsity/quality.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "io/file.h"
#include "runtime/error.h"

namespace tessera::sparsity {
namespace {

using nlohmann::json;

constexpr uint64_t kLargestFile = uint64_t{1} << 26;

/// A field of an object in a file of results; throws if it is missing or of another type.
template <class T>
T field(const json& object, const char* name, const std::string& where) {
  const auto found = object.find(name);
  check(found != object.end(), "quality: ", where, " has no \"", name,
        "\"; expected a file of tools/sparsity_study");
  bool fits = false;
  if constexpr (std::is_same_v<T, std::string>) fits = found->is_string();
  if constexpr (std::is_same_v<T, double>) fits = found->is_number();
  if constexpr (std::is_same_v<T, int64_t>) fits = found->is_number_integer();
  if constexpr (std::is_same_v<T, bool>) fits = found->is_boolean();
  if constexpr (std::is_same_v<T, json::array_t>) fits = found->is_array();
  if constexpr (std::is_same_v<T, json::object_t>) fits = found->is_object();
  check(fits, "quality: ", where, ": \"", name, "\" is ", found->dump(), "; expected ",
        std::is_same_v<T, std::string>      ? "a text"
        : std::is_same_v<T, json::array_t>  ? "a list"
        : std::is_same_v<T, json::object_t> ? "an object"
        : std::is_same_v<T, bool>           ? "true or false"
        : std::is_same_v<T, int64_t>        ? "a whole number"
                                            : "a number");
  return found->get<T>();
}

std::vector<std::string> texts(const json& object, const char* name, const std::string& where) {
  std::vector<std::string> all;
  for (const json& one : field<json::array_t>(object, name, where)) {
    check(one.is_string(), "quality: ", where, ": \"", name, "\" holds ", one.dump(), "; expected texts");
    all.push_back(one.get<std::string>());
  }
  return all;
}

double share(const json& object, const char* name, const std::string& where) {
  const double value = field<double>(object, name, where);
  check(value >= 0 && value <= 1, "quality: ", where, ": \"", name, "\" is ", value, "; expected 0 to 1");
  return value;
}

QualityCell cell_of(const json& object, const std::string& model, const std::string& where) {
  check(object.is_object(), "quality: ", where, " is ", object.dump(), "; expected an object");
  QualityCell cell{.model = model,
                   .task = field<std::string>(object, "task", where),
                   .arm = field<std::string>(object, "arm", where),
                   .calibration_seed = field<int64_t>(object, "calibration_seed", where),
                   .weights = share(object, "weights", where),
                   .inputs = share(object, "inputs", where),
                   .counted = {},
                   .nats = field<double>(object, "nats", where),
                   .accuracy = {}};
  check(std::isfinite(cell.nats) && cell.nats >= 0, "quality: ", where, ": \"nats\" is ", cell.nats,
        "; expected 0 or more");
  for (auto [name, value] : {std::pair("counted", &cell.counted), std::pair("accuracy", &cell.accuracy)})
    if (object.contains(name) && !object[name].is_null()) *value = share(object, name, where);
  return cell;
}

QualityClaim claim_of(const json& object, const std::string& where) {
  check(object.is_object(), "quality: ", where, " is ", object.dump(), "; expected an object");
  QualityClaim claim{.text = field<std::string>(object, "text", where),
                     .task = field<std::string>(object, "task", where),
                     .lower = texts(object, "lower", where),
                     .than = texts(object, "than", where)};
  if (object.contains("alike")) claim.alike = field<bool>(object, "alike", where);
  check(!claim.lower.empty() && !claim.than.empty(), "quality: ", where,
        " compares nothing; \"lower\" and "
        "\"than\" name one arm or more");
  return claim;
}

/// Settings as texts; all but the seed make a study.
std::vector<std::pair<std::string, std::string>> settings_of(const json& object, const std::string& where) {
  std::vector<std::pair<std::string, std::string>> settings;
  for (const auto& [name, value] : field<json::object_t>(object, "settings", where))
    settings.emplace_back(name, value.is_string() ? value.get<std::string>() : value.dump());
  return settings;
}

Quality read_one(const std::string& path) {
  const json object = json::parse(io::read_file(path, kLargestFile), nullptr, false);
  check(object.is_object() && object.value("format", json()) == kQualityFormat, "quality: ", path,
        " is no file of results of tools/sparsity_study (", kQualityFormat, ")");
  Quality one{.title = field<std::string>(object, "title", path),
              .baseline = field<std::string>(object, "baseline", path),
              .models = {field<std::string>(object, "model", path)},
              .settings = settings_of(object, path),
              .cells = {},
              .claims = {},
              .missing = {}};
  const std::string& model = one.models.front();
  std::set<std::tuple<std::string, std::string, int64_t>> known;
  for (const json& cell : field<json::array_t>(object, "cells", path)) {
    const std::string where = path + ": cell " + std::to_string(one.cells.size() + 1);
    one.cells.push_back(cell_of(cell, model, where));
    const QualityCell& last = one.cells.back();
    check(known.emplace(last.task, last.arm, last.calibration_seed).second, "quality: ", where, ": ",
          last.arm, " in \"", last.task, "\" is given twice");
  }
  check(!one.cells.empty(), "quality: ", path, " has no cells: nothing was measured");
  for (const json& claim : field<json::array_t>(object, "claims", path))
    one.claims.push_back(claim_of(claim, path + ": claim " + std::to_string(one.claims.size() + 1)));
  for (const std::string& what : texts(object, "missing", path)) one.missing.emplace_back(model, what);
  return one;
}

bool same_claims(const std::vector<QualityClaim>& a, const std::vector<QualityClaim>& b) {
  return std::ranges::equal(a, b, [](const QualityClaim& x, const QualityClaim& y) {
    return std::tie(x.text, x.task, x.lower, x.than, x.alike) ==
           std::tie(y.text, y.task, y.lower, y.than, y.alike);
  });
}

/// The first setting in which two models of one study must agree and do not; "": none.
std::string other_setting(const Quality& a, const Quality& b) {
  if (a.title != b.title) return "title";
  if (a.baseline != b.baseline) return "baseline";
  if (!same_claims(a.claims, b.claims)) return "claims";
  const std::map<std::string, std::string> ours(a.settings.begin(), a.settings.end()),
      theirs(b.settings.begin(), b.settings.end());
  for (const auto* one : {&ours, &theirs})
    for (const auto& [name, value] : *one)
      if (name != "seed" && name != "program" &&
          (!ours.contains(name) || !theirs.contains(name) || ours.at(name) != theirs.at(name)))
        return name;
  return "";
}

/// Adds the revision that measured a further model to those of `settings`, once.
void add_program(Quality& all, const Quality& one) {
  const auto is_program = [](const auto& setting) { return setting.first == "program"; };
  const auto ours = std::ranges::find_if(all.settings, is_program);
  const auto theirs = std::ranges::find_if(one.settings, is_program);
  if (theirs == one.settings.end()) return;
  if (ours == all.settings.end())
    all.settings.push_back(*theirs);
  else if ((ours->second + ", ").find(theirs->second + ", ") == std::string::npos)
    ours->second += ", " + theirs->second;
}

/// Means over the calibration seeds.
struct ModelScore {
  double nats = 0, accuracy = 0, weights = 0, inputs = 0, counted = 0;
  int64_t n = 0, answered = 0, with_count = 0;
};

/// The scores of an arm in a task, by model.
std::map<std::string, ModelScore> scores_of(const Quality& quality, const std::string& task,
                                            const std::string& arm) {
  std::map<std::string, ModelScore> scores;
  for (const QualityCell& cell : quality.cells) {
    if (cell.arm != arm || (cell.task != task && !cell.task.empty())) continue;
    ModelScore& score = scores[cell.model];
    score.nats += cell.nats, score.weights += cell.weights, score.inputs += cell.inputs, ++score.n;
    if (cell.accuracy) score.accuracy += *cell.accuracy, ++score.answered;
    if (cell.counted) score.counted += *cell.counted, ++score.with_count;
  }
  for (auto& [model, score] : scores) {
    const auto n = double(score.n);
    score.nats /= n, score.weights /= n, score.inputs /= n, score.counted /= n;
    // An arm whose seeds were answered in part would compare different seeds.
    if (score.answered == score.n)
      score.accuracy /= n;
    else
      score.answered = 0;
  }
  return scores;
}

/// What two arms have of the models that both have; `value` gives nothing where a model lacks it.
template <class Value>
std::optional<eval::Interval> paired(const std::map<std::string, ModelScore>& a,
                                     const std::map<std::string, ModelScore>& b, Value&& value) {
  std::vector<double> ours, theirs;
  for (const auto& [model, score] : a) {
    const auto found = b.find(model);
    if (found == b.end()) continue;
    const std::optional<double> x = value(score), y = value(found->second);
    if (x && y) ours.push_back(*x), theirs.push_back(*y);
  }
  if (ours.empty()) return {};
  return eval::paired_difference(ours, theirs);
}

std::optional<double> nats_of(const ModelScore& score) {
  return score.nats;
}
std::optional<double> accuracy_of(const ModelScore& score) {
  return score.answered > 0 ? std::optional(score.accuracy) : std::nullopt;
}

/// Of several arms the least loss of each model that has all of them.
std::map<std::string, ModelScore> least_of(const Quality& quality, const std::string& task,
                                           const std::vector<std::string>& arms) {
  std::map<std::string, ModelScore> least;
  for (const std::string& model : quality.models) least[model].nats = std::numeric_limits<double>::infinity();
  for (const std::string& arm : arms) {
    const auto scores = scores_of(quality, task, arm);
    std::erase_if(least, [&](const auto& entry) { return !scores.contains(entry.first); });
    for (auto& [model, score] : least) score.nats = std::min(score.nats, scores.at(model).nats);
  }
  return least;
}

}  // namespace

bool has_interval(const eval::Interval& interval) {
  return interval.n > 1 && !std::isnan(interval.p);
}

Quality read_quality(const std::vector<std::string>& paths) {
  check(!paths.empty(), "quality: no files of results");
  Quality all = read_one(paths.front());
  for (size_t i = 1; i < paths.size(); ++i) {
    Quality one = read_one(paths[i]);
    check(std::ranges::find(all.models, one.models.front()) == all.models.end(), "quality: ", paths[i],
          ": the model ", one.models.front(), " is given twice");
    const std::string other = other_setting(all, one);
    check(other.empty(), "quality: ", paths[i], " is of another study than ", paths.front(), ": \"", other,
          "\" differs");
    add_program(all, one);
    all.models.push_back(one.models.front());
    all.cells.insert(all.cells.end(), one.cells.begin(), one.cells.end());
    all.missing.insert(all.missing.end(), one.missing.begin(), one.missing.end());
  }
  return all;
}

std::vector<QualityArm> Quality::arms() const {
  std::vector<std::pair<std::string, std::string>> order;
  for (const QualityCell& cell : cells)
    if (const std::pair one{cell.task, cell.arm}; std::ranges::find(order, one) == order.end())
      order.push_back(one);
  std::vector<std::string> tasks;
  for (const auto& [task, arm] : order)
    if (std::ranges::find(tasks, task) == tasks.end()) tasks.push_back(task);
  std::ranges::stable_sort(
      order, {}, [&](const auto& one) { return std::ranges::find(tasks, one.first) - tasks.begin(); });
  std::vector<QualityArm> result;
  for (const auto& [task, name] : order) {
    const auto scores = scores_of(*this, task, name), dense = scores_of(*this, task, baseline);
    QualityArm arm{.task = task,
                   .arm = name,
                   .counted = {},
                   .nats = {},
                   .nats_above_dense = {},
                   .accuracy = {},
                   .accuracy_above_dense = {}};
    std::vector<double> nats, accuracies;
    double counted = 0;
    bool all_counted = true;
    for (const auto& [model, score] : scores) {
      nats.push_back(score.nats);
      arm.weights += score.weights / double(scores.size()),
          arm.inputs += score.inputs / double(scores.size());
      counted += score.counted / double(scores.size());
      all_counted = all_counted && score.with_count == score.n;
      if (const auto accuracy = accuracy_of(score)) accuracies.push_back(*accuracy);
    }
    if (all_counted) arm.counted = counted;
    arm.nats = eval::interval_of(nats);
    if (!accuracies.empty()) arm.accuracy = eval::interval_of(accuracies);
    if (name != baseline) {
      arm.nats_above_dense = paired(scores, dense, nats_of);
      arm.accuracy_above_dense = paired(scores, dense, accuracy_of);
    }
    result.push_back(std::move(arm));
  }
  return result;
}

std::vector<ClaimResult> Quality::results() const {
  std::vector<ClaimResult> all;
  for (const QualityClaim& claim : claims)
    all.push_back({claim, paired(least_of(*this, claim.task, claim.lower),
                                 least_of(*this, claim.task, claim.than), nats_of)});
  return all;
}

std::string ClaimResult::verdict() const {
  if (!difference) return "not measured";
  if (difference->n == 1)
    return claim.alike            ? "one model cannot tell"
           : difference->mean < 0 ? "held in one model"
                                  : "not held in one model";
  if (!has_interval(*difference)) return "noise unknown";
  const bool below = difference->high()<0, above = difference->low()> 0;
  if (claim.alike) return below || above ? "differ" : "not told apart";
  return below ? "held" : above ? "refuted" : "not told apart";
}

}  // namespace tessera::sparsity
