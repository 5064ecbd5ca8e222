#include "study/runs_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "datasets/glue.h"
#include "runtime/error.h"
#include "runtime/text.h"
#include "train/run_report.h"

namespace tessera::study {
namespace {

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

/// The value of a setting wherever in run.json it stands: "/job/model.dtype" is "model.dtype" and
/// "job/model.dtype". One of the job comes before an option, and both before what else has that name, such as
/// the stride of the evaluation. Names of settings that are not it go to `known`.
std::optional<std::string> setting_of(const train::RunFolder& run, const std::string& name,
                                      std::vector<std::string>& known) {
  const nlohmann::json settings = run.settings().flatten();
  for (const char* const section : {"/job/", "/options/", "/"})
    for (const auto& [key, value] : settings.items())
      if (key.starts_with(section) && (key == "/" + name || key.ends_with("/" + name)))
        return value.is_string() ? value.get<std::string>() : value.dump();
  for (const auto& [key, value] : settings.items()) known.push_back(key.substr(key.rfind('/') + 1));
  return {};
}

/// The value of each run. Some settings, such as the optimizer, are in run.json only if they are not the
/// default: runs without the setting are a group of their own. Throws if no run has it.
std::vector<std::string> settings_of_all(const std::vector<train::RunFolder>& runs, const std::string& name) {
  std::vector<std::string> values, known;
  bool any = false;
  for (const train::RunFolder& run : runs) {
    const std::optional<std::string> value = setting_of(run, name, known);
    any |= value.has_value();
    values.push_back(value.value_or("(not set)"));
  }
  check(any || runs.empty(), "report: no run.json has the setting \"", name,
        "\" (some are there only if they are not the default)", any ? "" : did_you_mean(name, known));
  return values;
}

std::string spread(const std::vector<double>& values) {
  if (std::ranges::any_of(values, [](double v) { return std::isnan(v); })) return "-";
  return values.size() == 1 ? fmt::format("{:.4f}", values[0])
                            : fmt::format("{:.4f} +- {:.4f}", eval::spread_of(values).mean,
                                          eval::spread_of(values).deviation);
}

struct Metric {
  std::string name;
  std::vector<double> RunGroup::*values;
  std::vector<Basis> RunGroup::*basis;
};

/// The facts in which those runs of the groups differ that have the figure; "": in none.
std::string differing(const Metric& metric, std::initializer_list<const RunGroup*> groups) {
  const Basis* first = nullptr;
  for (const RunGroup* const group : groups)
    for (size_t i = 0; i < group->runs.size(); ++i) {
      const Basis& basis = (group->*metric.basis)[i];
      if (std::isnan((group->*metric.values)[i])) continue;
      if (!first) first = &basis;
      if (const std::string difference = difference_of(*first, basis); !difference.empty()) return difference;
    }
  return "";
}

/// Whether runs have different tokenizers and bits per byte, which can be compared all the same.
bool shows_bits(const std::vector<RunGroup>& groups) {
  std::set<std::string> tokenizers;
  bool any = false;
  for (const RunGroup& group : groups)
    for (size_t i = 0; i < group.runs.size(); ++i) {
      const auto found = group.evaluation_basis[i].find("tokenizer");
      if (found != group.evaluation_basis[i].end()) tokenizers.insert(found->second);
      any |= !std::isnan(group.bits[i]);
    }
  return any && tokenizers.size() > 1;
}

std::vector<Metric> metrics_of(const std::vector<RunGroup>& groups) {
  if (groups.empty()) return {};
  const RunUnits& units = groups.front().units;
  std::vector<Metric> metrics = {
      {"final loss (" + units.loss + ")", &RunGroup::final_loss, &RunGroup::loss_basis},
      {units.evaluation, &RunGroup::evaluation, &RunGroup::evaluation_basis}};
  if (shows_bits(groups))
    metrics.push_back({"held-out bits per byte", &RunGroup::bits, &RunGroup::bits_basis});
  if (!units.gap.empty()) metrics.push_back({units.gap, &RunGroup::gap, &RunGroup::evaluation_basis});
  return metrics;
}

/// Skipped steps of each run, "2, 0, 3"; "-" for a run that neither skipped nor scaled.
std::string skipped_text(const std::vector<double>& skipped) {
  std::string text;
  for (const double value : skipped)
    text +=
        (text.empty() ? "" : ", ") + (std::isnan(value) ? std::string("-") : fmt::format("{:.0f}", value));
  return text;
}

/// Whether any run has logged skipped steps: then they have a column.
bool any_skipped(const std::vector<RunGroup>& groups) {
  return std::ranges::any_of(groups, [](const RunGroup& group) {
    return std::ranges::any_of(group.skipped, [](double value) { return !std::isnan(value); });
  });
}

std::vector<std::vector<std::string>> table_of(const std::vector<RunGroup>& groups) {
  std::vector<std::vector<std::string>> rows;
  for (const RunGroup& group : groups) {
    rows.push_back({group.name, std::to_string(group.runs.size())});
    for (const Metric& metric : metrics_of(groups))
      rows.back().push_back(differing(metric, {&group}).empty() ? spread(group.*metric.values) : "-");
    if (any_skipped(groups)) rows.back().push_back(skipped_text(group.skipped));
  }
  return rows;
}

std::vector<std::string> header_of(const std::vector<RunGroup>& groups, std::vector<std::string> first) {
  for (const Metric& metric : metrics_of(groups)) first.push_back(metric.name);
  if (any_skipped(groups)) first.emplace_back("skipped steps");
  return first;
}

/// Two groups whose means of a metric can be compared.
struct Pair {
  const RunGroup *first, *second;
  const Metric* metric;
  eval::Difference d;
  double p_holm;  // corrected over the `tested` pairs of the metric; NaN: the noise is not told
  int64_t tested;
  bool beyond() const { return p_holm < eval::kLevel; }
};

/// Corrects the pairs of each metric for being tested together.
void correct(std::vector<Pair>& pairs, const std::vector<Metric>& metrics) {
  for (const Metric& metric : metrics) {
    std::vector<double> p;
    for (const Pair& pair : pairs)
      if (pair.metric == &metric) p.push_back(pair.d.p);
    const std::vector<double> corrected = eval::holm(p);
    const int64_t tested = std::ranges::count_if(p, [](double value) { return !std::isnan(value); });
    size_t i = 0;
    for (Pair& pair : pairs)
      if (pair.metric == &metric) pair.p_holm = corrected[i++], pair.tested = tested;
  }
}

std::string verdict_of(const Pair& pair) {
  if ((pair.first->*pair.metric->values).size() < 2 || (pair.second->*pair.metric->values).size() < 2)
    return "a group of one run does not tell the noise";
  if (std::isnan(pair.p_holm)) return "a group of runs with equal values does not tell the noise";
  const std::string noise = fmt::format("{:.4f}, 95 %", pair.d.noise);
  return fmt::format("{} the noise over runs ({})", pair.beyond() ? "beyond" : "within",
                     pair.tested == 1
                         ? noise
                         : fmt::format("p = {:.2g} after Holm's correction for {} pairs; of this "
                                       "pair alone {}",
                                       pair.p_holm, pair.tested, noise));
}

/// For each pair of groups a sentence per metric. Among three groups and more, single runs are not compared.
/// Runs of different bases are not compared either, which one sentence says for all pairs of a metric that
/// differ in the same facts. A final loss that is not finite has no mean, which a sentence per group says.
std::vector<std::string> sentences(const std::vector<RunGroup>& groups) {
  std::vector<std::string> lines;
  std::map<std::string, std::string> refused;  // the groups, by metric and facts
  const auto refuse = [&](const Metric& metric, const std::string& facts, const std::string& which) {
    std::string& text =
        refused[fmt::format("{}: not compared, since they differ in {}: ", metric.name, facts)];
    text += (text.empty() ? "" : "; ") + which;
  };
  const std::vector<Metric> metrics = metrics_of(groups);
  std::vector<Pair> pairs;
  const auto compare = [&](const RunGroup& first, const RunGroup& second) {
    for (const Metric& metric : metrics) {
      const auto &a = first.*metric.values, &b = second.*metric.values;
      if (std::isnan(eval::spread_of(a).mean) || std::isnan(eval::spread_of(b).mean)) continue;
      if (!differing(metric, {&first}).empty() || !differing(metric, {&second}).empty()) continue;
      if (const std::string facts = differing(metric, {&first, &second}); !facts.empty()) {
        refuse(metric, facts, first.name + " and " + second.name);
        continue;
      }
      const bool single = a.size() < 2 || b.size() < 2;
      if (single && groups.size() > 2) continue;
      const eval::Difference d = eval::welch(a, b);
      pairs.push_back(
          {.first = &first, .second = &second, .metric = &metric, .d = d, .p_holm = d.p, .tested = 1});
    }
  };
  for (const RunGroup& group : groups)
    for (const Metric& metric : metrics)
      if (const std::string facts = differing(metric, {&group}); !facts.empty())
        refuse(metric, facts, "the runs of " + group.name);
  for (size_t a = 0; a < groups.size(); ++a)
    for (size_t b = a + 1; b < groups.size(); ++b) compare(groups[a], groups[b]);
  correct(pairs, metrics);
  for (const Pair& pair : pairs)
    lines.push_back(fmt::format("{}: {} - {} = {:.4f}, {}", pair.metric->name, pair.first->name,
                                pair.second->name, pair.d.difference, verdict_of(pair)));
  for (const auto& [why, which] : refused) lines.push_back(why + which);
  for (const RunGroup& group : groups) {
    const auto diverged =
        std::ranges::count_if(group.final_loss, [](double loss) { return !std::isfinite(loss); });
    if (diverged > 0)
      lines.push_back(fmt::format("{}: not compared, since {} diverged", metrics.front().name,
                                  group.runs.size() == 1 ? group.name
                                                         : fmt::format("{} of the {} runs of {}", diverged,
                                                                       group.runs.size(), group.name)));
    for (size_t i = 0; i < group.runs.size(); ++i)
      if (const int64_t at = group.evaluated_step[i]; at >= 0 && at < group.last_step[i])
        lines.push_back(fmt::format(
            "{}: {} was evaluated last after step {}, and its loss is that of step {}",
            group.units.evaluation, group.runs[i].path().filename().string(), at, group.last_step[i]));
  }
  return lines;
}

}  // namespace

RunUnits units_of(const train::RunFolder& run) {
  const nlohmann::json settings = run.settings();
  const auto text_at = [&](const char* pointer) {
    const nlohmann::json::json_pointer at(pointer);
    return settings.contains(at) && settings[at].is_string() ? settings[at].get<std::string>()
                                                             : std::string();
  };
  const std::string model = text_at("/model");
  if (model == "tnp")
    return {model, "nats per point", "held-out loss (nats per point)", "gap to the optimum (nats per point)"};
  if (model == "gpt" || model == "llama") {
    const nlohmann::json::json_pointer order("/baseline/order");
    const std::string gram =
        settings.contains(order) && settings[order].is_number() ? settings[order].dump() + "-gram" : "";
    return {model, "nats per token", "held-out loss (nats per token)",
            gram.empty() ? "" : "gap to the " + gram + " (nats per token)"};
  }
  check(model == "bert", "report: ", run.path().string(), ": run.json says that it is a run of \"", model,
        "\", which is unknown");
  if (text_at("/job/task") == "mlm")
    return {model, "nats per masked token", "held-out loss (nats per masked token)", ""};
  const datasets::GlueInfo& info = datasets::parse_glue_task(text_at("/job/task"));
  return {model, info.labels.empty() ? "squared error per text" : "nats per text",
          std::string("score on ") + info.folder, ""};
}

std::vector<RunGroup> group_runs(const std::vector<train::RunFolder>& runs,
                                 const RunsReportOptions& options) {
  std::set<std::filesystem::path> folders;
  std::map<std::string, int> named;  // how many runs have the name
  for (const train::RunFolder& run : runs) {
    check(folders.insert(std::filesystem::canonical(run.path())).second, "report: ", run.path().string(),
          " is given twice; its noise would be zero");
    named[run.path().filename().string()] += 1;
  }
  const std::vector<std::string> values =
      options.by.empty() ? std::vector<std::string>() : settings_of_all(runs, options.by);
  std::vector<RunGroup> groups;
  for (size_t i = 0; i < runs.size(); ++i) {
    const train::RunFolder& run = runs[i];
    const std::string own = run.path().filename().string();
    const std::string name = !options.by.empty() ? values[i] : named[own] == 1 ? own : run.path().string();
    const std::vector<train::StepRecord> records = run.metrics();
    const int64_t end = records.empty() ? 0 : records.back().step;
    double sum = 0, evaluation = kNone, bits = kNone, gap = kNone, skipped = kNone;
    int64_t count = 0, evaluated = -1;
    for (const train::StepRecord& record : records) {
      const auto value = [&](const char* key) {
        const auto found = record.values.find(key);
        return found == record.values.end() ? kNone : found->second;
      };
      if (record.step > end - options.last && record.values.contains("loss")) sum += value("loss"), ++count;
      if (record.values.contains("eval_nll"))
        evaluation = value("eval_nll"), bits = value("eval_bits_per_byte"), gap = value("eval_gap");
      if (record.values.contains("eval_score")) evaluation = value("eval_score");
      if (record.values.contains("eval_nll") || record.values.contains("eval_score")) evaluated = record.step;
      if (record.values.contains("skipped_steps")) skipped = value("skipped_steps");
    }
    check(count > 0, "report: ", run.path().string(), " has logged no loss",
          run.settings().contains("seeds")
              ? "; name the folders of its seeds, " + run.path().string() + "/seed-*"
              : "");
    RunUnits units = units_of(run);
    if (!groups.empty()) {
      const RunUnits& first = groups.front().units;
      const bool same_loss = units.loss == first.loss && units.evaluation == first.evaluation;
      check(same_loss, "report: ", run.path().string(), " is a run of `train ", units.model, "` (",
            units.loss, ", ", units.evaluation, "), ", groups.front().runs.front().path().string(),
            " one of `train ", first.model, "` (", first.loss, ", ", first.evaluation,
            "); make a page of each kind");
      // Compared with different n-grams, gaps say nothing of each other.
      if (units.gap != first.gap)
        for (RunGroup& other : groups) other.units.gap = "";
      units.gap = groups.front().units.gap;
    }
    auto group = std::ranges::find(groups, name, &RunGroup::name);
    if (group == groups.end()) group = groups.insert(group, {.name = name, .units = units});
    group->runs.push_back(run);
    group->final_loss.push_back(sum / double(count));
    group->evaluation.push_back(evaluation);
    group->bits.push_back(bits);
    group->gap.push_back(gap);
    group->last_step.push_back(end);
    group->evaluated_step.push_back(evaluated);
    group->skipped.push_back(skipped);
    const nlohmann::json settings = run.settings();
    group->loss_basis.push_back(basis_of(settings, "loss"));
    group->evaluation_basis.push_back(basis_of(settings, "eval_nll"));
    group->bits_basis.push_back(basis_of(settings, "eval_bits_per_byte"));
  }
  return groups;
}

std::string incomparable(const std::vector<RunGroup>& groups) {
  if (groups.empty()) return "";
  const Metric loss = metrics_of(groups).front();
  for (const RunGroup& group : groups)
    if (const std::string facts = differing(loss, {&groups.front(), &group}); !facts.empty())
      return fmt::format("final losses of {} cannot be compared, which differ in {}",
                         &group == &groups.front() ? "the runs of " + group.name
                                                   : groups.front().name + " and " + group.name,
                         facts);
  return "";
}

bool agree(const std::vector<RunGroup>& groups) {
  std::vector<double> p;
  for (size_t a = 0; a < groups.size(); ++a)
    for (size_t b = a + 1; b < groups.size(); ++b)
      p.push_back(eval::welch(groups[a].final_loss, groups[b].final_loss).p);
  return std::ranges::none_of(eval::holm(p), [](double corrected) { return corrected < eval::kLevel; });
}

std::string format_groups(const std::vector<RunGroup>& groups) {
  std::string text;
  const std::vector<std::string> header = header_of(groups, {"group", "runs"});
  const auto line = [&](std::vector<std::string> cells) {
    for (std::string& cell : cells) std::ranges::replace_if(cell, ::iscntrl, ' ');  // names of folders
    for (size_t i = 0; i < cells.size(); ++i)
      text += i == 0   ? fmt::format("{:<20}", cells[i])
              : i == 1 ? fmt::format(" {:>5}", cells[i])
                       : fmt::format("  {:>{}}", cells[i], std::max<size_t>(20, header[i].size()));
    text += "\n";
  };
  line(header);
  for (const auto& row : table_of(groups)) line(row);
  for (const std::string& line : sentences(groups)) text += line + "\n";
  return text;
}

void write_runs_report(const std::filesystem::path& path, const std::vector<RunGroup>& groups,
                       const RunsReportOptions& options) {
  report::Page page("Runs side by side");
  page.paragraph(
      fmt::format("Final loss: the mean over the last {} steps. Mean +- standard deviation over "
                  "the runs of a group.",
                  options.last));
  page.table(header_of(groups, {options.by.empty() ? "run" : options.by, "runs"}), table_of(groups));
  for (const std::string& line : sentences(groups)) page.paragraph(line);
  std::vector<report::Series> curves, ends;
  for (size_t g = 0; g < groups.size(); ++g) {
    for (const train::RunFolder& run : groups[g].runs) {
      const std::string name = options.by.empty()
                                   ? groups[g].name
                                   : fmt::format("{} ({})", groups[g].name, run.path().filename().string());
      curves.push_back(train::loss_curve(run, name, int(g)));
      // The last half on its own scale: the first steps hide what the last ones differ in.
      ends.push_back(curves.back());
      auto& points = ends.back().points;
      points.erase(points.begin(), points.begin() + ptrdiff_t(points.size() / 2));
    }
  }
  const std::string unit = groups.empty() ? "" : groups.front().units.loss;
  page.chart("Training loss", "step", unit, curves);
  page.chart("Training loss, the second half", "step", unit, ends);
  page.heading("Runs");
  std::vector<std::vector<std::string>> rows;
  for (const RunGroup& group : groups) {
    for (size_t i = 0; i < group.runs.size(); ++i) {
      rows.push_back({group.runs[i].path().string(), group.name});
      for (const Metric& metric : metrics_of(groups))
        rows.back().push_back(spread({(group.*metric.values)[i]}));
      if (any_skipped(groups)) rows.back().push_back(skipped_text({group.skipped[i]}));
    }
  }
  page.table(header_of(groups, {"folder", "group"}), rows);
  page.write(path);
}

}  // namespace tessera::study
