#include "bench/compare.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <regex>
#include <set>

#include "eval/statistics.h"

namespace tessera::bench {
namespace {

/// "cpu" or "cuda".
std::string kind_of_device(const Record& r) {
  return r.device.substr(0, r.device.find(':'));
}

/// Of the work on a kind of device.
std::string work_key(const Record& r, const std::string& device) {
  std::string key = r.op + "|" + r.dtype + "|" + r.mode + "|" + device;
  for (const auto& [name, size] : r.shape)
    if (size != 0) key += fmt::format("|{}={}", name, size);
  for (const auto& [name, value] : r.attrs) key += fmt::format("|{}={}", name, value);
  return key;
}

bool of_sweep(const Comparison& c) {
  return c.a.sweep.number >= 0;
}

}  // namespace

std::vector<Comparison> compare(const std::vector<Record>& a, const std::vector<Record>& b,
                                const CompareOptions& options, LeftOut* left_out) {
  const std::regex pattern(options.peer);
  std::map<std::string, std::vector<const Record*>> peers;
  for (const Record& record : b)
    if ((record.ms.p50 > 0 || record.required) && std::regex_search(record.implementation, pattern))
      peers[work_key(record, kind_of_device(record))].push_back(&record);
  std::vector<Comparison> comparisons;
  LeftOut counts;
  for (const Record& record : a) {
    if (record.ms.p50 <= 0) continue;
    Comparison comparison{record, {}, {}, 0, 0, ""};
    std::set<std::string> timed, timed_here;                   // in any campaign, and in that of the record
    std::map<std::string, std::string> missing, missing_here;  // reasons, by implementation
    const auto same_work = peers.find(work_key(record, kind_of_device(record)));
    for (const Record* peer : same_work == peers.end() ? std::vector<const Record*>() : same_work->second) {
      if (!options.any_gpu && peer->gpu != record.gpu && !peer->gpu.empty() && !record.gpu.empty()) {
        ++counts.other_gpu;
        continue;
      }
      const bool here = peer->campaign == record.campaign;
      if (!peer->missing.empty()) {
        const std::string reason = peer->implementation + ": " + peer->missing;
        missing[peer->implementation] = reason;
        if (here) missing_here[peer->implementation] = reason;
        continue;
      }
      timed.insert(peer->implementation);
      if (!comparison.ever || peer->ms.p50 < comparison.ever->ms.p50) comparison.ever = *peer;
      if (!here) continue;
      timed_here.insert(peer->implementation);
      if (!comparison.b || peer->ms.p50 < comparison.b->ms.p50) comparison.b = *peer;
    }
    for (const auto& [implementation, reason] : missing_here)
      if (!timed_here.contains(implementation)) comparison.missing = reason, comparison.b.reset();
    for (const auto& [implementation, reason] : missing)
      if (!timed.contains(implementation))
        comparison.missing = reason, comparison.b.reset(), comparison.ever.reset();
    if (!comparison.ever && comparison.missing.empty()) {
      ++counts.without_peer;
      counts.other_device +=
          peers.contains(work_key(record, kind_of_device(record) == "cpu" ? "cuda" : "cpu"));
      continue;
    }
    if (comparison.b) comparison.ratio = comparison.b->ms.p50 / record.ms.p50;
    if (comparison.ever) comparison.ratio_ever = comparison.ever->ms.p50 / record.ms.p50;
    comparisons.push_back(std::move(comparison));
  }
  if (left_out) *left_out = counts;
  return comparisons;
}

std::string differences(const Record& a, const Record& b) {
  std::string text;
  for (const auto& [what, how] : a.does)
    if (const auto found = b.does.find(what); found != b.does.end() && found->second != how)
      text += fmt::format("{}{}: {} / {}", text.empty() ? "" : "; ", what, how, found->second);
  return text;
}

std::string percent(double share) {
  return share > 0 ? fmt::format("{:.0f}", share * 100) : "-";
}

std::string implementation(const Record& record) {
  return record.variant.empty() ? record.implementation
                                : record.implementation + " variant " + record.variant;
}

double copy_share(const Record& record) {
  return record.copy_gbs > 0 ? record.gbs() / record.copy_gbs : 0;
}

double peak_share(const Record& record) {
  // Dense GEMMs, TFLOP/s: NVIDIA H100 Tensor Core GPU data sheet, SXM; the H200 is the same chip.
  if (record.gpu.find("H100") == std::string::npos && record.gpu.find("H200") == std::string::npos) return 0;
  if (record.dtype == "bf16" || record.dtype == "f16") return record.tflops() / 989;
  if (record.dtype == "tf32") return record.tflops() / 494.7;
  return record.dtype == "f32" ? record.tflops() / 67 : 0;
}

std::vector<std::vector<std::string>> comparison_rows(const std::vector<Comparison>& comparisons) {
  const auto shown = [&](auto&& holds) {
    return std::ranges::any_of(comparisons, [&](const Comparison& c) { return !of_sweep(c) && holds(c); });
  };
  const bool memory =
      shown([](const Comparison& c) { return c.a.live_bytes > 0 || (c.b && c.b->live_bytes > 0); });
  const bool ever = shown([](const Comparison& c) { return c.ratio_ever != c.ratio; });
  const bool differ = shown([](const Comparison& c) { return c.ever && !differences(c.a, *c.ever).empty(); });
  const auto ms = [](const std::optional<Record>& r) { return r ? fmt::format("{:.4g}", r->ms.p50) : "-"; };
  const auto ratio = [](double value) { return value > 0 ? fmt::format("{:.2f}x", value) : "-"; };
  const auto gib = [](double bytes) {
    return bytes > 0 ? fmt::format("{:.2f}", bytes / double(1 << 30)) : std::string("-");
  };
  std::vector<std::vector<std::string>> rows{
      {"op", "shape", "dtype", "mode", "A", "B (its fastest)", "A ms", "B ms", "B/A"}};
  if (ever) rows[0].insert(rows[0].end(), {"B ms ever", "ever/A"});
  rows[0].insert(rows[0].end(), {"% copy", "% peak"});
  if (memory) rows[0].insert(rows[0].end(), {"A GiB", "B GiB", "A held", "B held"});
  if (differ) rows[0].push_back("differences A / B");
  for (const Comparison& c : comparisons) {
    if (of_sweep(c)) continue;
    const std::optional<Record>& b = c.b ? c.b : c.ever;
    std::vector<std::string> row{c.a.op,
                                 shape_text(c.a),
                                 c.a.dtype,
                                 c.a.mode,
                                 implementation(c.a),
                                 c.missing.empty() ? implementation(*b) : "missing: " + c.missing,
                                 fmt::format("{:.4g}", c.a.ms.p50),
                                 ms(c.b),
                                 ratio(c.ratio)};
    if (ever) row.insert(row.end(), {ms(c.ever), ratio(c.ratio_ever)});
    row.insert(row.end(), {percent(copy_share(c.a)), percent(peak_share(c.a))});
    if (memory)
      row.insert(row.end(), {gib(c.a.live_bytes), gib(b ? b->live_bytes : 0), gib(c.a.peak_bytes),
                             gib(b ? b->peak_bytes : 0)});
    if (differ) row.push_back(b ? differences(c.a, *b) : "");
    rows.push_back(std::move(row));
  }
  return rows;
}

std::string format_comparison(const std::vector<Comparison>& comparisons) {
  const auto rows = comparison_rows(comparisons);
  return rows.size() > 1 ? format_rows(rows, 6) : "";
}

std::string format_sweep(const std::vector<Comparison>& comparisons, size_t worst) {
  std::map<std::pair<std::string, std::string>, std::vector<double>> ratios;  // of (operator, mode)
  std::vector<const Comparison*> slow;
  for (const Comparison& c : comparisons) {
    if (!of_sweep(c) || !c.b) continue;
    ratios[{c.a.op, c.a.mode}].push_back(c.ratio);
    if (c.ratio * kSlow < 1) slow.push_back(&c);
  }
  if (ratios.empty()) return "";
  std::vector<std::vector<std::string>> rows{
      {"sweep", "mode", "problems", fmt::format("slower than {}x", kSlow), "median B/A", "least B/A"}};
  for (const auto& [work, values] : ratios)
    rows.push_back({work.first, work.second, std::to_string(values.size()),
                    std::to_string(std::ranges::count_if(values, [](double r) { return r * kSlow < 1; })),
                    fmt::format("{:.2f}x", eval::median(values)),
                    fmt::format("{:.2f}x", *std::ranges::min_element(values))});
  std::string text = format_rows(rows, 2);
  if (slow.empty()) return text;
  std::ranges::sort(slow, {}, &Comparison::ratio);
  text +=
      fmt::format("\nthe slowest next to their peers, {} of {}\n", std::min(worst, slow.size()), slow.size());
  rows = {{"op", "shape", "dtype", "mode", "B (its fastest)", "A ms", "B ms", "B/A"}};
  for (size_t i = 0; i < std::min(worst, slow.size()); ++i) {
    const Comparison& c = *slow[i];
    rows.push_back({c.a.op, shape_text(c.a), c.a.dtype, c.a.mode, c.b->implementation,
                    fmt::format("{:.4g}", c.a.ms.p50), fmt::format("{:.4g}", c.b->ms.p50),
                    fmt::format("{:.2f}x", c.ratio)});
  }
  return text + format_rows(rows, 5);
}

std::string format_wrong(const std::vector<Record>& records) {
  std::string text;
  for (const Record& r : records)
    if (r.sweep.number >= 0 && r.sweep.verdict != "ok")
      text += fmt::format("WRONG {} {} {} {} (problem {}): {}\n", r.op, shape_text(r), r.dtype, r.mode,
                          r.sweep.number, r.sweep.verdict);
  return text;
}

}  // namespace tessera::bench
