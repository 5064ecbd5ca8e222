#pragma once

#include <functional>
#include <string>

#include "comm/tcp.h"

namespace tessera::dist {

/// Which rank of which job this process is, and where rank 0 can be reached.
struct Place {
  int rank = 0, size = 1;
  int local_rank = 0, local_size = 1;  // among the ranks of this machine
  std::string host = "127.0.0.1";      // of rank 0
  int port = 0;
  int listener = -1;       // rank 0 of `tessera launch`: a socket that listens there already
  std::string token;       // of the job
  std::string origin;      // where the token comes from, if no launcher names the job; else ""
  std::string started_by;  // "torchrun", "Slurm", ...; "" for a process that was not started as a rank
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
/// MASTER_ADDR and MASTER_PORT count with every launcher; without them, Slurm's first node and a port by the
/// number of the job, and for ranks of one machine its loopback address. TESSERA_JOB names the job, with any
/// launcher; without it the launcher's own name counts, and for ranks of one machine the process that started
/// all of them. Where torchrun's agent occupies
/// MASTER_PORT, the port after it is ours. A job of no launcher is a place of size 1.
///
/// Throws, naming the variables, if one is no number or out of range, if a part of the variables of a
/// launcher is missing, if two launchers disagree about the rank in jobs of the same size, or if rank 0 of
/// several machines is unknown.
Place place_of(const Environment& environment);
/// Of this process.
Place own_place();

/// The GPU of this rank if there are GPUs, cuda:<local rank>, else the CPU. Throws if this machine has more
/// ranks than GPUs.
Device device_at(const Place& place);

/// For comm::connect_tcp; `what`: the program and what it was told.
comm::Meeting meeting_of(const Place& place, const std::string& what);

}  // namespace tessera::dist
