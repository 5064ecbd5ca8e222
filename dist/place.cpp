#include "dist/place.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "runtime/error.h"

namespace tessera::dist {
namespace {

constexpr int kTorchPort = 29500;  // of PyTorch, where MASTER_PORT is not set
constexpr int kMostRanks = 1 << 20;

/// The environment, with messages that name its variables.
class Variables {
 public:
  explicit Variables(const Environment& environment) : environment_(environment) {}

  std::string text(const char* name) const {
    const char* const value = environment_(name);
    return value ? value : "";
  }
  bool has(const char* name) const { return !text(name).empty(); }

  std::optional<int> number(const char* name, int least = 0, int most = kMostRanks) const {
    const std::string value = text(name);
    if (value.empty()) return std::nullopt;
    int number = 0;
    const auto [end, code] = std::from_chars(value.data(), value.data() + value.size(), number);
    check(code == std::errc() && end == value.data() + value.size() && number >= least && number <= most,
          name, " is \"", value, "\"; expected a whole number from ", least, " to ", most);
    return number;
  }

 private:
  const Environment& environment_;
};

/// The rank according to one launcher's variables; their names are for messages.
struct LauncherInfo {
  const char* launcher;
  const char *rank_name, *size_name;
  std::optional<int> rank, size, local_rank, local_size;
  const char* local_size_name = "the step's number of tasks";
};

void check_launcher(const LauncherInfo& c) {
  check(c.rank && c.size, c.rank ? c.rank_name : c.size_name, " is set and ",
        c.rank ? c.size_name : c.rank_name, " is not; a rank of a job started by ", c.launcher,
        " has both: set it, or unset the other");
  check(*c.size >= 1 && *c.rank < *c.size, c.rank_name, " is ", *c.rank, " and ", c.size_name, " is ",
        *c.size, "; ranks count from 0 and are less than their number");
  if (c.local_rank && c.local_size)
    check(*c.local_rank < *c.local_size && *c.local_size <= *c.size, c.launcher, ": local rank ",
          *c.local_rank, " of ", *c.local_size, " on this machine, in a job of ", *c.size, " ranks");
}

std::vector<LauncherInfo> launchers_in(const Variables& of) {
  std::vector<LauncherInfo> launchers;
  // WORLD_SIZE without RANK belongs to a Kubernetes Indexed Job, or else is an error.
  if (of.has("RANK") || (of.has("WORLD_SIZE") && !of.has("JOB_COMPLETION_INDEX")))
    launchers.push_back({of.has("TESSERA_JOB") ? "tessera launch" : "torchrun", "RANK", "WORLD_SIZE",
                         of.number("RANK"), of.number("WORLD_SIZE"), of.number("LOCAL_RANK"),
                         of.number("LOCAL_WORLD_SIZE"), "LOCAL_WORLD_SIZE"});
  else if (of.has("WORLD_SIZE"))
    launchers.push_back({"Kubernetes", "JOB_COMPLETION_INDEX", "WORLD_SIZE",
                         of.number("JOB_COMPLETION_INDEX"), of.number("WORLD_SIZE"), 0, 1});
  if (of.has("OMPI_COMM_WORLD_RANK") || of.has("OMPI_COMM_WORLD_SIZE"))
    launchers.push_back({"OpenMPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                         of.number("OMPI_COMM_WORLD_RANK"), of.number("OMPI_COMM_WORLD_SIZE"),
                         of.number("OMPI_COMM_WORLD_LOCAL_RANK"), of.number("OMPI_COMM_WORLD_LOCAL_SIZE"),
                         "OMPI_COMM_WORLD_LOCAL_SIZE"});
  if (of.has("PMI_RANK") || of.has("PMI_SIZE"))
    launchers.push_back({"MPICH", "PMI_RANK", "PMI_SIZE", of.number("PMI_RANK"), of.number("PMI_SIZE"),
                         of.number("MPI_LOCALRANKID"), of.number("MPI_LOCALNRANKS")});
  // A batch script has SLURM_PROCID and SLURM_NTASKS as well, but only a step of srun is a rank.
  if (of.has("SLURM_STEP_NUM_TASKS"))
    launchers.push_back({"Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", of.number("SLURM_PROCID"),
                         of.number("SLURM_STEP_NUM_TASKS"), of.number("SLURM_LOCALID"), std::nullopt});
  for (const LauncherInfo& info : launchers) check_launcher(info);
  return launchers;
}

/// "2(x3),1": tasks of the node with this index.
std::optional<int> tasks_of_node(const std::string& list, int node) {
  size_t at = 0;
  while (at < list.size()) {
    const size_t end = std::min(list.find(',', at), list.size());
    const std::string part = list.substr(at, end - at);
    const int tasks = std::atoi(part.c_str());
    const size_t times = part.find("(x");
    const int nodes = times == std::string::npos ? 1 : std::atoi(part.c_str() + times + 2);
    if (node < nodes) return tasks;
    node -= nodes;
    at = end + 1;
  }
  return std::nullopt;
}

/// "node[01-04,07],other" to "node01".
std::string first_host(const std::string& list) {
  const size_t end = list.find_first_of(",[");
  std::string host = list.substr(0, end);
  if (end != std::string::npos && list[end] == '[')
    host += list.substr(end + 1, list.find_first_of(",-]", end) - end - 1);
  return host;
}

/// A port for a job by its name, above those that systems hand out to services.
int port_by(const std::string& job) {
  uint32_t h = 2166136261u;
  for (const char c : job) h = (h ^ uint8_t(c)) * 16777619u;
  return 20000 + int(h % 12000);
}

void set_rendezvous_address(Place& place, const Variables& of, const LauncherInfo& info) {
  const std::string slurm_job = of.text("SLURM_JOB_ID") + "." + of.text("SLURM_STEP_ID");
  const bool by_slurm = std::strcmp(info.launcher, "Slurm") == 0;
  for (const char* name : {"TESSERA_JOB", "TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"})
    if (place.token.empty()) place.token = of.text(name);
  if (place.token.empty() && of.has("SLURM_JOB_ID")) place.token = slurm_job;
  // All ranks of one machine have the same parent process: mpirun, or its daemon.
  if (place.token.empty() && place.local_size == place.size) {
    const std::string parent = std::to_string(::getppid());
    place.token = "parent " + parent;
    place.origin =
        "no launcher names the job, so ranks must be started by one process, and rank 0 was by that of pid " +
        parent +
        "; where each has a parent of its own (sh, timeout), set TESSERA_JOB to the same text on all ranks";
  }

  place.host = of.text("MASTER_ADDR");
  if (place.host.empty() && place.local_size == place.size) place.host = "127.0.0.1";
  if (place.host.empty() && by_slurm)
    place.host = first_host(of.has("SLURM_STEP_NODELIST") ? of.text("SLURM_STEP_NODELIST")
                                                          : of.text("SLURM_JOB_NODELIST"));
  check(!place.host.empty() || place.size == 1, info.launcher, ": the job has ", place.size, " ranks, ",
        place.local_size,
        " of them on this machine, and MASTER_ADDR is not set: where is rank 0? Set it to the "
        "name of rank 0's machine on all ranks (mpirun -x MASTER_ADDR=...)");
  const bool torch = std::strcmp(info.launcher, "torchrun") == 0;
  place.port = of.number("MASTER_PORT", 1, 65535).value_or(torch ? kTorchPort : port_by(place.token));
  // The agent of torchrun has its own key-value store on that port.
  if (of.text("TORCHELASTIC_USE_AGENT_STORE") == "True") place.port += 1;
  if (place.rank == 0) place.listener = of.number("TESSERA_LISTENER", 3, 1 << 20).value_or(-1);
}

}  // namespace

Place place_of(const Environment& environment) {
  const Variables of(environment);
  const std::vector<LauncherInfo> launchers = launchers_in(of);
  if (launchers.empty()) return {};
  const LauncherInfo& first = launchers.front();
  for (const LauncherInfo& other : launchers)
    check(other.size != first.size || other.rank == first.rank, first.rank_name, " is ", *first.rank, " and ",
          other.rank_name, " is ", *other.rank, ", in jobs of ", *first.size,
          " ranks each: which is this process? Unset those of the launcher that did not start it");
  Place place;
  place.started_by = first.launcher;
  place.rank = *first.rank, place.size = *first.size;
  place.local_rank = first.local_rank.value_or(0);
  place.local_size = first.local_size.value_or(1);
  if (place.started_by == "Slurm")
    place.local_size =
        tasks_of_node(of.has("SLURM_STEP_TASKS_PER_NODE") ? of.text("SLURM_STEP_TASKS_PER_NODE")
                                                          : of.text("SLURM_TASKS_PER_NODE"),
                      of.number("SLURM_NODEID").value_or(0))
            .value_or(std::max(1, place.local_rank + 1));
  if (!first.local_size && place.started_by == "MPICH") place.local_size = place.size;
  check(first.local_size || place.local_rank < place.local_size, first.launcher, ": this is local rank ",
        place.local_rank, ", and ", first.local_size_name,
        ", the number of ranks on this machine, is not set");
  check(place.local_rank < place.local_size, first.launcher, ": local rank ", place.local_rank, " of ",
        place.local_size, " on this machine");
  set_rendezvous_address(place, of, first);
  return place;
}

Place own_place() {
  return place_of([](const char* name) { return std::getenv(name); });
}

Device device_at(const Place& place) {
  const int gpus = Device::cuda_count();
  return gpus == 0 ? Device::cpu() : Device::cuda(gpu_index(place, gpus));
}

int gpu_index(const Place& place, int gpus) {
  return place.local_rank % gpus;
}

void check_own_gpus(const std::vector<std::string>& gpus) {
  for (size_t rank = 1; rank < gpus.size(); ++rank) {
    const auto same = std::find(gpus.begin(), gpus.begin() + int64_t(rank), gpus[rank]);
    check(
        gpus[rank].empty() || same == gpus.begin() + int64_t(rank), "ranks ", same - gpus.begin(), " and ",
        rank, " have the same GPU, ", gpus[rank],
        "; each rank needs one of its own: start as many ranks as there are GPUs, let the launcher show each "
        "rank its own (srun --gpus-per-task=1), or give --device cpu");
  }
}

comm::RendezvousOptions rendezvous_options(const Place& place, const std::string& what) {
  return {.rank = place.rank,
          .size = place.size,
          .host = place.host,
          .port = place.port,
          .listener = place.listener,
          .token = place.token.substr(0, 255),
          .origin = place.origin,
          .what = what};
}

}  // namespace tessera::dist
