#include "bench/record.h"

#include <fmt/format.h>

#include <dlfcn.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "io/file.h"
#include "io/utf8.h"
#include "runtime/error.h"

namespace tessera::bench {

using nlohmann::json;

namespace {

/// Of the GPU's driver, "580.159.04", as NVML states it; "" where there is none. NVML comes with the driver,
/// so that it cannot be linked.
std::string driver_version() {
  void* nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!nvml) return "";
  const auto init = reinterpret_cast<int (*)()>(dlsym(nvml, "nvmlInit_v2"));
  const auto version = reinterpret_cast<int (*)(char*, unsigned)>(dlsym(nvml, "nvmlSystemGetDriverVersion"));
  char text[96] = {};
  return init && version && init() == 0 && version(text, sizeof text) == 0 ? text : "";
}

}  // namespace

void stamp(std::vector<Record>& records) {
  static const std::string driver = driver_version();
  const char* const campaign = std::getenv("TESSERA_CAMPAIGN");
  for (Record& record : records) {
    if (record.driver.empty() && record.device.starts_with("cuda")) record.driver = driver;
    if (record.campaign.empty() && campaign) record.campaign = campaign;
  }
}

json to_json(const Record& r) {
  json out = {{"op", r.op},
              {"shape", r.shape},
              {"dtype", r.dtype},
              {"device", r.device},
              {"gpu", r.gpu},
              {"mode", r.mode},
              {"implementation", r.implementation},
              {"variant", r.variant},
              {"ms", {{"p10", r.ms.p10}, {"p50", r.ms.p50}, {"p90", r.ms.p90}, {"repeats", r.ms.repeats}}},
              {"flops", r.flops},
              {"bytes", r.bytes},
              {"tflops", r.tflops()},
              {"gbs", r.gbs()},
              {"ceiling_share", r.ceiling_share},
              {"copy_gbs", r.copy_gbs},
              {"deterministic", r.deterministic},
              {"build", r.build},
              {"time", r.time}};
  if (r.peak_bytes > 0) out["peak_bytes"] = r.peak_bytes;
  if (r.live_bytes > 0) out["live_bytes"] = r.live_bytes;
  if (r.planned_bytes > 0) out["planned_bytes"] = r.planned_bytes;
  if (r.tokens_per_s > 0) out["tokens_per_s"] = r.tokens_per_s;
  if (r.ranks.alone_ms > 0) {
    out["ranks"] = {
        {"alone_ms", r.ranks.alone_ms}, {"efficiency", r.efficiency()}, {"slowest", r.ranks.slowest}};
    if (r.ranks.exposed_ms >= 0) out["ranks"]["exposed_communication_ms"] = r.ranks.exposed_ms;
  }
  if (r.host_us > 0) out["host_us"] = r.host_us;
  if (r.layer_us > 0) out["layer_us"] = r.layer_us;
  if (!r.attrs.empty()) out["attrs"] = r.attrs;
  if (!r.does.empty()) out["does"] = r.does;
  if (!r.driver.empty()) out["driver"] = r.driver;
  if (!r.campaign.empty()) out["campaign"] = r.campaign;
  if (!r.missing.empty()) {
    out.erase("ms");
    out["missing"] = r.missing;
    out["required"] = r.required;
  }
  for (const Matmul& one : r.matmuls)
    out["matmuls"].push_back({{"layer", one.layer},
                              {"format", one.format},
                              {"variant", one.variant},
                              {"bytes", one.bytes},
                              {"dense_bytes", one.dense_bytes},
                              {"weight_sparsity", one.weight_sparsity},
                              {"activation_sparsity", one.activation_sparsity}});
  if (r.sweep.number >= 0)
    out["sweep"] = {{"number", r.sweep.number},
                    {"checked", r.sweep.checked},
                    {"worst", r.sweep.worst},
                    {"verdict", r.sweep.verdict}};
  return out;
}

