#include "io/checkpoint_folder.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>

#include "io/syscall_internal.h"

namespace tessera::io {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "step-", kSuffix = ".safetensors";

std::optional<int64_t> step_of(std::string_view name) {
  if (!name.starts_with(kPrefix) || !name.ends_with(kSuffix) ||
      name.size() <= kPrefix.size() + kSuffix.size())
    return std::nullopt;
  name.remove_prefix(kPrefix.size());
  name.remove_suffix(kSuffix.size());
  int64_t step = 0;
  if (!leaf::parse(name, step) || step < 0) return std::nullopt;
  return step;
}

}  // namespace

CheckpointFolder::CheckpointFolder(std::string path, int keep) : path_(std::move(path)), keep_(keep) {
  check(keep_ >= 1, "checkpoints: ", path_, ": ", keep_, " to keep, expected at least 1");
  make_folder(path_);
  remove_stale_temporaries(path_);
}

void CheckpointFolder::check_writable() const {
  check(::faccessat(AT_FDCWD, path_.c_str(), W_OK | X_OK, AT_EACCESS) == 0, "checkpoints: ", path_,
        " is read-only for this user; check its permissions");
}

std::string CheckpointFolder::file_of(int64_t step) const {
  check(step >= 0, "checkpoints: ", path_, ": step ", step, " is negative");
  std::string digits = std::to_string(step);
  digits.insert(0, digits.size() < 6 ? 6 - digits.size() : 0, '0');
  return (fs::path(path_) / (std::string(kPrefix) + digits + std::string(kSuffix))).string();
}

std::vector<int64_t> CheckpointFolder::steps() const {
  std::vector<int64_t> steps;
  std::error_code error;
  for (fs::directory_iterator entry(path_, error), end; !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    // Only names as file_of writes them: "step-7" next to "step-000007" would be the same step twice.
    if (const auto step = step_of(name); step && fs::path(file_of(*step)).filename() == name)
      steps.push_back(*step);
  }
  check(!error, "checkpoints: cannot list ", path_, ": ", error.message());
  std::sort(steps.rbegin(), steps.rend());
  return steps;
}

std::string CheckpointFolder::save(int64_t step, const Checkpoint& checkpoint,
                                   std::optional<int64_t> spared) const {
  const std::string file = file_of(step);
  checkpoint.save(file);
  Checkpoint::verify(file);
  prune(step, spared);
  return file;
}

void CheckpointFolder::prune(int64_t step, std::optional<int64_t> spared) const {
  int kept = 0;
  for (const int64_t old : steps())
    if (old <= step && ++kept > keep_ && old != spared)
      retry([&] { return file_calls().unlink(file_of(old).c_str()); });
}

CheckpointFolder::Latest CheckpointFolder::latest() const {
  Latest latest;
  const std::vector<int64_t> steps = this->steps();
  for (const int64_t step : steps) {
    const std::string file = file_of(step);
    try {
      Checkpoint::verify(file);
      latest.step = step;
      latest.file = file;
      return latest;
    } catch (const OutOfMemory&) {
      throw;  // says nothing about the file
    } catch (const Error& error) {
      latest.warnings.push_back("passed over " + file + ": " + error.what());
    }
  }
  check(steps.empty(), "checkpoints: none of the ", steps.size(), " in ", path_, " can be loaded",
        latest.warnings.empty() ? "" : "; " + latest.warnings.front(),
        "; to start from scratch, name another folder");
  return latest;
}

}  // namespace tessera::io
