#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <filesystem>
#include <limits>
#include <system_error>
#include <utility>

#include "io/atomic_names_internal.h"
#include "io/file.h"
#include "io/syscall_internal.h"

namespace tessera::io {
namespace {

namespace fs = std::filesystem;

std::string folder_of(const std::string& path) {
  const fs::path folder = fs::path(path).parent_path();
  return folder.empty() ? "." : folder.string();
}

constexpr size_t kLongestPart = 200;  // bytes of the name kept in a temporary's, which may have 255

/// The original name within a marked_name() of that kind, the only form that remove_stale_temporaries
/// touches; "" for any other name.
std::string unmarked(const std::string& name, std::string_view kind) {
  const size_t mark = name.rfind(kind);
  if (name.empty() || name[0] != '.' || mark == std::string::npos) return "";
  const std::string numbers = name.substr(mark + kind.size());
  const size_t dash = numbers.find('-');
  const bool is_marked = dash != std::string::npos && dash > 0 && dash + 1 < numbers.size() &&
                         numbers.find_first_not_of("0123456789") == dash &&
                         numbers.find_first_not_of("0123456789", dash + 1) == std::string::npos;
  return is_marked ? name.substr(1, mark - 1) : "";
}

}  // namespace

std::string published_name(const std::string& path) {
  fs::path shown;
  for (const fs::path& part : fs::path(path)) {
    const std::string name = unmarked(part.string(), kTemporary);
    if (name != kFiles) shown /= name.empty() ? part : fs::path(name);
  }
  return shown.string();
}

std::string marked_name(const std::string& name, const char* kind, uint64_t number) {
  return "." + name.substr(0, kLongestPart) + kind + std::to_string(::getpid()) + "-" +
         std::to_string(number);
}

int flush_folder(const std::string& folder) {
  FileCalls& calls = file_calls();
  const int file = retry([&] { return calls.open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0); });
  if (file < 0) return errno;
  const int result = retry([&] { return calls.fsync(file); });
  const int error = result < 0 ? errno : 0;
  calls.close(file);
  return error == EINVAL ? 0 : error;  // EINVAL: a file system that keeps names durable by itself
}

std::string followed(const std::string& path) {
  constexpr int kMostLinks = 40;  // as many as Linux follows
  fs::path at = path;
  std::error_code error;
  for (int links = 0; fs::is_symlink(at, error); ++links) {
    check(links < kMostLinks, "write: ", path, ": its symbolic links lead in a circle");
    at = at.parent_path() / fs::read_symlink(at, error);
    check(!error, "write: ", path, ": a symbolic link cannot be read: ", error.message());
  }
  return at.string();
}

std::string with_suffix(const std::string& folder, const char* suffix) {
  return (fs::path(folder) / "").parent_path().string() + suffix;
}

AtomicFile::AtomicFile(std::string path, uint64_t bytes)
    : path_(std::move(path)), target_(followed(path_)), folder_(folder_of(target_)), bytes_(bytes) {
  const std::string name = fs::path(target_).filename().string();
  std::error_code error;
  check(!name.empty() && name != "." && name != ".." && !fs::is_directory(path_, error), "write: ", path_,
        " is a directory; name a file in it");
  // A rename would replace a device or pipe by a regular file: /dev/null, for all users.
  check(!fs::exists(path_, error) || fs::is_regular_file(path_, error), "write: ", path_,
        " is not a regular file (a pipe, socket or device); name a file");
  check(fs::is_directory(folder_, error), "write: there is no folder ", folder_, " for ", path_,
        "; create it first");
  struct stat old {};
  const bool replaces = ::stat(target_.c_str(), &old) == 0;
  check(!replaces || ::faccessat(AT_FDCWD, target_.c_str(), W_OK, AT_EACCESS) == 0, "write: ", path_,
        " is read-only for this user; check its permissions");
  remove_stale(folder_, name);  // before the room is looked at: they take some
  if (file_calls().free_bytes(folder_.c_str()) < bytes_) fail("not enough room", ENOSPC);

  static std::atomic<uint64_t> number{0};
  for (;;) {
    temporary_ = (fs::path(folder_) / marked_name(name, kTemporary, number.fetch_add(1))).string();
    constexpr int kFlags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
    file_ = retry([&] { return file_calls().open(temporary_.c_str(), kFlags, 0666); });
    if (file_ < 0 && errno == EEXIST) continue;  // left by a killed process that had our number
    if (file_ < 0) fail("cannot create a temporary file", errno);
    // The lock marks the writer as alive; where there are no locks, no other process cleans up. If another
    // process cleaned up before we had the lock, the file is gone: begin again.
    retry([&] { return ::flock(file_, LOCK_EX); });
    struct stat info {};
    if (::fstat(file_, &info) != 0 || info.st_nlink > 0) break;
    discard();
  }
  // A file system without permissions refuses, and has none to keep.
  if (replaces) retry([&] { return ::fchmod(file_, old.st_mode & 07777); });
}

AtomicFile::~AtomicFile() {
  discard();
}

