#include "cli/tensor_parallel_flags.h"

#include <fmt/format.h>
#include <unistd.h>

#include "cli/commands.h"
#include "cli/train_run.h"
#include "comm/peer_memory.h"
#include "comm/status.h"
#include "ops/all_reduce_rmsnorm/peer_channels.h"
#include "report/progress.h"

namespace tessera::cli {

void TensorParallelFlags::add_to(CLI::App& command) {
  command
      .add_option("--tensor-parallel", ranks,
                  "Share heads, hidden features and vocabulary of a llama out over this many ranks, as many "
                  "as the launcher has started: tessera launch -n 2 -- ...")
      ->check(whole(1, ops::kMostRanks));
  command
      .add_option(
          "--rank-exchange", exchange,
          "How the shares of a token are summed on GPUs: by kernels that write to each other's "
          "memory (peer), or by the communicator (NCCL); default: peer where the GPUs reach each other")
      ->check(CLI::IsMember({"communicator", "peer"}))
      ->default_str("");
}

dist::World TensorParallelFlags::join(const std::string& command, const std::string& device) const {
  const dist::Place place = dist::own_place();
  if (ranks > 1 && place.size == 1)
    throw UsageError(
        fmt::format("--tensor-parallel {0} needs {0} ranks, each a process that a launcher starts: tessera "
                    "launch -n {0} -- {1} ...",
                    ranks, command));
  if (ranks != place.size)
    throw UsageError(
        fmt::format("{}: {} ranks were started, but --tensor-parallel is {}; both must be the "
                    "same number, since all ranks share one model out",
                    command, place.size, ranks));
  if (ranks == 1 && !exchange.empty())
    throw UsageError("--rank-exchange: of several ranks; give --tensor-parallel as well");
  return ranks == 1 ? dist::World() : join_job(device);
}

namespace {

/// Kernels over peer memory where all ranks of the job can run them: 1.1 times as fast per token as NCCL on
/// two H100 (docs/inference.md). Says on rank 0 why not. All ranks call it.
ops::RankExchange fastest_exchange(const dist::World& world, Device device) {
  if (device.is_cpu()) return ops::RankExchange::communicator;
  const std::string lacks = comm::PeerMemory::lacks(world.host(), device);
  if (lacks.empty()) return ops::RankExchange::peer;
  if (world.leads())
    report::tell(
        fmt::format("tessera: shares are summed by the communicator, not over peer memory: {}\n", lacks));
  return ops::RankExchange::communicator;
}

}  // namespace

nn::TensorParallel TensorParallelFlags::share(const dist::World& world, Device device) const {
  if (world.size() == 1) return {};
  const ops::RankExchange how =
      exchange.empty() ? fastest_exchange(world, device) : ops::parse_rank_exchange(exchange);
  check(how == ops::RankExchange::communicator || device.is_cuda(),
        "--rank-exchange peer: of GPUs; the ranks compute on the CPU");
  return nn::TensorParallel(ops::RankGroup(world.host(), world.data(device), how));
}

void end_at_failure(const dist::World& world, Device device, const std::function<void()>& work) {
  if (world.size() == 1 || device.is_cpu()) return work();
  try {
    world.told(work);
  } catch (const std::exception& error) {
    comm::Status& status = comm::own_status();
    comm::copy_text(status.error, sizeof(status.error), error.what());
    report::tell(fmt::format("tessera: {}\n", error.what()));
    ::_exit(1);
  }
}

void tell_shared(const dist::World& world, Device device) {
  if (world.size() > 1 && world.leads() && device.is_cuda())
    report::tell(
        fmt::format("tessera: a step runs one operator after the other, not as one kernel for all layers: "
                    "they are shared out over {} ranks\n",
                    world.size()));
}

}  // namespace tessera::cli
