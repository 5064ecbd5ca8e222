#include "cli/doctor_links.h"

#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/statvfs.h>

#include <cstdlib>
#include <nlohmann/json.hpp>

#include "bench/links.h"
#include "bench/record.h"
#include "cli/train_run.h"
#include "comm/nccl.h"
#include "comm/socket.h"
#include "runtime/allocator.h"
#include "runtime/text.h"

extern char** environ;  // NOLINT: POSIX declares it nowhere

namespace tessera::cli {
namespace {

using nlohmann::json;

/// Variables that decide where ranks run and how they reach each other. Those of NCCL by their beginning.
constexpr const char* kVariables[] = {"CUDA_VISIBLE_DEVICES", "TESSERA_COMM_SECONDS", "TESSERA_THREADS",
                                      "OMP_NUM_THREADS", "LD_LIBRARY_PATH"};

json variables() {
  json found = json::object();
  for (const char* const name : kVariables)
    if (const char* const value = std::getenv(name)) found[name] = value;
  for (char** at = environ; *at; ++at) {
    const std::string entry = *at;
    if (entry.starts_with("NCCL_") && entry.find('=') != std::string::npos)
      found[entry.substr(0, entry.find('='))] = entry.substr(entry.find('=') + 1);
  }
  return found;
}

/// null: no limit.
json limit(int resource) {
  rlimit found{};
  if (::getrlimit(__rlimit_resource_t(resource), &found) != 0 || found.rlim_cur == RLIM_INFINITY) return {};
  return uint64_t(found.rlim_cur);
}

json shared_memory() {
  struct statvfs found {};
  if (::statvfs("/dev/shm", &found) != 0) return {};
  return {{"bytes", uint64_t(found.f_blocks) * found.f_frsize},
          {"free", uint64_t(found.f_bavail) * found.f_frsize}};
}

json machine() {
  const bench::MachineLinks links = bench::measure_links();
  json found = {{"gpus", json::array()},
                {"links", json::array()},
                {"shm", shared_memory()},
                {"memlock", limit(RLIMIT_MEMLOCK)},
                {"open_files", limit(RLIMIT_NOFILE)},
                {"nccl", comm::nccl_version()},
                {"nccl_lacks", comm::nccl_lacks()}};
  for (const bench::LinkedGpu& gpu : links.gpus)
    found["gpus"].push_back(
        {{"index", gpu.index}, {"name", gpu.name}, {"bus_id", gpu.bus_id}, {"nvlinks", gpu.nvlinks}});
  for (const bench::GpuLink& link : links.links)
    found["links"].push_back({{"from", link.from},
                              {"to", link.to},
                              {"path", link.path},
                              {"peer", link.peer},
                              {"gbs", link.gbs},
                              {"both_gbs", link.both_gbs},
                              {"latency_us", link.latency_us}});
  return found;
}

std::string bytes_text(const json& bytes) {
  return bytes.is_null() ? "no limit" : format_bytes(bytes.get<size_t>());
}

std::string machine_text(const json& rank) {
  const json& machine = rank.at("machine");
  std::string text = fmt::format("{}:\n", rank.at("host").get<std::string>());
  const auto line = [&](const std::string& name, const std::string& value) {
    text += fmt::format("  {:<18} {}\n", name, value);
  };
  for (const json& gpu : machine.at("gpus")) {
    const int links = gpu.at("nvlinks");
    line(fmt::format("cuda:{}", gpu.at("index").get<int>()),
         fmt::format("{}, {}, {}", gpu.at("name").get<std::string>(), gpu.at("bus_id").get<std::string>(),
                     links < 0 ? "NVLinks unknown (no NVML)" : fmt::format("{} NVLinks active", links)));
  }
  if (machine.at("gpus").empty()) line("GPUs", "none: ranks run on CPU cores and talk by sockets");
  if (machine.at("gpus").size() == 1) line("links", "none: one GPU");
  if (!machine.at("links").empty()) {
    std::vector<std::vector<std::string>> rows = {
        {"  from", "to", "path", "access", "GB/s", "both ways", "us per small copy"}};
    for (const json& link : machine.at("links"))
      rows.push_back({fmt::format("  cuda:{}", link.at("from").get<int>()),
                      fmt::format("cuda:{}", link.at("to").get<int>()), link.at("path").get<std::string>(),
                      link.at("peer").get<bool>() ? "direct" : "through the host",
                      fmt::format("{:.1f}", link.at("gbs").get<double>()),
                      fmt::format("{:.1f}", link.at("both_gbs").get<double>()),
                      fmt::format("{:.2f}", link.at("latency_us").get<double>())});
    text += bench::format_rows(rows, 4);
  }
  const std::string nccl = machine.at("nccl");
  line("NCCL", nccl.empty() ? "not usable: " + machine.at("nccl_lacks").get<std::string>() : nccl);
  const json& shm = machine.at("shm");
  line("/dev/shm", shm.is_null()
                       ? "missing"
                       : fmt::format("{}, {} free", bytes_text(shm.at("bytes")), bytes_text(shm.at("free"))));
  line("locked memory", bytes_text(machine.at("memlock")));
  const json& files = machine.at("open_files");
  line("open files", files.is_null() ? "no limit" : std::to_string(files.get<uint64_t>()));
  return text;
}

}  // namespace

json links_json() {
  const dist::World world = join_job("");
  return world.told([&]() -> json {
    const dist::Place& place = world.place();
    json own = {{"rank", world.rank()}, {"host", comm::host_name()}, {"variables", variables()}};
    if (world.size() > 1) own["device"] = dist::device_at(place).name();
    if (place.local_rank == 0) own["machine"] = machine();
    if (world.size() == 1) return {{"ranks", json::array({own})}, {"multicast", false}};
    const std::vector<std::string> all = world.host().gather_texts(own.dump());
    if (!world.leads()) return {};
    json found = {{"ranks", json::array()}, {"multicast", false}};
    for (const std::string& text : all) found["ranks"].push_back(json::parse(text));
    return found;
  });
}

std::string links_text(const json& links) {
  std::string text;
  for (const json& rank : links.at("ranks"))
    if (rank.contains("machine")) text += machine_text(rank);
  text +=
      "NVLink multicast: off; NCCL_NVLS_ENABLE=0 is set in every rank before NCCL is loaded, and nothing "
      "calls "
      "cuMulticastCreate\n";
  const bool several = links.at("ranks").size() > 1;
  for (const json& rank : links.at("ranks")) {
    text += several ? fmt::format("rank {} on {}, {}:", rank.at("rank").get<int>(),
                                  rank.at("host").get<std::string>(), rank.at("device").get<std::string>())
                    : "variables:";
    for (const auto& [name, value] : rank.at("variables").items())
      text += fmt::format(" {}={}", name, value.get<std::string>());
    text += rank.at("variables").empty() ? " none that matter is set\n" : "\n";
  }
  return text;
}

}  // namespace tessera::cli
