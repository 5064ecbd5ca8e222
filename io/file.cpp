#include "io/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <limits>
#include <utility>

#include "io/syscall_internal.h"

namespace tessera::io {
namespace {

bool starts_with_any_case(std::string_view text, std::string_view prefix) {
  return text.size() >= prefix.size() &&
         std::equal(prefix.begin(), prefix.end(), text.begin(),
                    [](char a, char b) { return a == (b >= 'A' && b <= 'Z' ? char(b + ('a' - 'A')) : b); });
}

}  // namespace

FileCalls FileCalls::system() {
  return {.open = [](const char* path, int flags, mode_t mode) { return ::open(path, flags, mode); },
          .pread = ::pread,
          .pwrite = ::pwrite,
          .fsync = ::fsync,
          .close = ::close,
          .rename = static_cast<int (*)(const char*, const char*)>(std::rename),
          .exchange = [](const char* a,
                         const char* b) { return ::renameat2(AT_FDCWD, a, AT_FDCWD, b, RENAME_EXCHANGE); },
          .unlink = ::unlink,
          .free_bytes =
              [](const char* folder) {
                struct statvfs info {};
                if (::statvfs(folder, &info) != 0) return std::numeric_limits<uint64_t>::max();
                return uint64_t(info.f_bavail) * uint64_t(info.f_frsize);
              }};
}

FileCalls& file_calls() {
  static FileCalls calls = FileCalls::system();
  return calls;
}

InputFile::InputFile(std::string path, Links links) : path_(std::move(path)) {
  // Not blocking: opening a pipe that has no writer would wait for ever. On a regular file it means
  // nothing.
  const int flags = O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY | (links == Links::refuse ? O_NOFOLLOW : 0);
  file_ = retry([&] { return file_calls().open(path_.c_str(), flags, 0); });
  if (file_ < 0) {
    const int error = errno;
    check(links == Links::follow || error != ELOOP, "read: ", path_,
          " is a symbolic link, which may lead out of its folder; put the file itself there");
    check(error != ENOENT, "read: there is no file ", path_, "; check the name and the folder");
    fail_at(Site::here(), "read: cannot open ", path_, ": ", text_of(error));
  }
  struct stat info {};
  const bool known = ::fstat(file_, &info) == 0;
  const char* const wrong = !known                   ? "cannot be examined"
                            : S_ISDIR(info.st_mode)  ? "is a directory; name a file in it"
                            : !S_ISREG(info.st_mode) ? "is not a regular file (a pipe, socket or device)"
                            : info.st_size == 0
                                ? "is empty: an unfinished download or a writer that was killed"
                            : links == Links::refuse && info.st_nlink != 1
                                ? "has another name elsewhere (a hard link); put a copy there"
                                : nullptr;
  if (!wrong) size_ = uint64_t(info.st_size);
  try {
    check(!wrong, "read: ", path_, " ", wrong ? wrong : "");
    refuse_stand_ins();
  } catch (...) {
    file_calls().close(file_);
    throw;
  }
}

InputFile::InputFile(std::string name, std::span<const char> bytes)
    : path_(std::move(name)), size_(bytes.size()), memory_(bytes) {
  check(size_ > 0, "read: ", path_, " is empty: an unfinished download or a writer that was killed");
  refuse_stand_ins();
}

InputFile::InputFile(InputFile&& other) noexcept
    : path_(std::move(other.path_)),
      file_(std::exchange(other.file_, -1)),
      size_(other.size_),
      memory_(other.memory_) {}

InputFile::~InputFile() {
  if (file_ >= 0) file_calls().close(file_);
}

void InputFile::refuse_stand_ins() const {
  std::array<char, 128> start{};
  const size_t bytes = size_t(std::min<uint64_t>(size_, start.size()));
  read(0, start.data(), bytes);
  std::string_view text(start.data(), bytes);
  check(!text.starts_with("version https://git-lfs"), "read: ", path_,
        " is a Git LFS pointer, not the file itself; fetch it with 'git lfs pull'");
  if (text.starts_with("\xEF\xBB\xBF")) text.remove_prefix(3);
  text.remove_prefix(std::min(text.find_first_not_of(" \t\r\n"), text.size()));
  check(!starts_with_any_case(text, "<!doctype") && !starts_with_any_case(text, "<html"), "read: ", path_,
        " is an HTML page, such as a server sends instead of a file; download it again");
}

void InputFile::read(uint64_t offset, void* to, size_t bytes) const {
  check(offset <= size_ && bytes <= size_ - offset, "read: ", path_, " has ", size_, " bytes; ", bytes,
        " at offset ", offset, " reach past its end");
  if (file_ < 0) {
    if (bytes) std::memcpy(to, memory_.data() + offset, bytes);
    return;
  }
  for (size_t done = 0; done < bytes;) {
    const ssize_t got = retry([&] {
      return file_calls().pread(file_, static_cast<char*>(to) + done, std::min(bytes - done, kLargestCall),
                                off_t(offset + done));
    });
    const int error = errno;
    check(got >= 0, "read: ", path_, " at offset ", offset + done, ": ", text_of(error));
    check(got > 0, "read: ", path_, " ended at byte ", offset + done, ", it had ", size_,
          " when it was opened; another process is changing it");
    done += size_t(got);
  }
}

bool is_folder(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::is_directory(path, ignored);
}

std::string read_file(const std::string& path, uint64_t limit) {
  const InputFile file(path);
  check(file.size() <= limit, "read: ", path, " has ", file.size(), " bytes, more than the ", limit,
        " that are reasonable here");
  std::string content(size_t(file.size()), '\0');
  file.read(0, content.data(), content.size());
  return content;
}

}  // namespace tessera::io
