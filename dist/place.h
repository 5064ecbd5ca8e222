#pragma once

#include <functional>
#include <string>
#include <vector>

#include "comm/tcp.h"

namespace tessera::dist {

/// This process's rank in its job, and the address of rank 0.
struct Place {
  int rank = 0, size = 1;
  int local_rank = 0, local_size = 1;  // among the ranks of this machine
  std::string host = "127.0.0.1";      // of rank 0
  int port = 0;
  int listener = -1;            // rank 0 of `tessera launch`: a socket that listens there already
  std::string token = {};       // of the job
  std::string origin = {};      // where the token comes from, if no launcher names the job; else ""
  std::string started_by = {};  // "torchrun", "Slurm", ...; "" for a process that was not started as a rank
};

/// A variable's value, or null.
using Environment = std::function<const char*(const char* name)>;

/// Reads the environment that a launcher gave the process. In the order of precedence, and by these
/// variables:
///
///   tessera launch          TESSERA_JOB, and those of torchrun
///   torchrun, PyTorchJob    RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT
///   Kubernetes Indexed Job  JOB_COMPLETION_INDEX, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
///   OpenMPI                 OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
///   MPICH, Intel MPI        PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS
///   Slurm (srun)            SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, SLURM_STEP_NODELIST
///
/// MASTER_ADDR and MASTER_PORT override for every launcher. By default: Slurm's first node, or loopback for
/// ranks of one machine; and a port derived from the job id. TESSERA_JOB names the job, for any launcher; by
/// default it is the launcher's own name for it or, for ranks of one machine, the id of their common parent
/// process. If torchrun's agent occupies MASTER_PORT, the next port is used. Without a launcher: a job of
/// size 1.
///
/// Throws, naming the variables, if one is not a number or out of range, if only some of a launcher's
/// variables are set, if two launchers disagree about the rank in jobs of the same size, or if the address of
/// rank 0 is unknown in a job on several machines.
Place place_of(const Environment& environment);
/// Of this process.
Place own_place();

/// The GPU of this rank if there are GPUs, else the CPU.
Device device_at(const Place& place);
/// Its number among the `gpus` that this process sees: the local rank. Where the machine has more ranks,
/// modulo `gpus`: the launcher may show each rank GPUs of its own (srun --gpus-per-task=1).
int gpu_index(const Place& place, int gpus);
/// Throws if two ranks have the same GPU. `gpus`: comm::gpu_uuid by rank.
void check_own_gpus(const std::vector<std::string>& gpus);

/// Options for comm::connect_tcp. `what`: program and arguments, equal on all ranks.
comm::RendezvousOptions rendezvous_options(const Place& place, const std::string& what);

}  // namespace tessera::dist
