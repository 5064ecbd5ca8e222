#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/error.h"

/// Files, read with suspicion and written so that no reader ever sees half of one.
///
/// Reading is by position (pread), not by mapping: a file that is cut while it is read gives an error here,
/// where a mapping gives SIGBUS.

namespace tessera::io {

/// The system calls that files are made of. Tests put failures and crashes in their place; a call reports as
/// the system does: -1 and errno.
struct FileCalls {
  std::function<int(const char* path, int flags, mode_t mode)> open;
  std::function<ssize_t(int file, void* to, size_t bytes, off_t offset)> pread;
  std::function<ssize_t(int file, const void* from, size_t bytes, off_t offset)> pwrite;
  std::function<int(int file)> fsync;
  std::function<int(int file)> close;
  std::function<int(const char* from, const char* to)> rename;
  std::function<int(const char* path)> unlink;
  std::function<uint64_t(const char* folder)> free_bytes;  // for this user; 2^64-1 if it cannot be told
  static FileCalls system();
};
/// The calls in use by this process.
FileCalls& file_calls();

/// Whether a name may be a link. Where a file from elsewhere names another, a link beside it may lead
/// anywhere.
enum class Links : uint8_t { follow, refuse };

/// A regular file open for reading, or bytes in memory under a name.
class InputFile {
 public:
  /// Throws, naming the path, if there is no such file or it is a directory, a pipe, a device, unreadable,
  /// empty, a Git LFS pointer or an HTML page. With Links::refuse, also if the name is a symbolic link or the
  /// file has another name (a hard link).
  explicit InputFile(std::string path, Links links = Links::follow);
  /// The bytes must outlive the object.
  InputFile(std::string name, std::span<const char> bytes);
  ~InputFile();
  InputFile(InputFile&& other) noexcept;
  InputFile& operator=(InputFile&&) = delete;

  const std::string& path() const { return path_; }
  uint64_t size() const { return size_; }
  /// Exactly `bytes` bytes from `offset`. Throws if the file ends before, as one that is being changed does.
  void read(uint64_t offset, void* to, size_t bytes) const;

 private:
  void refuse_stand_ins() const;
  std::string path_;
  int file_ = -1;
  uint64_t size_ = 0;
  std::span<const char> memory_;
};

/// The whole of a regular file. Throws as InputFile does, and if it is larger than `limit` bytes.
std::string read_file(const std::string& path, uint64_t limit);

/// Where writing to `path` ends: symbolic links are followed, also one whose target is not there yet. Throws
/// if they lead in a circle.
std::string followed(const std::string& path);

/// A file that appears under its name whole or not at all: written to a temporary in the same folder, flushed
/// to the disk, renamed, and the folder flushed. Until publish() returns, what had that name before is
/// untouched; afterwards the new content survives a power failure. A symbolic link stays one, and what it
/// leads to is replaced; the permissions of a file that is replaced are kept.
///
/// Every failure throws with the path, the bytes needed and the bytes free there, and leaves no temporary. A
/// process that is killed leaves one (".name.tmp-<process>-<number>"): see remove_stale_temporaries.
class AtomicFile {
 public:
  /// `bytes`: what will be written; throws at once if the file system has less room than that. Throws too if
  /// what has that name is a folder, a pipe or a device, or leads to one: it would be replaced; or a file
  /// that this user may not write to.
  AtomicFile(std::string path, uint64_t bytes);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;

  void write(const void* data, size_t bytes);  // appends
  void write(std::string_view data) { write(data.data(), data.size()); }
  /// Replaces bytes written before.
  void rewrite(uint64_t offset, std::string_view data);
  void publish();

 private:
  void put(uint64_t offset, const char* data, size_t bytes);
  void discard() noexcept;
  [[noreturn]] void fail(const char* what, int error) const;
  std::string path_, target_, folder_, temporary_;
  uint64_t bytes_, written_ = 0;
  int file_ = -1;
};

void write_file(const std::string& path, std::string_view content);

/// Creates the folder and its parents, and flushes their names to the disk.
void make_folder(const std::string& path);

/// Removes what killed writers left in the folder; a temporary whose writer lives is locked and stays.
/// Returns the names removed.
std::vector<std::string> remove_stale_temporaries(const std::string& folder);

}  // namespace tessera::io