Record from_json(const json& in) {
  check(in.is_object(), "benchmark record: expected an object");
  Record r;
  try {
    r.op = in.at("op").get<std::string>();
    const json& shape = in.at("shape");
    check(shape.is_object(), "benchmark record: \"shape\" is an ", shape.type_name(), ", not an object");
    for (const auto& [name, size] : shape.items()) {
      check(size.is_number_integer(), "benchmark record: size \"", name, "\" is ", size.dump(),
            ", not a whole number");
      r.shape[name] = size.get<int64_t>();
    }
    r.dtype = in.at("dtype").get<std::string>();
    r.mode = in.at("mode").get<std::string>();
    r.implementation = in.at("implementation").get<std::string>();
    r.missing = in.value("missing", "");
    r.required = in.value("required", false);
    if (r.missing.empty()) {
      const json& ms = in.at("ms");
      r.ms = {ms.at("p10").get<double>(), ms.at("p50").get<double>(), ms.at("p90").get<double>(),
              ms.value("repeats", 0)};
    }
    r.device = in.value("device", "");
    r.gpu = in.value("gpu", in.value("card", ""));
    r.driver = in.value("driver", "");
    r.campaign = in.value("campaign", "");
    r.variant = in.value("variant", in.value("row", ""));
    r.flops = in.value("flops", 0.0);
    r.bytes = in.value("bytes", 0.0);
    r.ceiling_share = in.value("ceiling_share", 0.0);
    r.copy_gbs = in.value("copy_gbs", 0.0);
    r.deterministic = in.value("deterministic", false);
    r.peak_bytes = in.value("peak_bytes", 0.0);
    r.live_bytes = in.value("live_bytes", 0.0);
    r.planned_bytes = in.value("planned_bytes", 0.0);
    r.tokens_per_s = in.value("tokens_per_s", 0.0);
    if (in.contains("ranks")) {
      const json& ranks = in.at("ranks");
      r.ranks = {ranks.at("alone_ms").get<double>(), ranks.value("exposed_communication_ms", -1.0),
                 ranks.value("slowest", "")};
    }
    r.host_us = in.value("host_us", 0.0);
    r.layer_us = in.value("layer_us", 0.0);
    r.attrs = in.value("attrs", std::map<std::string, std::string>());
    r.does = in.value("does", std::map<std::string, std::string>());
    for (const json& one : in.value("matmuls", json::array()))
      r.matmuls.push_back({one.at("layer").get<std::string>(), one.at("format").get<std::string>(),
                           one.at("variant").get<std::string>(), one.at("bytes").get<double>(),
                           one.at("dense_bytes").get<double>(), one.at("weight_sparsity").get<double>(),
                           one.at("activation_sparsity").get<double>()});
    if (in.contains("sweep")) {
      const json& sweep = in.at("sweep");
      r.sweep = {sweep.at("number").get<int64_t>(), sweep.value("checked", ""), sweep.value("worst", 0.0),
                 sweep.at("verdict").get<std::string>()};
    }
    r.build = in.value("build", "");
    r.time = in.value("time", "");
  } catch (const json::exception& error) {
    const std::string text = error.what();  // "[json.exception.out_of_range.403] key 'op' not found"
    const size_t end = text.find("] ");
    fail_at(Site::here(), "benchmark record: ", end == std::string::npos ? text : text.substr(end + 2));
  }
  const bool threw = r.sweep.number >= 0 && r.sweep.verdict != "ok";
  check(r.ms.p50 > 0 || threw || !r.missing.empty(), "benchmark record of ", r.op,
        ": ms.p50 must be positive");
  return r;
}

void append_records(const std::filesystem::path& path, const std::vector<Record>& records) {
  // A writer that was killed may have left half a line: what follows must not become part of it.
  std::ifstream old(path, std::ios::ate);
  const bool torn = old && old.tellg() > 0 && old.seekg(-1, std::ios::end) && old.peek() != '\n';
  std::string text = torn ? "\n" : "";
  for (const Record& record : records) text += io::json_text(to_json(record)) + "\n";
  errno = 0;
  std::ofstream out(path, std::ios::app);
  out << text << std::flush;
  check(bool(out), path.string(),
        ": cannot write benchmark records: ", errno != 0 ? std::strerror(errno) : "not all could be written");
}

