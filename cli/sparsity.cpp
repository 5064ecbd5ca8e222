#include "cli/sparsity.h"

#include <fmt/format.h>

#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>

#include "io/file.h"
#include "io/utf8.h"
#include "report/database.h"
#include "runtime/error.h"
#include "runtime/interrupt.h"
#include "sparsity/pattern_page.h"
#include "sparsity/pattern_pictures.h"
#include "sparsity/pattern_report.h"
#include "sparsity/patterns.h"
#include "sparsity/quality.h"
#include "sparsity/split_sweep.h"
#include "sparsity/sweep_pictures.h"

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;

/// What made the sparsity.sqlite of a folder, and the page that is made of it.
struct ResultKind {
  int32_t id;
  const char *what, *page;
  std::string (*html)(report::Database&);
};
constexpr ResultKind kKinds[] = {
    {sparsity::kPatternsId, sparsity::kPatternsWhat, "sparsity.html", sparsity::page_of},
    {sparsity::kSweepId, sparsity::kSweepWhat, sparsity::kSweepPage, sparsity::sweep_page},
    {sparsity::kQualityId, sparsity::kQualityWhat, sparsity::kQualityPage,
     [](report::Database& database) { return sparsity::quality_html(sparsity::quality_of(database)); }}};

const ResultKind& kind_of(const fs::path& database) {
  const int32_t id = report::application_id_of(database);
  for (const ResultKind& kind : kKinds)
    if (kind.id == id) return kind;
  return kKinds[0];  // opening it says what is wrong
}

report::Database open_result(const std::string& folder) {
  const fs::path path = fs::path(folder) / sparsity::kPatternsFile;
  const ResultKind& kind = kind_of(path);
  return report::Database::read_only(path, kind.id, kind.what);
}

struct QueryArgs {
  std::string result, sql, format = "markdown";
  double seconds = 10;
  int64_t rows = 100'000;
};

int run_query(const QueryArgs& args) {
  report::Database database = open_result(args.result);
  const report::Table rows = database.query(args.sql, args.seconds, args.rows);
  fmt::print("{}", args.format == "csv"    ? report::csv_text(rows)
                   : args.format == "json" ? report::to_json(rows).dump(1) + "\n"
                                           : report::to_markdown(rows));
  return 0;
}

struct ExportArgs {
  std::string result, out, png, pdf;
  sparsity::PictureOptions pictures;
};

void export_tables(report::Database& database, const std::string& out) {
  const report::Table tables =
      database.run("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name");
  io::AtomicFolder folder(out, io::AtomicFolder::Existing::merge);
  for (const auto& row : tables.rows) {
    const auto& name = std::get<std::string>(row[0]);
    const report::Table rows = database.run("SELECT * FROM \"" + name + "\"");
    io::write_file(folder.path() + "/" + name + ".csv", report::csv_text(rows));
    fmt::print("{}.csv: {} rows\n", name, rows.rows.size());
  }
  folder.publish();
}

int run_export(const ExportArgs& args) {
  const bool pictures = !args.png.empty() || !args.pdf.empty();
  const bool choice = args.pictures.feature || !args.pictures.only.empty();
  if (args.out.empty() && !pictures)
    throw UsageError("nothing to export; give --out for tables as CSV, --png or --pdf for pictures, or both");
  if (!pictures && choice) throw UsageError("--feature and --only choose pictures; they need --png or --pdf");
  const InterruptGuard interrupts(kGivingUp);
  const fs::path path = fs::path(args.result) / sparsity::kPatternsFile;
  const ResultKind& kind = kind_of(path);
  const bool sweep = kind.id == sparsity::kSweepId;
  if (pictures && kind.id == sparsity::kQualityId)
    throw UsageError(
        fmt::format("--png, --pdf: {} is {}; pictures are of results of tessera sparsity analyze "
                    "and sweep",
                    io::utf8_text(path.string()), kind.what));
  if (sweep && choice)
    throw UsageError(fmt::format("--feature and --only choose matrices; {} is {}",
                                 io::utf8_text(path.string()), kind.what));
  report::Database database = open_result(args.result);
  if (!args.out.empty()) export_tables(database, args.out);
  for (const auto format : {sparsity::PictureFormat::png, sparsity::PictureFormat::pdf}) {
    const std::string& folder = format == sparsity::PictureFormat::png ? args.png : args.pdf;
    const auto tell = [](const std::string& line) { fmt::print("{}\n", io::utf8_text(line)); };
    sparsity::PictureOptions options = args.pictures;
    options.format = format;
    if (!folder.empty() && sweep) sparsity::export_sweep_pictures(database, folder, format, tell);
    if (!folder.empty() && !sweep) sparsity::export_pictures(database, folder, options, tell);
  }
  return 0;
}

struct PatternReportArgs {
  std::string result, json;
};

int run_pattern_report(const PatternReportArgs& args) {
  const fs::path path = fs::path(args.result) / sparsity::kPatternsFile;
  if (const ResultKind& kind = kind_of(path); kind.id != sparsity::kPatternsId)
    throw UsageError(fmt::format("report: {} is {}; a report is of a result of tessera sparsity analyze",
                                 io::utf8_text(path.string()), kind.what));
  if (!args.json.empty()) check_replaceable(args.json);
  check_not_input(args.json, {path.string()});
  report::Database database = open_result(args.result);
  const std::vector<sparsity::ReportSection> sections = sparsity::report_sections(database);
  nlohmann::ordered_json json;
  for (const sparsity::ReportSection& section : sections)
    json[section.table.name] = report::to_json(section.table);
  if (!args.json.empty()) io::write_file(args.json, io::json_text(json, 1) + "\n");
  fmt::print("{}", sparsity::markdown_of(sections));
  return 0;
}

