#include "study/results.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "runtime/error.h"

namespace tessera::study {
namespace {

constexpr double kNothing = std::numeric_limits<double>::quiet_NaN();

/// Share of the baseline's score that an arm may be short of in "time to 95 %".
constexpr double kShort = 0.05;

double last_of(const std::vector<train::StepRecord>& records, const std::string& name) {
  for (auto record = records.rbegin(); record != records.rend(); ++record)
    if (const auto found = record->values.find(name); found != record->values.end()) return found->second;
  return kNothing;
}

CellResult result_of(const Folder& folder, const Cell& cell) {
  CellResult result{.cell = cell,
                    .record = folder.record_of(cell),
                    .records = {},
                    .score = kNothing,
                    .loss = kNothing,
                    .gpu = {},
                    .revision = {},
                    .basis = {}};
  const auto run = Folder::run_of(folder.cells(), cell);
  if (!run) return result;
  result.records = run->metrics();
  result.score = last_of(result.records, folder.plan().metric);
  result.loss = last_of(result.records, "loss");
  if (!result.records.empty()) result.steps = result.records.back().step;
  const nlohmann::json settings = run->settings();
  result.gpu = settings.value("gpu", settings.value("device", std::string()));
  result.basis = basis_of(settings, folder.plan().metric);
  const nlohmann::json build = settings.value("build", nlohmann::json::object());
  if (build.is_object()) result.revision = build.value("revision", std::string());
  return result;
}

/// The paces of the intervals that a run logged. The first two steps of a run are eager or capture the graph.
void add_paces(const std::vector<train::StepRecord>& records, std::vector<double>& paces) {
  for (const train::StepRecord& record : records)
    if (const auto found = record.values.find("ms_per_step");
        found != record.values.end() && record.step > 2 && std::isfinite(found->second))
      paces.push_back(found->second);
}

StepTime step_time(const Folder& folder, const std::vector<CellResult>& cells, const std::string& arm,
                   const std::string& task) {
  StepTime time{.arm = arm, .task = task, .ms = kNothing};
  std::vector<double> paces;
  for (const CellResult& cell : cells)
    if (cell.cell.arm == arm && cell.cell.task == task && cell.record.status == CellStatus::finished &&
        cell.record.alone)
      add_paces(cell.records, paces);
  if (paces.empty()) {
    const Cell own = timing_cell(folder.plan(), arm, task, 1);
    const auto run = Folder::run_of(folder.timing(), own);
    if (run && folder.record_of(own).status == CellStatus::finished) add_paces(run->metrics(), paces);
    time.own_run = !paces.empty();
  }
  if (paces.empty()) return time;
  time.ms = eval::median(paces);
  time.intervals = int64_t(paces.size());
  return time;
}

/// The scores of an arm by seed, and the first evaluations of each seed.
struct ArmScores {
  std::string arm, rate;
  std::map<uint64_t, double> scores;
  std::map<uint64_t, const CellResult*> cells;
  std::vector<const CellResult*> measured;  // all whose scores these are, of several tasks too
};

ArmScores scores_of(const Results& results, const std::string& arm, const std::string& task,
                    const std::string& rate) {
  ArmScores scores{arm, rate, {}, {}, {}};
  for (const CellResult& cell : results.cells)
    if (cell.counts() && cell.cell.arm == arm && cell.cell.task == task && cell.cell.rate == rate) {
      scores.scores[cell.cell.seed] = cell.score;
      scores.cells[cell.cell.seed] = &cell;
      scores.measured.push_back(&cell);
    }
  return scores;
}

double mean_score(const ArmScores& scores) {
  double sum = 0;
  for (const auto& [seed, score] : scores.scores) sum += score;
  return sum / double(scores.scores.size());
}

/// Of the rates with the most seeds the one with the best mean.
ArmScores at_best_rate(const Results& results, const std::string& arm, const std::string& task) {
  const std::vector<std::string>& rates = results.plan.rates;
  ArmScores best = scores_of(results, arm, task, rates.empty() ? "" : rates.front());
  for (const std::string& rate : rates) {
    ArmScores other = scores_of(results, arm, task, rate);
    if (other.scores.empty()) continue;
    const double sign = results.plan.higher ? 1 : -1;
    const bool better = other.scores.size() != best.scores.size()
                            ? other.scores.size() > best.scores.size()
                            : sign * mean_score(other) > sign * mean_score(best);
    if (better) best = std::move(other);
  }
  return best;
}

/// Each seed's mean over all tasks, of the seeds that all of them have.
ArmScores over_tasks(const Results& results, const std::string& arm) {
  ArmScores mean{arm, {}, {}, {}, {}};
  for (const Part& task : results.plan.tasks)
    for (const CellResult* const cell : at_best_rate(results, arm, task.name).measured)
      mean.measured.push_back(cell);
  for (const uint64_t seed : results.plan.seeds) {
    double sum = 0;
    bool all = true;
    for (const Part& task : results.plan.tasks) {
      const ArmScores scores = at_best_rate(results, arm, task.name);
      const auto found = scores.scores.find(seed);
      all = all && found != scores.scores.end();
      if (all) sum += found->second;
    }
    if (all) mean.scores[seed] = sum / double(results.plan.tasks.size());
  }
  return mean;
}

/// The step of the first evaluation that is as good as the target; 0: none is.
int64_t first_reaching(const CellResult& cell, const std::string& metric, double target, bool higher) {
  for (const train::StepRecord& record : cell.records)
    if (const auto found = record.values.find(metric);
        found != record.values.end() && (higher ? found->second >= target : found->second <= target))
      return record.step;
  return 0;
}

std::vector<double> values_of(const std::map<uint64_t, double>& scores) {
  std::vector<double> values;
  for (const auto& [seed, score] : scores) values.push_back(score);
  return values;
}

void add_target(Comparison& comparison, const Plan& plan, const ArmScores& arm, double baseline) {
  comparison.target = baseline + (plan.higher ? -kShort : kShort) * std::abs(baseline);
  std::vector<double> steps;
  for (const auto& [seed, cell] : arm.cells)
    if (const int64_t step = first_reaching(*cell, plan.metric, comparison.target, plan.higher))
      steps.push_back(double(step));
  comparison.reached = int64_t(steps.size());
  if (!steps.empty()) comparison.steps_to_target = eval::interval_of(steps);
}

/// The facts in which scores of the two differ on a task; "": in none.
std::string differing(const ArmScores& arm, const ArmScores& baseline) {
  std::map<std::string, const Basis*> of_task;
  for (const ArmScores* const scores : {&baseline, &arm})
    for (const CellResult* const cell : scores->measured) {
      const Basis& known = *of_task.emplace(cell->cell.task, &cell->basis).first->second;
      if (const std::string facts = difference_of(known, cell->basis); !facts.empty()) return facts;
    }
  return "";
}

Comparison compare(const Plan& plan, const ArmScores& arm, const ArmScores& baseline) {
  Comparison comparison{.task = {},
                        .rate = arm.rate,
                        .arm = arm.arm,
                        .is_baseline = arm.arm == plan.baseline,
                        .seeds = {},
                        .score = eval::interval_of(values_of(arm.scores)),
                        .difference = {},
                        .p_holm = kNothing,
                        .target = kNothing,
                        .steps_to_target = {},
                        .incomparable = differing(arm, baseline)};
  std::vector<double> ours, theirs;
  for (const auto& [seed, score] : arm.scores) {
    comparison.seeds.push_back(seed);
    if (const auto found = baseline.scores.find(seed); found != baseline.scores.end())
      ours.push_back(score), theirs.push_back(found->second);
  }
  if (!comparison.incomparable.empty()) return comparison;
  if (!comparison.is_baseline && !ours.empty()) comparison.difference = eval::paired_difference(ours, theirs);
  if (!baseline.scores.empty() && !arm.cells.empty()) add_target(comparison, plan, arm, mean_score(baseline));
  return comparison;
}

/// The arms that have scores, compared with the baseline and corrected together.
std::vector<Comparison> family_of(const Plan& plan, const std::vector<ArmScores>& arms) {
  ArmScores baseline;
  for (const ArmScores& arm : arms)
    if (arm.arm == plan.baseline) baseline = arm;
  std::vector<Comparison> family;
  std::vector<double> p;
  for (const ArmScores& arm : arms) {
    if (arm.scores.empty()) continue;
    family.push_back(compare(plan, arm, baseline));
    p.push_back(family.back().difference ? family.back().difference->p : kNothing);
  }
  const std::vector<double> corrected = eval::holm(p);
  for (size_t i = 0; i < family.size(); ++i) family[i].p_holm = corrected[i];
  return family;
}

class Families {
 public:
  explicit Families(Results& results) : results_(results), plan_(results.plan) {
    const std::vector<Part> tasks = tasks_of(plan_);
    const std::vector<std::string> rates = rates_of(plan_);
    for (const Part& task : tasks) {
      for (const std::string& rate : rates)
        add(task.name, false, false,
            [&](const std::string& arm) { return scores_of(results_, arm, task.name, rate); });
      if (rates.size() > 1)
        add(task.name, true, false,
            [&](const std::string& arm) { return at_best_rate(results_, arm, task.name); });
    }
    if (tasks.size() > 1)
      add("", rates.size() > 1, true, [&](const std::string& arm) { return over_tasks(results_, arm); });
  }