std::vector<Record> read_records(const std::filesystem::path& path) {
  std::istringstream lines(io::read_file(path.string(), uint64_t(1) << 30));
  std::vector<Record> records;
  int number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    const json parsed = json::parse(line, nullptr, false);
    check(!parsed.is_discarded(), path.string(), ":", number, ": not a line of JSON");
    try {
      records.push_back(from_json(parsed));
    } catch (const Error& error) {
      fail_at(Site::here(), path.string(), ":", number, ": ", error.what());
    }
  }
  check(!records.empty(), path.string(), ": it holds no benchmark records");
  return records;
}

std::string shape_text(const Record& r) {
  std::string text;
  for (const auto& [name, size] : r.shape)  // a size of 0 is one that the work does not have
    if (size != 0) text += fmt::format("{}{}={}", text.empty() ? "" : ",", name, size);
  for (const auto& [name, value] : r.attrs) text += fmt::format(" {}={}", name, value);
  return text;
}

std::string work_text(const Record& r) {
  return fmt::format("{} {} {} {}", r.op, shape_text(r), r.dtype, r.mode);
}

namespace {

void widen(std::vector<size_t>& widths, const std::vector<std::string>& row) {
  widths.resize(std::max(widths.size(), row.size()));
  for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
}

std::string line_of(const std::vector<std::string>& row, const std::vector<size_t>& widths,
                    size_t left_columns) {
  std::string line;
  for (size_t i = 0; i < row.size(); ++i)
    line += i < left_columns ? fmt::format("{:<{}}  ", row[i], widths[i])
                             : fmt::format("{:>{}}  ", row[i], widths[i]);
  line.erase(line.find_last_not_of(' ') + 1);
  return line + "\n";
}

std::vector<std::string> header() {
  return {"op",     "shape", "dtype", "mode",    "implementation", "variant",
          "ms p50", "p10",   "p90",   "TFLOP/s", "GB/s",           "% ceiling"};
}
constexpr size_t kLeft = 6, kTime = 9;  // columns of text; the widest time: "1.234e-05"

std::vector<std::string> cells_of(const Record& r) {
  return {r.op,
          shape_text(r),
          r.dtype,
          r.mode,
          r.implementation,
          r.variant,
          fmt::format("{:.4g}", r.ms.p50),
          fmt::format("{:.4g}", r.ms.p10),
          fmt::format("{:.4g}", r.ms.p90),
          fmt::format("{:.1f}", r.tflops()),
          fmt::format("{:.0f}", r.gbs()),
          r.ceiling_share > 0 ? fmt::format("{:.0f}", r.ceiling_share * 100) : "-"};
}

}  // namespace

std::string format_rows(const std::vector<std::vector<std::string>>& rows, size_t left_columns) {
  std::vector<size_t> widths;
  for (const auto& row : rows) widen(widths, row);
  std::string text;
  for (const auto& row : rows) text += line_of(row, widths, left_columns);
  return text;
}

RecordTable::RecordTable(const std::vector<Record>& expected) {
  widen(widths_, header());
  for (size_t i = kLeft; i < kLeft + 3; ++i) widths_[i] = kTime;
  for (const Record& record : expected) widen(widths_, cells_of(record));
}

std::string RecordTable::row(const Record& r) {
  const std::vector<std::string> cells = cells_of(r);
  widen(widths_, cells);
  std::string text = begun_ ? "" : line_of(header(), widths_, kLeft);
  begun_ = true;
  text += line_of(cells, widths_, kLeft);
  if (r.ranks.alone_ms > 0)
    text += fmt::format(
        "{} {}: {:.1f} % of one rank's {:.4g} ms{}; slowest: {}; {:.4g} tokens/s\n", r.op, r.implementation,
        r.efficiency() * 100, r.ranks.alone_ms,
        r.ranks.exposed_ms < 0 ? "" : fmt::format(", {:.3g} ms of communication exposed", r.ranks.exposed_ms),
        r.ranks.slowest, r.tokens_per_s);
  return text;
}

}  // namespace tessera::bench
