#pragma once

#include <filesystem>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "bench/timer.h"

namespace tessera::bench {

/// One measurement: a line of JSON, the same from tessera and from bench/peers/*.py.
struct Record {
  std::string op;  // "attention", "step tnp"
  std::map<std::string, int64_t> shape;
  std::string dtype, device, card;
  std::string mode;                        // "fwd", "bwd", "step"
  std::string implementation = "tessera";  // with its variant: "tessera graph", "torch compile cudnn 1408"
  std::string row;                         // kernel configuration; "" if there is one
  Timing ms;
  double flops = 0, bytes = 0;  // of the real work
  double ceiling_share = 0;     // time at the measured ceilings / time; 0: not known
  bool deterministic = true;
  double peak_bytes = 0;    // of a step
  double tokens_per_s = 0;  // of a step
  std::map<std::string, std::string> attrs;
  std::string build, time;

  double tflops() const { return ms.p50 > 0 ? flops / ms.p50 / 1e9 : 0; }
  double gbs() const { return ms.p50 > 0 ? bytes / ms.p50 / 1e6 : 0; }
};

nlohmann::json to_json(const Record& record);
/// Throws, naming what is missing or of a wrong type.
Record from_json(const nlohmann::json& json);

/// JSON lines. Reading refuses a malformed line, naming file and line.
void append_records(const std::filesystem::path& path, const std::vector<Record>& records);
std::vector<Record> read_records(const std::filesystem::path& path);

/// The records as an aligned table for a terminal.
std::string format_table(const std::vector<Record>& records);

/// A pair of measurements of the same work: operator, shape, attributes, dtype, mode, kind of device.
struct Comparison {
  Record a, b;       // b: the fastest of B's implementations of that work
  double ratio = 0;  // b.ms.p50 / a.ms.p50: above 1, A is faster
};
/// Every work of A beside B's fastest for it; works of A without a peer are left out, and counted.
std::vector<Comparison> compare(const std::vector<Record>& a, const std::vector<Record>& b,
                                int* without_peer = nullptr);
std::string format_comparison(const std::vector<Comparison>& comparisons);

}  // namespace tessera::bench
