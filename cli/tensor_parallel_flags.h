#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <string>

#include "dist/world.h"
#include "nn/tensor_parallel.h"

/// The flags of commands that run a decoder shared out over the ranks of a launcher.

namespace tessera::cli {

struct TensorParallelFlags {
  int ranks = 1;
  std::string exchange;  // "": the fastest one that the GPUs can run

  void add_to(CLI::App& command);
  /// The ranks that started with this one; one alone without the flags. Throws UsageError, on all ranks and
  /// before one waits for another, unless there are as many as --tensor-parallel says.
  dist::World join(const std::string& command, const std::string& device) const;
  /// How these share a model out; connects their GPUs. All of them call it.
  nn::TensorParallel share(const dist::World& world, Device device) const;
};

/// Runs work() on several ranks. Where it throws on a GPU, kernels may still wait for another rank, and so
/// would whatever frees their memory: the others are told, the error is printed, and the process ends with
/// status 1.
void end_at_failure(const dist::World& world, Device device, const std::function<void()>& work);

/// Prints on rank 0 that a step is not the one kernel for all layers that it is on one GPU.
void tell_shared(const dist::World& world, Device device);

}  // namespace tessera::cli
