#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "bench/timer.h"

namespace tessera::bench {

/// What a sweep says about its problem.
struct SweepNote {
  int64_t number = -1;  // of the random problem; below 0: not of a sweep
  std::string checked;  // against what
  double worst = 0;     // error / tolerance of the worst result
  std::string verdict;  // "ok", or what is wrong; what threw has no times
};

/// A matmul of a step of generation, as it ran and as it was counted on the end of the text that was timed.
struct Matmul {
  std::string layer;    // by its name in transformers: "model.layers.0.mlp.down_proj"
  std::string format;   // "tca-bme"; "dense"
  std::string variant;  // of the kernel
  double bytes = 0, dense_bytes = 0;
  double weight_sparsity = 0;      // share of the weights that are not stored
  double activation_sparsity = 0;  // share of the inputs that the gate left out
};

/// Of a step that several ranks make together: what one of them takes for its own part alone, while all work
/// side by side, and in how much of the step only the communication ran.
struct RankTimes {
  double alone_ms = 0;     // 0: one rank
  double exposed_ms = -1;  // below 0: not known
  std::string slowest;     // "rank 1 on node0 (cuda:1)", whose times these are
};

/// One measurement: a line of JSON, the same from tessera and from bench/peers/*.py.
struct Record {
  std::string op;  // "attention", "step tnp"
  std::map<std::string, int64_t> shape;
  std::string dtype, device, gpu;
  std::string mode;  // "fwd", "bwd", "step"
  std::string implementation =
      "tessera";        // with its variant: "tessera graph", "torch compile cudnn bf16 1408"
  std::string variant;  // of the kernel, if one was forced
  Timing ms;
  double flops = 0, bytes = 0;  // of the real work
  double ceiling_share = 0;     // time at the measured ceilings / time; 0: not known
  double copy_gbs = 0;          // what a large copy reached in the same run; 0: not known
  bool deterministic = true;
  double peak_bytes = 0;     // of a step: what the pools held, caches and rounding included
  double live_bytes = 0;     // of a step: what tensors held at most
  double planned_bytes = 0;  // what `tessera plan` says of live_bytes
  double tokens_per_s = 0;   // of a step, on all ranks together; FLOPs and bytes are those of one rank
  double host_us = 0;        // of a call between ranks: until the host has issued it; 0: not known
  double layer_us = 0;       // of a step of generation: that one more layer takes
  RankTimes ranks;           // of a step of several
  std::map<std::string, std::string> attrs;
  /// How the work is done where sides may differ: {"weights": "bf16, f32 masters"}. Not part of what is
  /// measured, so sides that differ are still compared.
  std::map<std::string, std::string> does;
  std::vector<Matmul> matmuls;  // of a step of generation
  SweepNote sweep;
  std::string build, time;
  std::string driver;     // of the GPU
  std::string campaign;   // runs of one GPU model, driver and PyTorch version that belong together; "": none
  std::string missing;    // why there are no times; "": there are
  bool required = false;  // if missing: without it the work has no peer, what is left of its ways is weaker

  double tflops() const { return ms.p50 > 0 ? flops / ms.p50 / 1e9 : 0; }
  /// Of several ranks: each one's throughput, compared with that of one alone.
  double efficiency() const { return ms.p50 > 0 ? ranks.alone_ms / ms.p50 : 0; }
  double gbs() const { return ms.p50 > 0 ? bytes / ms.p50 / 1e6 : 0; }
};

nlohmann::json to_json(const Record& record);
/// Throws, naming what is missing or of a wrong type.
Record from_json(const nlohmann::json& json);

/// Sets driver and campaign (TESSERA_CAMPAIGN of the environment) of records that have none.
void stamp(std::vector<Record>& records);

/// JSON lines. Reading refuses a malformed line, naming file and line. Appending to a file that ends within a
/// line begins a new one.
void append_records(const std::filesystem::path& path, const std::vector<Record>& records);
std::vector<Record> read_records(const std::filesystem::path& path);

/// A table for a terminal, row by row, so that a row can be printed as soon as it is measured. Columns are as
/// wide as the records that are expected need them (their times do not matter), and widen for a wider row.
class RecordTable {
 public:
  explicit RecordTable(const std::vector<Record>& expected = {});
  /// The record's line, under the header if it is the first, and what a line of a table has no room for.
  std::string row(const Record& record);

 private:
  std::vector<size_t> widths_;
  bool begun_ = false;
};

/// Hears of a benchmark while it runs. A program that prints and writes records as they come keeps those of a
/// benchmark that is interrupted.
struct Listener {
  std::function<void(const std::string& what)> on_begin = {};  // before what takes time
  std::function<void(const Record& record)> on_record = {};    // each one once, in order, complete

  void begin(const std::string& what) const {
    if (on_begin) on_begin(what);
  }
  /// Appends the record to those of the benchmark.
  void add(Record record, std::vector<Record>& records) const {
    records.push_back(std::move(record));
    if (on_record) on_record(records.back());
  }
};

/// The sizes and attributes of the work: "T=11000,in=512 bias=true".
std::string shape_text(const Record& record);
/// Operator, sizes, dtype and mode: "linear T=11000,in=512 bf16 bwd".
std::string work_text(const Record& record);
/// Text in aligned columns, the first `left_columns` of them to the left.
std::string format_rows(const std::vector<std::vector<std::string>>& rows, size_t left_columns);

}  // namespace tessera::bench
