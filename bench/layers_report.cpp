#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "bench/layers_bench.h"
#include "bench/step_internal.h"
#include "report/facts.h"

namespace tessera::bench {
namespace {

using nlohmann::json;

/// What one comparison says about each part: the modified model may lack a part that the original has, a
/// fused feed-forward network for example, and the other way round.
struct Sides {
  std::map<Part, PartTimes> original, modified;
  std::vector<Part> order;

  explicit Sides(const LayersComparison& one) : original(part_times(one.original.repeats)) {
    if (one.modified) modified = part_times(one.modified->repeats);
    std::map<Part, PartTimes> both = original;
    both.insert(modified.begin(), modified.end());
    order = in_order(both);
  }
};

double median_of(const std::map<Part, PartTimes>& times, const Part& part, Timing PartTimes::*direction) {
  const auto found = times.find(part);
  return found == times.end() ? -1 : (found->second.*direction).p50;
}

/// Nothing for a time that is not there (below 0), or that is too short to divide by.
report::TableCell number(double value) {
  return value < 0 ? report::TableCell() : report::TableCell(value);
}
double speedup(double original, double modified) {
  return original > 0 && modified > 0 ? original / modified : -1;
}
std::string shown(double value, const char* format) {
  return value < 0 ? "-" : fmt::format(fmt::runtime(format), value);
}

/// Times and speedup of one part in one direction.
struct Pair {
  double original, modified;
  Pair(const Sides& sides, const Part& part, Timing PartTimes::*direction)
      : original(median_of(sides.original, part, direction)),
        modified(median_of(sides.modified, part, direction)) {}
  void add_to(std::vector<std::string>& row, bool both) const {
    row.push_back(shown(original, "{:.3f}"));
    if (!both) return;
    row.push_back(shown(modified, "{:.3f}"));
    row.push_back(shown(speedup(original, modified), "{:.2f}x"));
  }
};

bool is_of_feed_forward(const std::string& kind) {
  return kind == "intermediate" || kind == "activation" || kind == "output";
}

/// The rows of the parts for which `wanted` holds.
template <class Wanted, class Name>
std::string times_table(const Sides& sides, bool both, const char* heading, const Wanted& wanted,
                        const Name& name) {
  std::vector<std::vector<std::string>> rows{{heading, "forward ms"}};
  if (both) rows[0].insert(rows[0].end(), {"modified", "speedup"});
  rows[0].push_back("backward ms");
  if (both) rows[0].insert(rows[0].end(), {"modified", "speedup"});
  for (const Part& part : sides.order) {
    if (!wanted(part)) continue;
    std::vector<std::string> row{name(part)};
    Pair(sides, part, &PartTimes::forward).add_to(row, both);
    Pair(sides, part, &PartTimes::backward).add_to(row, both);
    rows.push_back(std::move(row));
  }
  return format_rows(rows, 1);
}

/// Sums of the operators of one name in one direction, per repeat.
struct OpSums {
  std::vector<double> ms;
  int64_t calls = 0;  // per pass
};
using OpKey = std::pair<std::string, bool>;  // name, whether backward

std::map<OpKey, OpSums> sums_by_op(const std::vector<PassTimes>& repeats) {
  std::map<OpKey, OpSums> sums;
  for (size_t i = 0; i < repeats.size(); ++i)
    for (const bool backward : {false, true})
      for (const TimedOp& op : backward ? repeats[i].backward : repeats[i].forward) {
        OpSums& of = sums[{op.op, backward}];
        of.ms.resize(repeats.size());
        of.ms[i] += op.ms;
        if (i == 0) of.calls += 1;
      }
  return sums;
}

std::string top_table(const LayersComparison& one, size_t top) {
  struct Row {
    OpKey key;
    int64_t calls;
    double original, modified;
  };
  std::map<OpKey, OpSums> original = sums_by_op(one.original.repeats), modified;
  if (one.modified) modified = sums_by_op(one.modified->repeats);
  std::set<OpKey> keys;
  for (const auto* sums : {&original, &modified})
    for (const auto& [key, of] : *sums) keys.insert(key);
  std::vector<Row> rows;
  double all = 0;
  for (const OpKey& key : keys) {
    const auto median = [&](std::map<OpKey, OpSums>& sums) {
      const auto found = sums.find(key);
      return found == sums.end() ? -1 : percentiles(found->second.ms).p50;
    };
    const auto& of = original.contains(key) ? original[key] : modified[key];
    rows.push_back(
        {.key = key, .calls = of.calls, .original = median(original), .modified = median(modified)});
    all += std::max(0.0, rows.back().original);
  }
  std::ranges::stable_sort(rows, std::greater(),
                           [](const Row& row) { return std::max(row.original, row.modified); });
  std::vector<std::vector<std::string>> text{{"operator", "pass", "calls", "ms", "share"}};
  if (one.modified) text[0].push_back("modified");
  for (size_t i = 0; i < std::min(top, rows.size()); ++i) {
    const Row& row = rows[i];
    text.push_back(
        {row.key.first, row.key.second ? "backward" : "forward", std::to_string(row.calls),
         shown(row.original, "{:.3f}"),
         row.original < 0 ? "-" : fmt::format("{:.1f} %", 100 * row.original / std::max(all, 1e-9))});
    if (one.modified) text.back().push_back(shown(row.modified, "{:.3f}"));
  }
  return format_rows(text, 2);
}

}  // namespace

report::Table layers_table(const std::vector<LayersComparison>& all) {
  report::Table table{
      .name = "layers",
      .columns = {"Task", "Layer", "Kind", "Original Forward (ms)", "Modified Forward (ms)",
                  "Forward Speedup", "Original Backward (ms)", "Modified Backward (ms)", "Backward Speedup"},
      .rows = {}};
  for (const LayersComparison& one : all) {
    const Sides sides(one);
    for (const Part& part : sides.order) {
      std::vector<report::TableCell> row{one.original.task, part.layer, part.kind};
      for (const auto direction : {&PartTimes::forward, &PartTimes::backward}) {
        const Pair pair(sides, part, direction);
        row.push_back(number(pair.original));
        row.push_back(number(pair.modified));
        row.push_back(number(speedup(pair.original, pair.modified)));
      }
      table.rows.push_back(std::move(row));
    }
  }
  return table;
}

std::vector<Record> layers_records(const LayersBenchOptions& options,
                                   const std::vector<LayersComparison>& all) {
  std::vector<Record> records;
  const auto add = [&](const LayersRun& run) {
    const std::map<Part, PartTimes> times = part_times(run.repeats);
    const models::BertConfig& model = run.config;
    const models::BertConfig usual = base_model(options.model.family);
    for (const Part& part : in_order(times))
      for (const bool backward : {false, true}) {
        Record record;
        record.op = options.model.family == models::BertFamily::bert ? "layers bert" : "layers roberta";
        record.shape = {{"B", run.batch}, {"tokens", run.tokens}};
        add_unusual(record, {{"V", model.vocabulary, usual.vocabulary},
                             {"d", model.d_model, usual.d_model},
                             {"d_ff", model.d_ff, usual.d_ff},
                             {"heads", model.heads, usual.heads},
                             {"layers", model.layers, usual.layers}});
        record.attrs = {{"task", run.task},
                        {"layer", part.layer},
                        {"kind", part.kind},
                        {"dropout", fmt::format("{:g}", model.hidden_dropout)}};
        if (!run.slice.empty()) record.attrs["slice"] = run.slice;
        record.does["feed-forward"] = options.unfused ? "layers one by one" : "fused";
        record.dtype = name_of(options.precision);
        record.device = options.device.name(), record.gpu = options.device.info().name;
        record.mode = backward ? "bwd" : "fwd";
        record.implementation = "tessera eager";
        record.ms = backward ? times.at(part).backward : times.at(part).forward;
        record.build = report::kRevision, record.time = report::utc_now();
        records.push_back(std::move(record));
      }
  };
  for (const LayersComparison& one : all) {
    add(one.original);
    if (one.modified) add(*one.modified);
  }
  return records;
}

std::string layers_text(const LayersComparison& one, size_t top) {
  const Sides sides(one);
  const bool both = one.modified.has_value();
  std::string text = fmt::format("\n{}: {} texts, {} tokens; medians of {} passes\n", one.original.task,
                                 one.original.batch, one.original.tokens, one.original.repeats.size());
  if (both) text += fmt::format("modified: --slice {}\n", one.modified->slice);
  text += "\n" + times_table(
                     sides, both, "layer", [](const Part& part) { return part.kind == kAllParts; },
                     [](const Part& part) { return part.layer; });
  text +=
      "\n" + times_table(
                 sides, both, "kind",
                 [](const Part& part) { return part.layer == kAllParts && part.kind != kAllParts; },
                 [](const Part& part) { return (is_of_feed_forward(part.kind) ? "  " : "") + part.kind; });
  if (top > 0) text += fmt::format("\nthe {} operators that take longest\n", top) + top_table(one, top);
  return text;
}

// ---- the trace ----

namespace {

json event(const std::string& name, const char* category, int process, double begin_ms, double ms) {
  return {{"name", name}, {"cat", category},      {"ph", "X"},      {"pid", process},
          {"tid", 0},     {"ts", begin_ms * 1e3}, {"dur", ms * 1e3}};
}

double end_of(const PassTimes& pass) {
  const std::vector<TimedOp>& last = pass.backward.empty() ? pass.forward : pass.backward;
  return last.back().begin_ms + last.back().ms;
}

const PassTimes& median_pass(const std::vector<PassTimes>& repeats) {
  std::vector<const PassTimes*> sorted;
  for (const PassTimes& pass : repeats) sorted.push_back(&pass);
  std::ranges::stable_sort(sorted, {}, [](const PassTimes* pass) { return end_of(*pass); });
  return *sorted[sorted.size() / 2];
}

void add_pass(json& events, const PassTimes& pass, int process) {
  std::map<size_t, Part> parts;
  bool entered = false;
  for (const TimedOp& op : pass.forward) {
    entered = entered || std::string_view(op.layer).starts_with("blocks.");
    parts[op.entry] = parts_of(op.op, op.layer, entered)[3];
  }
  for (const bool backward : {false, true}) {
    const std::vector<TimedOp>& ops = backward ? pass.backward : pass.forward;
    const char* const category = backward ? "backward" : "forward";
    // A layer's event comes before those inside it, as viewers expect of nested ones.
    for (size_t first = 0; first < ops.size();) {
      const std::string& layer = parts.at(ops[first].entry).layer;
      size_t end = first;
      while (end < ops.size() && parts.at(ops[end].entry).layer == layer) ++end;
      const double begin_ms = ops[first].begin_ms, end_ms = ops[end - 1].begin_ms + ops[end - 1].ms;
      const bool numbered = layer != "embeddings" && layer != "head";
      events.push_back(
          event((numbered ? "layer " : "") + layer, category, process, begin_ms, end_ms - begin_ms));
      for (; first < end; ++first) {
        const TimedOp& op = ops[first];
        json one = event(op.op, category, process, op.begin_ms, op.ms);
        one["args"] = {{"layer", op.layer}, {"kind", parts.at(op.entry).kind}};
        events.push_back(std::move(one));
      }
    }
  }
}

}  // namespace

json layers_trace(const std::vector<LayersComparison>& all) {
  json events = json::array();
  int process = 0;
  const auto add = [&](const LayersRun& run) {
    const std::string name = run.task + (run.slice.empty() ? ": original" : ": modified, " + run.slice);
    events.push_back({{"name", "process_name"}, {"ph", "M"}, {"pid", process}, {"args", {{"name", name}}}});
    add_pass(events, median_pass(run.repeats), process);
    process += 1;
  };
  for (const LayersComparison& one : all) {
    add(one.original);
    if (one.modified) add(*one.modified);
  }
  return {{"traceEvents", std::move(events)}, {"displayTimeUnit", "ms"}};
}

}  // namespace tessera::bench
