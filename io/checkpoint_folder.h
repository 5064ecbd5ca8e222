#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "io/checkpoint.h"

namespace tessera::io {

/// A folder of checkpoints "step-000123.safetensors", of which the newest are kept. One process writes to it.
class CheckpointFolder {
 public:
  /// Creates the folder, and removes temporaries that killed saves left. `keep` is at least 1.
  explicit CheckpointFolder(std::string path, int keep = 3);

  const std::string& path() const { return path_; }
  /// Throws if this user may not write to the folder: before the steps that a save would come after.
  void check_writable() const;
  std::string file_of(int64_t step) const;
  /// The steps that have a file, newest first; not verified.
  std::vector<int64_t> steps() const;

  /// Saves (Checkpoint::of(io::named("model", model), ...)), reads the file back and verifies it. Only then
  /// does it remove checkpoints older than the `keep` newest ones up to this step, except that of the step
  /// `spared`. Files of later steps stay: they belong to a continuation that was abandoned. Returns the
  /// file's path.
  std::string save(int64_t step, const Checkpoint& checkpoint, std::optional<int64_t> spared = {}) const;

  /// Removes old checkpoints as save() does, for a step that is saved already.
  void prune(int64_t step, std::optional<int64_t> spared) const;

  struct Latest {
    std::optional<int64_t> step;  // none: the folder holds no checkpoint at all
    std::string file;
    std::vector<std::string> warnings;  // for the caller to print: newer ones that were skipped, and why
  };
  /// The newest checkpoint that verifies. Throws if there are some and none does: to start from scratch is a
  /// decision, not a fallback.
  Latest latest() const;

 private:
  std::string path_;
  int keep_;
};

}  // namespace tessera::io