 private:
  template <class Scores>
  void add(const std::string& task, bool best, bool all_tasks, Scores&& scores) {
    std::vector<ArmScores> arms;
    for (const Part& arm : plan_.arms) arms.push_back(scores(arm.name));
    std::vector<Comparison> family = family_of(plan_, arms);
    for (Comparison& comparison : family)
      comparison.task = task, comparison.best_rate = best, comparison.over_tasks = all_tasks;
    if (!family.empty()) results_.families.push_back(std::move(family));
  }

  Results& results_;
  const Plan& plan_;
};

}  // namespace

bool CellResult::counts() const {
  return record.status == CellStatus::finished && std::isfinite(score);
}

std::string Comparison::verdict(bool higher) const {
  if (is_baseline) return "baseline";
  if (!incomparable.empty()) return "not compared";
  if (!difference || std::isnan(p_holm)) return "-";
  if (p_holm >= eval::kLevel) return "not told apart";
  return (difference->mean > 0) == higher ? "better" : "worse";
}

int64_t Results::count(CellStatus status) const {
  return std::ranges::count_if(cells, [&](const CellResult& cell) { return cell.record.status == status; });
}

const StepTime& Results::time_of(const std::string& arm, const std::string& task) const {
  for (const StepTime& time : times)
    if (time.arm == arm && time.task == task) return time;
  fail_at(Site::here(), "study: the plan has no arm \"", arm, "\" with a task \"", task, "\"");
}

std::vector<const CellResult*> Results::cells_of_arm(const Comparison& comparison) const {
  std::vector<const CellResult*> found;
  for (const CellResult& cell : cells)
    if (cell.counts() && cell.cell.arm == comparison.arm && cell.cell.task == comparison.task &&
        cell.cell.rate == comparison.rate)
      found.push_back(&cell);
  return found;
}

Results collect(const Folder& folder) {
  Results results{folder.plan(), {}, {}, {}};
  for (const Cell& cell : cells_of(folder.plan())) results.cells.push_back(result_of(folder, cell));
  for (const Part& task : tasks_of(results.plan))
    for (const Part& arm : results.plan.arms)
      results.times.push_back(step_time(folder, results.cells, arm.name, task.name));
  Families{results};
  return results;
}

}  // namespace tessera::study