struct PageArgs {
  std::string result, out;
};

int run_page(const PageArgs& args) {
  const ResultKind& kind = kind_of(fs::path(args.result) / sparsity::kPatternsFile);
  const std::string out = args.out.empty() ? (fs::path(args.result) / kind.page).string() : args.out;
  report::Database database = open_result(args.result);
  check_replaceable(out);
  check_not_input(out, {(fs::path(args.result) / sparsity::kPatternsFile).string()});
  io::write_file(out, kind.html(database));
  fmt::print("{}\n", out);
  return 0;
}

/// A folder; the database in it stands for it.
void add_result(CLI::App& command, std::string& folder) {
  command.add_option("result", folder, "Directory with sparsity.sqlite")
      ->required()
      ->transform([](std::string given) {
        const fs::path path = given;
        std::error_code ignored;
        if (path.filename() != sparsity::kPatternsFile || !fs::is_regular_file(path, ignored)) return given;
        return path.has_parent_path() ? path.parent_path().string() : std::string(".");
      });
}

void add_query(CLI::App& group, Action& action) {
  auto* command = group.add_subcommand("query", "Query sparsity.sqlite with one SELECT (read-only)");
  auto args = std::make_shared<QueryArgs>();
  add_result(*command, args->result);
  command->add_option("sql", args->sql, "The query")->required();
  command
      ->add_option("--format", args->format,
                   "Output; NULL, which SQLite makes of NaN, is an empty cell, in JSON null")
      ->check(CLI::IsMember({"markdown", "csv", "json"}));
  command->add_option("--seconds", args->seconds, "Time limit in seconds")->check(between(0, 86'400));
  command->add_option("--rows", args->rows, "Maximum number of rows")->check(whole(1, int64_t{1} << 40));
  command->footer("Example: tessera sparsity query runs/patterns \"SELECT matrix, sparsity FROM matrices\"");
  command->callback([&action, args] { action = [args] { return run_query(*args); }; });
}

void add_export(CLI::App& group, Action& action) {
  auto* command = group.add_subcommand(
      "export", "Write the tables of sparsity.sqlite as CSV, or pictures of them as PNG or PDF");
  auto args = std::make_shared<ExportArgs>();
  add_result(*command, args->result);
  command->add_option("--out", args->out, "Directory to write every table to, as CSV");
  command->add_option("--png", args->png, "Directory to write pictures of an analysis or a sweep to, as PNG");
  command->add_option("--pdf", args->pdf, "Directory to write the same pictures to, as PDF");
  command
      ->add_option(
          "--only", args->pictures.only,
          "Draw only matrices whose name contains this, such as layers.1. or down_proj; may be repeated")
      ->allow_extra_args(false);
  command
      ->add_option("--feature", args->pictures.feature,
                   "Clustered feature from which Hamming gradients start; default: the reference of the "
                   "clustering")
      ->check(whole(0, int64_t{1} << 31));
  command->footer(
      "examples: tessera sparsity export runs/patterns --out runs/patterns/csv\n          tessera sparsity "
      "export runs/patterns --png runs/patterns/png --only layers.1.");
  command->callback([&action, args] { action = [args] { return run_export(*args); }; });
}

void add_pattern_report(CLI::App& group, Action& action) {
  auto* command = group.add_subcommand(
      "report", "Print the comparative report of an analysis as Markdown: stability, chance, pairs");
  auto args = std::make_shared<PatternReportArgs>();
  add_result(*command, args->result);
  command->add_option("--json", args->json, "Write the figures to this file");
  command->footer("Example: tessera sparsity report runs/patterns --json runs/patterns/report.json");
  command->callback([&action, args] { action = [args] { return run_pattern_report(*args); }; });
}

void add_page(CLI::App& group, Action& action) {
  auto* command = group.add_subcommand("page", "Write one HTML page from sparsity.sqlite");
  auto args = std::make_shared<PageArgs>();
  add_result(*command, args->result);
  command->add_option("--out", args->out,
                      "Page to write; default: sparsity.html in that directory, sweep.html for a sweep, "
                      "quality.html for the quality of models");
  command->footer("Example: tessera sparsity page runs/patterns");
  command->callback([&action, args] { action = [args] { return run_page(*args); }; });
}

}  // namespace

void add_sparsity(CLI::App& app, Action& action) {
  auto* group = app.add_subcommand("sparsity", "Analyze pruned models, splits, activations and gradients");
  group->require_subcommand(1);
  add_sparsity_patterns(*group, action);
  add_query(*group, action);
  add_export(*group, action);
  add_page(*group, action);
  add_pattern_report(*group, action);
  add_sparsity_activations(*group, action);
  add_sparsity_gradients(*group, action);
  add_sparsity_import(*group, action);
  add_sparsity_quality(*group, action);
  add_sparsity_sweep(*group, action);
}

}  // namespace tessera::cli
