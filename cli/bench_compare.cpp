#include <fmt/format.h>

#include <regex>

#include "bench/compare.h"
#include "cli/bench.h"
#include "report/page.h"
#include "runtime/error.h"

namespace tessera::cli {
namespace {

struct CompareArgs {
  std::string a, b, html, peer;
  bool any_gpu = false;
  size_t worst = 10;
};

void write_page(const CompareArgs& args, const std::vector<bench::Comparison>& comparisons) {
  report::Page page("Benchmark comparison");
  page.paragraph(fmt::format("A: {}. B: {}, its fastest implementation of each work.", args.a, args.b));
  std::vector<std::string> labels;
  std::vector<double> ratios;
  for (const auto& c : comparisons) {
    if (c.a.sweep.number >= 0) continue;
    labels.push_back(fmt::format("{} {} {} {}", c.a.op, bench::shape_text(c.a), c.a.dtype, c.a.mode));
    ratios.push_back(c.ratio > 0 ? c.ratio : c.ratio_ever);
  }
  auto rows = bench::comparison_rows(comparisons);
  if (rows.size() > 1) {
    page.bars("Speed of A relative to B (above 1: A is faster)", "B ms / A ms", labels, {{"B/A", ratios}});
    page.heading("Measurements");
    const std::vector<std::string> head = rows.front();
    rows.erase(rows.begin());
    page.table(head, rows);
  }
  std::map<std::string, report::Series> sweeps;  // of each operator and mode
  for (const auto& c : comparisons) {
    if (c.a.sweep.number < 0 || !c.b) continue;
    report::Series& series = sweeps[c.a.op + " " + c.a.mode];
    series.points.emplace_back(c.b->ms.p50, c.ratio);
  }
  for (auto& [name, series] : sweeps) {
    series.name = name;
    std::ranges::sort(series.points);
    page.chart("Sweep: " + name, "B ms", "B ms / A ms", {series}, true);
  }
  page.write(args.html);
  fmt::print("{}\n", args.html);
}

int bench_compare(const CompareArgs& args) {
  try {
    std::regex pattern(args.peer);
  } catch (const std::regex_error&) {
    throw UsageError("--peer: \"" + args.peer + "\" is not a regular expression");
  }
  if (!args.html.empty()) {
    check_replaceable(args.html);
    check_not_input(args.html, {args.a, args.b});
  }
  bench::LeftOut left_out;
  const auto ours = bench::read_records(args.a);
  const auto comparisons = bench::compare(ours, bench::read_records(args.b),
                                          {.peer = args.peer, .any_gpu = args.any_gpu}, &left_out);
  check(!comparisons.empty(), "bench compare: ", args.a, " and ", args.b,
        " measure no common work (operator, shape, attributes, dtype, mode)",
        args.peer.empty() ? "" : " by an implementation named \"" + args.peer + "\"",
        left_out.other_gpu > 0      ? " on the same GPU model; --any-gpu compares across models"
        : left_out.other_device > 0 ? " on the same kind of device: one is of a CPU, the other of a GPU"
                                    : "");
  fmt::print("{}{}", bench::format_comparison(comparisons), bench::format_sweep(comparisons, args.worst));
  if (left_out.without_peer > 0)
    fmt::print("{} measurements of {} have no peer in {}\n", left_out.without_peer, args.a, args.b);
  if (left_out.other_gpu > 0)
    fmt::print("{} measurements of {} are of another GPU model and do not count; --any-gpu includes them\n",
               left_out.other_gpu, args.b);
  const std::string wrong = bench::format_wrong(ours);
  fmt::print("{}", wrong);
  if (!args.html.empty()) write_page(args, comparisons);
  return wrong.empty() ? 0 : 1;
}

}  // namespace

void add_bench_compare(CLI::App& bench, Action& action) {
  auto* command = bench.add_subcommand(
      "compare", "Compare two sets of records, with ratios within one run and to the fastest record");
  auto args = std::make_shared<CompareArgs>();
  command->add_option("A", args->a, "Records (JSON lines)")->required();
  command->add_option("B", args->b, "Records of the peer")->required();
  command->add_option("--peer", args->peer,
                      "Only implementations of B whose name matches this regular expression, such as eager$");
  command->add_flag("--any-gpu", args->any_gpu, "Also compare records of different GPU models");
  command->add_option("--worst", args->worst, "Number of slow shapes of a sweep to name")
      ->check(kDecimal)
      ->check(CLI::Range(1, 1 << 30));
  command->add_option("--html", args->html, "Also write an HTML page with charts");
  command->footer("Exit with status 1 if a sweep in A has wrong results");
  command->callback([&action, args] { action = [args] { return bench_compare(*args); }; });
}

}  // namespace tessera::cli
