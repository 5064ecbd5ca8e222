#include "dist/place.h"

#include <gtest/gtest.h>

#include <map>

#include "tests/errors.h"

// What launchers leave in the environment, by their documentation, and what contradicts itself.

namespace tessera::dist {
namespace {

using Variables = std::map<std::string, std::string>;

Place place_in(const Variables& variables) {
  return place_of([&](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

/// The variables with some changed; "" removes one.
Variables with(Variables variables, const Variables& changes) {
  for (const auto& [name, value] : changes) variables[name] = value;
  return variables;
}

const Variables kTorchrun = {{"RANK", "3"},
                             {"LOCAL_RANK", "1"},
                             {"WORLD_SIZE", "4"},
                             {"LOCAL_WORLD_SIZE", "2"},
                             {"GROUP_RANK", "1"},
                             {"MASTER_ADDR", "node7"},
                             {"MASTER_PORT", "29400"},
                             {"TORCHELASTIC_RUN_ID", "af31"},
                             {"TORCHELASTIC_USE_AGENT_STORE", "True"}};
const Variables kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "1"},       {"OMPI_COMM_WORLD_SIZE", "2"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                            {"OMPI_UNIVERSE_SIZE", "2"},         {"PMIX_RANK", "1"},
                            {"PMIX_NAMESPACE", "2714304513"}};
const Variables kMpich = {{"PMI_RANK", "1"},
                          {"PMI_SIZE", "2"},
                          {"PMI_FD", "6"},
                          {"MPI_LOCALRANKID", "1"},
                          {"MPI_LOCALNRANKS", "2"}};
const Variables kSlurm = {{"SLURM_JOB_ID", "4711"},
                          {"SLURM_STEP_ID", "0"},
                          {"SLURM_PROCID", "5"},
                          {"SLURM_LOCALID", "1"},
                          {"SLURM_NODEID", "1"},
                          {"SLURM_NTASKS", "8"},
                          {"SLURM_STEP_NUM_TASKS", "8"},
                          {"SLURM_STEP_TASKS_PER_NODE", "4(x2)"},
                          {"SLURM_STEP_NODELIST", "gpu[012-013]"},
                          {"SLURM_JOB_NODELIST", "gpu[012-013]"}};
const Variables kPyTorchJob = {
    {"RANK", "2"}, {"WORLD_SIZE", "3"}, {"MASTER_ADDR", "train-master-0"}, {"MASTER_PORT", "23456"}};
const Variables kIndexedJob = {{"JOB_COMPLETION_INDEX", "1"},
                               {"WORLD_SIZE", "2"},
                               {"MASTER_ADDR", "train-0.train"},
                               {"MASTER_PORT", "5000"}};

void expect_place(const Place& place, int rank, int size, int local_rank, int local_size, const char* host,
                  const char* launcher) {
  EXPECT_EQ(place.rank, rank);
  EXPECT_EQ(place.size, size);
  EXPECT_EQ(place.local_rank, local_rank);
  EXPECT_EQ(place.local_size, local_size);
  EXPECT_EQ(place.host, host);
  EXPECT_EQ(place.started_by, launcher);
}

TEST(Place, WithoutALauncherIsOneRank) {
  expect_place(place_in({}), 0, 1, 0, 1, "127.0.0.1", "");
  expect_place(place_in({{"RANK", ""}, {"HOME", "/root"}}), 0, 1, 0, 1, "127.0.0.1", "");
  // A batch script of Slurm has these, and is no rank.
  expect_place(place_in({{"SLURM_JOB_ID", "1"}, {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}}), 0, 1, 0, 1,
               "127.0.0.1", "");
}

TEST(Place, Torchrun) {
  const Place place = place_in(kTorchrun);
  expect_place(place, 3, 4, 1, 2, "node7", "torchrun");
  EXPECT_EQ(place.port, 29401) << "the agent's store occupies MASTER_PORT";
  EXPECT_EQ(place.token, "af31");
  EXPECT_EQ(place_in(with(kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "False"}})).port, 29400);
}

TEST(Place, OpenMpi) {
  const Place place = place_in(kOpenMpi);
  expect_place(place, 1, 2, 1, 2, "127.0.0.1", "OpenMPI");
  EXPECT_EQ(place.token, "2714304513");
  EXPECT_EQ(place.port, place_in(with(kOpenMpi, {{"OMPI_COMM_WORLD_RANK", "0"}})).port);
  EXPECT_NE(place.port, place_in(with(kOpenMpi, {{"PMIX_NAMESPACE", "2714304514"}})).port);
  const Variables two = with(kOpenMpi, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "1"},
                                        {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                                        {"MASTER_ADDR", "n0"},
                                        {"MASTER_PORT", "1234"}});
  expect_place(place_in(two), 1, 2, 0, 1, "n0", "OpenMPI");
  EXPECT_EQ(place_in(two).port, 1234);
}

TEST(Place, Mpich) {
  const Place place = place_in(kMpich);
  expect_place(place, 1, 2, 1, 2, "127.0.0.1", "MPICH");
  EXPECT_FALSE(place.token.empty());
}

TEST(Place, RanksThatNoLauncherNamesSayWhereTheirTokenComesFrom) {
  const Variables by_hand = {{"RANK", "1"},
                             {"WORLD_SIZE", "2"},
                             {"LOCAL_RANK", "1"},
                             {"LOCAL_WORLD_SIZE", "2"},
                             {"MASTER_PORT", "29500"}};
  const comm::RendezvousOptions rendezvous = rendezvous_options(place_in(by_hand), "program");
  EXPECT_TRUE(rendezvous.token.starts_with("parent ")) << rendezvous.token;
  expect_parts(rendezvous.origin,
               {"no launcher names the job", "set TESSERA_JOB to the same text on all ranks"});
  const Place named = place_in(with(by_hand, {{"TESSERA_JOB", "a"}}));
  EXPECT_EQ(named.token, "a");
  EXPECT_EQ(named.origin, "");
  EXPECT_EQ(named.port, 29500);
}

TEST(Place, Slurm) {
  const Place place = place_in(kSlurm);
  expect_place(place, 5, 8, 1, 4, "gpu012", "Slurm");
  EXPECT_EQ(place.token, "4711.0");
  EXPECT_EQ(place_in(with(kSlurm, {{"SLURM_STEP_NODELIST", "a,b"}})).host, "a");
  EXPECT_EQ(place_in(with(kSlurm, {{"SLURM_STEP_NODELIST", "n[3,5-7],m1"}})).host, "n3");
  EXPECT_EQ(place_in(with(kSlurm, {{"SLURM_STEP_TASKS_PER_NODE", "3,5"}})).local_size, 5);
}

TEST(Place, TheGpuIsThatOfTheLocalRankAmongThoseThatTheProcessSees) {
  const Place place = place_in(with(kSlurm, {{"SLURM_PROCID", "7"}, {"SLURM_LOCALID", "3"}}));
  ASSERT_EQ(place.local_rank, 3);
  ASSERT_EQ(place.local_size, 4);
  EXPECT_EQ(gpu_index(place, 8), 3);
  EXPECT_EQ(gpu_index(place, 4), 3);
  EXPECT_EQ(gpu_index(place, 1), 0) << "its own (srun --gpus-per-task=1)";
  EXPECT_EQ(gpu_index(place, 2), 1) << "two of its own, or an error of check_own_gpus";
}

TEST(Place, RanksThatHaveTheSameGpuAreNamed) {
  check_own_gpus({});
  check_own_gpus({"GPU-a", "GPU-b", "GPU-c"});
  check_own_gpus({"", "", "GPU-a"});
  expect_error(
      [] {
        check_own_gpus({"GPU-a", "GPU-b", "GPU-c", "GPU-b"});
      },
      {"ranks 1 and 3 have the same GPU, GPU-b", "one of its own", "--gpus-per-task=1"});
}

TEST(Place, Kubernetes) {
  expect_place(place_in(kPyTorchJob), 2, 3, 0, 1, "train-master-0", "torchrun");
  EXPECT_EQ(place_in(kPyTorchJob).port, 23456);
  expect_place(place_in(kIndexedJob), 1, 2, 0, 1, "train-0.train", "Kubernetes");
}

TEST(Place, TheInnerLauncherCounts) {  // torchrun within a step of Slurm, one task per node
  const Variables slurm =
      with(kSlurm, {{"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_PROCID", "1"}, {"SLURM_LOCALID", "0"}});
  Variables both = kTorchrun;
  both.insert(slurm.begin(), slurm.end());
  expect_place(place_in(both), 3, 4, 1, 2, "node7", "torchrun");
}

TEST(Place, BadVariablesAreNamed) {
  const auto refuses = [](const Variables& variables, std::initializer_list<const char*> parts) {
    expect_error([&] { place_in(variables); }, parts);
  };
  refuses(with(kTorchrun, {{"RANK", "x"}}), {"RANK is \"x\"", "whole number"});
  refuses(with(kTorchrun, {{"RANK", "-1"}}), {"RANK is \"-1\""});
  refuses(with(kTorchrun, {{"RANK", "4"}}), {"RANK is 4 and WORLD_SIZE is 4", "count from 0"});
  refuses(with(kTorchrun, {{"RANK", "99999999999999"}}), {"RANK is \"99999999999999\""});
  refuses(with(kTorchrun, {{"WORLD_SIZE", ""}}), {"RANK is set and WORLD_SIZE is not"});
  refuses(with(kTorchrun, {{"RANK", ""}}), {"WORLD_SIZE is set and RANK is not"});
  refuses(with(kTorchrun, {{"WORLD_SIZE", "0"}}), {"WORLD_SIZE is 0"});
  refuses(with(kTorchrun, {{"LOCAL_RANK", "2"}}), {"local rank 2 of 2"});
  refuses(with(kTorchrun, {{"LOCAL_WORLD_SIZE", "5"}}), {"local rank 1 of 5", "4 ranks"});
  refuses(with(kTorchrun, {{"LOCAL_WORLD_SIZE", ""}}), {"local rank 1", "LOCAL_WORLD_SIZE", "is not set"});
  refuses(with(kTorchrun, {{"MASTER_PORT", "0"}}), {"MASTER_PORT is \"0\"", "1 to 65535"});
  refuses(with(kTorchrun, {{"MASTER_PORT", "http"}}), {"MASTER_PORT is \"http\""});
  refuses(with(kTorchrun, {{"MASTER_ADDR", ""}}), {"MASTER_ADDR is not set", "where is rank 0"});
  refuses(with(kPyTorchJob, {{"MASTER_ADDR", ""}}), {"MASTER_ADDR is not set"});
  refuses(with(kOpenMpi, {{"OMPI_COMM_WORLD_SIZE", ""}}), {"OMPI_COMM_WORLD_RANK is set", "OpenMPI"});
  refuses(with(kOpenMpi, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "1"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "0"}}),
          {"OpenMPI", "MASTER_ADDR is not set", "mpirun -x MASTER_ADDR"});
  refuses(with(kMpich, {{"PMI_SIZE", "1"}}), {"PMI_RANK is 1 and PMI_SIZE is 1"});
  refuses(with(kSlurm, {{"SLURM_PROCID", ""}}), {"SLURM_STEP_NUM_TASKS is set and SLURM_PROCID is not"});
  Variables both = kOpenMpi;
  both.insert({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "n0"}});
  refuses(both, {"RANK is 0 and OMPI_COMM_WORLD_RANK is 1", "which is this process"});
}

}  // namespace
}  // namespace tessera::dist
