#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

#include "io/atomic_names_internal.h"
#include "io/file.h"
#include "io/syscall_internal.h"

namespace tessera::io {
namespace {

namespace fs = std::filesystem;

std::string sibling(const std::string& path, const char* kind) {
  static std::atomic<uint64_t> number{0};
  const fs::path at(path);
  return (at.parent_path() / marked_name(at.filename().string(), kind, number.fetch_add(1))).string();
}

int rename_of(const std::string& from, const std::string& to) {
  return retry([&] { return file_calls().rename(from.c_str(), to.c_str()); });
}

/// JSON files last: they name the others (an index its shards), and readers begin with them.
std::vector<std::string> publishing_order(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end(), [](const std::string& a, const std::string& b) {
    const bool last_a = a.ends_with(".json"), last_b = b.ends_with(".json");
    return last_a != last_b ? last_b : a < b;
  });
  return names;
}

}  // namespace

AtomicFolder::AtomicFolder(const std::string& path, Existing existing,
                           std::function<void(const std::string& folder)> refuse)
    : path_(path), existing_(existing), refuse_(std::move(refuse)) {
  check(!path.empty(), "write: the folder to write to has no name");  // "" + "/name" would be in the root
  if (refuse_) refuse_(path_);
  // "models/" names what "models" names, and "." by itself has no sibling.
  target_ = fs::absolute(path).lexically_normal().string();
  while (target_.size() > 1 && target_.ends_with('/')) target_.pop_back();
  target_ = followed(target_);
  const fs::path parent = fs::path(target_).parent_path();
  std::error_code ignored;
  for (fs::path made = parent; !made.empty() && !fs::exists(made, ignored); made = made.parent_path())
    made_.push_back(made.string());
  make_folder(parent.string());
  // Brings back, too, what a killed process had moved aside.
  remove_stale(parent.string(), fs::path(target_).filename().string());
  check(!fs::exists(target_, ignored) || fs::is_directory(target_, ignored), "write: ", path_,
        " is a file; name a folder");
  const bool is_there = fs::is_directory(target_, ignored);
  // Renaming asks only the parent, but what is in the old folder could not be removed.
  check(!is_there || ::faccessat(AT_FDCWD, target_.c_str(), W_OK | X_OK, AT_EACCESS) == 0, "write: ", path_,
        " is read-only for this user; check its permissions");
  merges_ = existing == Existing::merge && is_there;
  if (merges_) remove_stale(target_, kFiles);
  for (;;) {
    staging_ = sibling(merges_ ? target_ + "/" + kFiles : target_, kTemporary);
    if (::mkdir(staging_.c_str(), 0777) != 0) {
      if (errno == EEXIST) continue;  // left by a killed process that had our number
      const int error = errno;
      staging_.clear();
      discard();
      fail_at(Site::here(), "write: ", path_, ": cannot create a folder in ",
              merges_ ? target_ : parent.string(), ": ", text_of(error),
              "; check the disk and the permissions");
    }
    // The lock says that the writer lives. A process that cleaned up before it was taken has removed the
    // folder.
    lock_ = ::open(staging_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (lock_ >= 0) retry([&] { return ::flock(lock_, LOCK_EX); });
    if (fs::is_directory(staging_, ignored)) break;
    ::close(lock_);
  }
}

AtomicFolder::~AtomicFolder() {
  discard();
}

void AtomicFolder::discard() noexcept {
  std::error_code ignored;
  if (!staging_.empty()) fs::remove_all(staging_, ignored);
  staging_.clear();
  if (lock_ >= 0) ::close(std::exchange(lock_, -1));
  for (const std::string& folder : made_) ::rmdir(folder.c_str());  // the innermost first; only empty ones
  made_.clear();
}

void AtomicFolder::publish() {
  check(!staging_.empty(), "write: ", path_, ": published or given up already");
  try {
    const int flushed = flush_folder(staging_);
    if (flushed != 0) fail("cannot flush to the disk", flushed);
    if (existing_ == Existing::merge)
      publish_merged();
    else
      publish_folder();
  } catch (...) {
    discard();
    throw;
  }
  made_.clear();
  discard();
  const std::string flushed_folder = merges_ ? target_ : fs::path(target_).parent_path().string();
  const int error = flush_folder(flushed_folder);
  check(error == 0, "write: ", path_, " is written, but the folder ", flushed_folder,
        " could not be flushed to the disk: ", text_of(error), "; it may be lost in a power failure");
}

void AtomicFolder::publish_folder() {
  struct stat old {};
  if (::stat(target_.c_str(), &old) != 0) {
    if (rename_of(staging_, target_) != 0) fail("cannot rename the new folder", errno);
    return staging_.clear();
  }
  retry([&] { return ::chmod(staging_.c_str(), old.st_mode & 07777); });
  // One call puts the new folder in the place of the old one: at no time is there none. What is called
  // staging_ is then the old one, which goes.
  if (retry([&] { return file_calls().exchange(staging_.c_str(), target_.c_str()); }) == 0) return;
  if (errno != EINVAL && errno != ENOSYS && errno != ENOTSUP) fail("cannot exchange the old folder", errno);
  // A file system or kernel without that call: the old folder steps aside, and comes back if the new one
  // cannot take its place; remove_stale_temporaries brings it back after a crash between the two.
  const std::string aside = sibling(target_, kAside);
  const int lock = ::open(target_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (lock >= 0) ::flock(lock, LOCK_EX | LOCK_NB);
  int error = 0;
  if (rename_of(target_, aside) != 0) {
    error = errno;
  } else if (rename_of(staging_, target_) != 0) {
    error = errno;
    rename_of(aside, target_);
  } else {
    staging_ = aside;
  }
  if (lock >= 0) ::close(lock);
  if (error != 0) fail("cannot rename the new folder", error);
}

void AtomicFolder::publish_merged() {
  struct stat now {};
  if (::stat(target_.c_str(), &now) != 0) {
    // Fails if a folder with files has appeared since.
    if (rename_of(staging_, target_) == 0) return staging_.clear();
    if (errno != ENOTEMPTY && errno != EEXIST) fail("cannot rename the new folder", errno);
  }
  // Of two that both began without the folder, the second waits until the first is done: its folder was
  // renamed, and it holds that folder's lock. A folder that was there may be locked by this process, as runs
  // lock theirs.
  int lock = -1;
  if (!std::exchange(merges_, true)) {
    lock = ::open(target_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (lock < 0) fail("cannot open the folder", errno);
    retry([&] { return ::flock(lock, LOCK_EX); });
  }
  try {
    if (refuse_) refuse_(path_);
    publish_files();
  } catch (...) {
    if (lock >= 0) ::close(lock);
    throw;
  }
  if (lock >= 0) ::close(lock);
}

void AtomicFolder::publish_files() {
  const std::string backup = staging_ + "/replaced";
  const std::vector<std::string> names = publishing_order(staging_);
  if (::mkdir(backup.c_str(), 0777) != 0) fail("cannot create a folder for what is replaced", errno);
  struct Move {
    std::string from, to;
  };
  std::vector<Move> moves;
  const auto move = [&](const std::string& from, const std::string& to) {
    if (rename_of(from, to) == 0) return moves.push_back({from, to});
    const int error = errno;
    for (auto done = moves.rbegin(); done != moves.rend(); ++done) rename_of(done->to, done->from);
    fail("cannot rename a new file", error);
  };
  std::error_code ignored;
  for (const std::string& name : names) {
    const std::string to = target_ + "/" + name;
    if (fs::exists(fs::symlink_status(to, ignored))) move(to, backup + "/" + name);
    move(staging_ + "/" + name, to);
  }
}

void AtomicFolder::fail(const char* what, int error) const {
  fail_at(Site::here(), "write: ", path_, ": ", what, ": ", text_of(error),
          "; check the disk and the permissions; what had that name before is untouched");
}

}  // namespace tessera::io
