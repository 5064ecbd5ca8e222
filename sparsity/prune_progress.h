#pragma once

#include <span>
#include <string>
#include <vector>

#include "io/checksum.h"
#include "io/safetensors.h"
#include "nn/module.h"
#include "sparsity/prune.h"
#include "sparsity/targets.h"

namespace tessera::sparsity {

/// Blocks that an earlier, killed call of prune() finished: a folder with a file of weights for each, which
/// appears whole or not at all. Every file carries the digest of the request that it belongs to.
class PruneProgress {
 public:
  /// The folder is made with the first block that is kept. Throws, naming it, if it holds blocks of another
  /// request.
  PruneProgress(std::string folder, std::string request);

  bool has(int64_t block) const;
  /// Puts the pruned weights of a block back.
  std::vector<PrunedMatrix> restore(int64_t block, std::span<const Target> targets) const;
  void keep(int64_t block, std::span<const Target> targets, const std::vector<PrunedMatrix>& matrices) const;

 private:
  std::string path_of(int64_t block) const;
  /// Throws, saying what to remove, if the file is cut off.
  io::SafetensorsFile open(const std::string& path) const;
  void check_request(const std::string& path) const;
  std::string folder_, request_;
};

/// A digest of all that decides the bits of the result.
std::string request_digest(const PruneOptions& options, const Samples& samples,
                           const std::string& fingerprint, Device device, DType dtype);

}  // namespace tessera::sparsity
