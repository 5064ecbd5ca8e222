#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/doctor_links.h"
#include "io/events.h"
#include "io/tokenizer/tokenizer.h"
#include "io/torch_file.h"
#include "ops/gemm/sgemm_internal.h"
#include "ops/op.h"
#include "report/facts.h"
#include "report/image.h"
#include "report/run_table.h"
#include "runtime/allocator.h"
#include "runtime/has_cuda.h"
#include "runtime/text.h"

namespace tessera::cli {
namespace {

struct Part {
  std::string name, value, cost;  // cost: what is lost and what installs it, if it is missing
  bool present;
};

std::vector<Part> parts() {
  std::vector<Part> found;
  found.push_back({"version", fmt::format("{} ({})", report::kVersion, report::kRevision), "", true});
  found.push_back({"compiler", fmt::format("{} {}", report::kCompiler, report::kCpuFlags), "", true});
  found.push_back({"CUDA toolkit", kCuda ? report::kCudaVersion : "none",
                   kCuda ? "" : "no GPU kernels: install a CUDA toolkit (12.8 or newer) and build again",
                   kCuda});
  const int gpus = Device::cuda_count();
  if (kCuda && gpus == 0)
    found.push_back({"GPU", "none", "no usable GPU or driver on this machine: CPU only", false});
  for (int i = 0; i < gpus; ++i) {
    const DeviceInfo info = Device::gpu_info(i);
    found.push_back(
        {"cuda:" + std::to_string(i),
         fmt::format("{}, sm_{}{}, {} SMs, {}, L2 {}", info.name, info.major, info.minor,
                     info.multiprocessors, format_bytes(info.memory_bytes), format_bytes(info.l2_bytes)),
         "", true});
  }
  const Device host = Device::cpu();
  const DeviceInfo& cpu = host.info();
  found.push_back(
      {"CPU", fmt::format("{} threads, {}", cpu.multiprocessors, format_bytes(cpu.memory_bytes)), "", true});
  found.push_back({"BLAS", fmt::format("{}, kernels for {}", report::kBlas, ops::blas_kernels()), "", true});
  const auto optional = [&](const char* name, bool present, const char* cost) {
    found.push_back({name, present ? "yes" : "no", present ? "" : cost, present});
  };
  optional("SQLite", report::has_database(), "no runs.sqlite: install libsqlite3-dev and build again");
  optional("libpng", report::has_png(), "no pictures in reports: install libpng-dev and build again");
  optional("TensorBoard files", io::EventWriter::available(),
           "no events.* files: install libprotobuf-dev and protobuf-compiler and build again");
  const io::TokenizerLibraries tokenizers = io::tokenizer_libraries();
  optional("PCRE2", tokenizers.pcre2, "no tokenizers with patterns: install libpcre2-dev and build again");
  optional("utf8proc", tokenizers.utf8proc, "no tokenizers of BERT: install libutf8proc-dev and build again");
  optional("SentencePiece", tokenizers.sentencepiece,
           "no tokenizers from .model files: install libsentencepiece-dev and build again");
  optional("libzip", io::has_torch_files(),
           "no weights of torch.save (.bin, .pt), no .npz: install libzip-dev and build again");
  const bool charts = *report::kChartJs;
  found.push_back(
      {"Chart.js", charts ? "inlined" : "no",
       charts ? "" : "reports show tables instead of charts: install libjs-chart.js and build again",
       charts});
  found.push_back({"operators", std::to_string(ops::all_ops().size()), "", true});
  return found;
}

}  // namespace

void add_doctor(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand(
      "doctor", "Show the build, GPUs and libraries, what is missing and how to install it");
  auto json = std::make_shared<bool>(false), links = std::make_shared<bool>(false);
  command->add_flag("--json", *json, "Print the result as JSON");
  command->add_flag("--links", *links,
                    "Check what several ranks need: measured links between GPUs, NCCL, limits, variables");
  command->footer("Example: tessera launch -n 2 -- doctor --links");
  command->callback([&action, json, links] {
    action = [json, links] {
      const nlohmann::json measured = *links ? links_json() : nlohmann::json();
      if (*links && measured.is_null()) return 0;  // rank 0 says it
      if (*links && !*json) {
        fmt::print("{}", links_text(measured));
        return 0;
      }
      const std::vector<Part> found = parts();
      if (*json) {
        nlohmann::json out = report::build_facts();
        if (*links) out["links"] = measured;
        for (const Part& part : found)
          out["parts"].push_back(
              {{"name", part.name}, {"value", part.value}, {"present", part.present}, {"lost", part.cost}});
        fmt::print("{}\n", out.dump(2));
        return 0;
      }
      for (const Part& part : found) {
        fmt::print("{} {:<20} {}\n", part.present ? "[ok]" : "[--]", part.name, part.value);
        if (!part.present) fmt::print("     {:<20} {}\n", "", part.cost);
      }
      return 0;
    };
  });
}

}  // namespace tessera::cli