void AtomicFile::discard() noexcept {
  if (file_ < 0) return;
  retry([&] { return file_calls().unlink(temporary_.c_str()); });
  file_calls().close(std::exchange(file_, -1));
}

void AtomicFile::fail(const char* what, int error) const {
  const uint64_t free = file_calls().free_bytes(folder_.c_str());
  const std::string room =
      free == std::numeric_limits<uint64_t>::max() ? "an unknown number of" : std::to_string(free);
  const bool is_full = error == ENOSPC || error == EDQUOT;
  fail_at(Site::here(), "write: ", published_name(path_), ": ", what, ": ", text_of(error), "; ", bytes_,
          " bytes are needed, ", written_, " were written, ", room, " are free in ", published_name(folder_),
          is_full ? " (a quota may allow fewer); make room and save again"
                  : "; check the disk and the permissions",
          "; what had that name before is untouched");
}

void AtomicFile::put(uint64_t offset, const char* data, size_t bytes) {
  for (size_t done = 0; done < bytes;) {
    const ssize_t put = retry([&] {
      return file_calls().pwrite(file_, data + done, std::min(bytes - done, kLargestCall),
                                 off_t(offset + done));
    });
    if (put <= 0) {
      const int error = put < 0 ? errno : ENOSPC;  // a call that writes nothing would do so for ever
      discard();
      fail("cannot write", error);
    }
    done += size_t(put);
  }
}

void AtomicFile::write(const void* data, size_t bytes) {
  put(written_, static_cast<const char*>(data), bytes);
  written_ += bytes;
}

void AtomicFile::rewrite(uint64_t offset, std::string_view data) {
  check(offset <= written_ && data.size() <= written_ - offset, "write: ", path_, ": ", data.size(),
        " bytes at offset ", offset, " are not all among the ", written_, " written");
  put(offset, data.data(), data.size());
}

void AtomicFile::publish() {
  check(file_ >= 0, "write: ", path_, ": published or given up already");
  check(written_ == bytes_, "write: ", path_, ": ", written_, " bytes were written, ", bytes_, " announced");
  // A failed fsync is final: the kernel has dropped the pages, so a second one would lie.
  const bool flushed = retry([&] { return file_calls().fsync(file_); }) == 0;
  if (!flushed || retry([&] { return file_calls().rename(temporary_.c_str(), target_.c_str()); }) != 0) {
    const int error = errno;
    discard();
    fail(flushed ? "cannot rename the temporary file" : "cannot flush to the disk", error);
  }
  file_calls().close(std::exchange(file_, -1));
  const int error = flush_folder(folder_);
  check(error == 0, "write: ", path_, " is written, but the folder ", folder_,
        " could not be flushed to the disk: ", text_of(error), "; the file may be lost in a power failure");
}

void write_file(const std::string& path, std::string_view content) {
  AtomicFile file(path, content.size());
  file.write(content);
  file.publish();
}

void make_folder(const std::string& path) {
  check(!path.empty(), "write: the folder to write to has no name");  // "" + "/name" would be in the root
  std::error_code error, ignored;
  if (fs::is_directory(path, ignored)) return;
  const std::string target = followed(path), folder = folder_of(target);
  make_folder(folder);
  fs::create_directory(target, error);
  check(fs::is_directory(target, ignored), "write: cannot create the folder ", path, ": ",
        fs::exists(target, ignored) ? "a file has that name" : error.message());
  const int flushed = flush_folder(folder);
  check(flushed == 0, "write: cannot flush the folder of ", path, ": ", text_of(flushed));
}

std::vector<std::string> remove_stale_temporaries(const std::string& folder) {
  return remove_stale(folder, "");
}

std::vector<std::string> remove_stale(const std::string& folder, const std::string& only) {
  std::vector<std::string> removed;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    std::error_code ignored;
    const std::string aside = unmarked(name, kAside), temporary = unmarked(name, kTemporary);
    const fs::file_type type = entry->symlink_status(ignored).type();
    const bool is_folder = type == fs::file_type::directory;
    if (aside.empty() ? temporary.empty() || (!is_folder && type != fs::file_type::regular) : !is_folder)
      continue;
    if (!only.empty() && (aside.empty() ? temporary : aside) != only.substr(0, kLongestPart)) continue;
    const std::string path = entry->path().string();
    const int file = ::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    if (file < 0) continue;
    if (::flock(file, LOCK_EX | LOCK_NB) == 0) {
      // Moved aside by a process that was killed before it could put the new folder in place.
      const std::string name_before = (entry->path().parent_path() / aside).string();
      const bool comes_back = !aside.empty() && !fs::exists(fs::symlink_status(name_before, ignored));
      const bool done = comes_back  ? file_calls().rename(path.c_str(), name_before.c_str()) == 0
                        : is_folder ? (fs::remove_all(path, ignored), !fs::exists(path, ignored))
                                    : file_calls().unlink(path.c_str()) == 0;
      if (done) removed.push_back(name);
    }
    ::close(file);
  }
  std::sort(removed.begin(), removed.end());
  return removed;
}

}  // namespace tessera::io
