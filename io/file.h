#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/error.h"

/// Files whose content is not trusted when they are read, and that are written so that no reader ever sees
/// half of one.
///
/// Reading is by position (pread), not by mapping: a file that is cut while it is read gives an error here,
/// where a mapping gives SIGBUS.

namespace tessera::io {

/// The system calls that the code for files uses. Tests replace them to inject failures and crashes; a call
/// reports errors as the system does: -1 and errno.
struct FileCalls {
  std::function<int(const char* path, int flags, mode_t mode)> open;
  std::function<ssize_t(int file, void* to, size_t bytes, off_t offset)> pread;
  std::function<ssize_t(int file, const void* from, size_t bytes, off_t offset)> pwrite;
  std::function<int(int file)> fsync;
  std::function<int(int file)> close;
  std::function<int(const char* from, const char* to)> rename;
  /// Exchanges two names atomically (renameat2 with RENAME_EXCHANGE).
  std::function<int(const char* a, const char* b)> exchange;
  std::function<int(const char* path)> unlink;
  std::function<uint64_t(const char* folder)> free_bytes;  // for this user; 2^64-1 if it cannot be told
  static FileCalls system();
};
/// The calls in use by this process.
FileCalls& file_calls();

/// Whether a name may be a symbolic or hard link. Where an untrusted file names another file, links are
/// refused: one next to it may lead anywhere.
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
/// False also if that cannot be told.
bool is_folder(const std::string& path);

/// The path that writing to `path` would change: symbolic links are followed, even if the target does not
/// exist yet. Throws on a cycle of links.
std::string followed(const std::string& path);

/// The path next to a folder whose name has `suffix` at its end: "out.partial" for "out", and for "out/".
std::string with_suffix(const std::string& folder, const char* suffix);

/// A file that appears under its name whole or not at all: written to a temporary in the same folder, flushed
/// to the disk, renamed, and the folder flushed. Until publish() returns, what had that name before is
/// untouched; afterwards the new content survives a power failure. A symbolic link stays one, and what it
/// leads to is replaced; the permissions of a file that is replaced are kept.
///
/// Every failure throws with the path, the bytes needed and the bytes free there, and leaves no temporary. A
/// process that is killed leaves one (".name.tmp-<process>-<number>"), which the next writer of that name
/// removes; remove_stale_temporaries removes those of all names.
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

/// Creates the folder and its parents, and flushes their names to the disk. A symbolic link that leads to
/// nothing stays, and the folder is created where it leads.
void make_folder(const std::string& path);

/// Several files that appear together or not at all: they are written into path(), a separate folder next
/// to the target (or in it), and publish() puts them in place. Every failure on the way, an exception
/// (Interrupted too) and a destruction without publish() remove what was written and leave what was there;
/// what a killed process leaves, remove_stale_temporaries removes.
class AtomicFolder {
 public:
  /// What happens to an existing folder of that name. `replace`: the new one takes its place, files that
  /// only the old one had are gone; readers find the old one or the new one. `merge`: the new files are moved
  /// into it, JSON files last, in place of those of the same names; if one cannot be moved, those before it
  /// are moved back. A folder that appears meanwhile is merged into, too.
  enum class Existing : uint8_t { replace, merge };
  /// Makes the parents. Throws, naming the path, if it is a file, no folder can be made there, or this user
  /// may not write to the folder that would be replaced. `refuse`, of a merge: throws if the files may not be
  /// put into the folder as it is; it is called here, and by publish() right before it moves them, so that of
  /// two writers to one folder the second throws.
  AtomicFolder(const std::string& path, Existing existing,
               std::function<void(const std::string& folder)> refuse = {});
  ~AtomicFolder();
  AtomicFolder(const AtomicFolder&) = delete;

  /// Where the files are to be written.
  const std::string& path() const { return staging_; }
  /// Files are on the disk already if AtomicFile wrote them. Once.
  void publish();

 private:
  void publish_folder();
  void publish_merged();
  void publish_files();
  void discard() noexcept;
  [[noreturn]] void fail(const char* what, int error) const;
  std::string path_, target_, staging_;
  std::vector<std::string> made_;  // parents that were not there
  Existing existing_;
  std::function<void(const std::string& folder)> refuse_;
  bool merges_ = false;
  int lock_ = -1;
};

/// Removes the temporaries that killed writers left in the folder; those of a live writer are locked and
/// stay. A folder that was moved aside and not replaced gets its name back. Returns the removed names.
std::vector<std::string> remove_stale_temporaries(const std::string& folder);

}  // namespace tessera::io
