#include "io/file.h"

#include <fcntl.h>
#include <sys/mount.h>
#include <sys/stat.h>

#include <cerrno>

#include "tests/errors.h"
#include "tests/io/files.h"

namespace tessera::io::test {
namespace {

TEST(InputFile, SaysWhatIsWrong) {
  const TemporaryFolder folder;
  EXPECT_TRUE(throws([&] { InputFile(folder / "absent"); }, "there is no file " + (folder / "absent")));
  EXPECT_TRUE(throws([&] { InputFile(folder.path()); }, "is a directory"));
  put(folder / "empty", "");
  EXPECT_TRUE(throws([&] { InputFile(folder / "empty"); }, "is empty"));
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  EXPECT_TRUE(throws([&] { InputFile(folder / "pipe"); }, "is not a regular file"));
  EXPECT_TRUE(throws([&] { InputFile("/dev/zero"); }, "is not a regular file"));
  put(folder / "lfs", "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n");
  EXPECT_TRUE(throws([&] { InputFile(folder / "lfs"); }, "is a Git LFS pointer"));
  for (const std::string start :
       {"<!DOCTYPE html>", "<html>", "\n \t<HTML lang=en>", "\xEF\xBB\xBF<!doctype html>"}) {
    put(folder / "page", start + "404");
    EXPECT_TRUE(throws([&] { InputFile(folder / "page"); }, "is an HTML page")) << start;
  }
  put(folder / "text", "<htm");
  EXPECT_EQ(read_file(folder / "text", 4), "<htm");
  EXPECT_TRUE(throws([&] { read_file(folder / "text", 3); }, "has 4 bytes, more than the 3"));
}

TEST(InputFile, SaysThatItMayNotRead) {
  const RestoreFileCalls restore;
  file_calls().open = [](const char*, int, mode_t) { return errno = EACCES, -1; };
  EXPECT_TRUE(throws([] { InputFile("/somewhere"); }, "cannot open /somewhere: Permission denied"));
}

TEST(InputFile, NoticesThatTheFileShrinks) {
  const TemporaryFolder folder;
  put(folder / "file", std::string(10000, 'x'));
  const InputFile file(folder / "file");
  fs::resize_file(folder / "file", 5000);
  std::string bytes(10000, '\0');
  EXPECT_TRUE(throws([&] { file.read(0, bytes.data(), bytes.size()); }, "ended at byte 5000, it had 10000"));
  EXPECT_TRUE(throws([&] { file.read(9999, bytes.data(), 2); }, "reach past its end"));
  EXPECT_TRUE(throws([&] { file.read(uint64_t(-1), bytes.data(), 2); }, "reach past its end"));
  file.read(4000, bytes.data(), 1000);
}

TEST(InputFile, ReadsOnAfterSignalsAndShortReadsAndNamesErrors) {
  const RestoreFileCalls restore;
  const TemporaryFolder folder;
  put(folder / "file", "0123456789");
  int calls = 0;
  file_calls().pread = [&](int file, void* to, size_t, off_t offset) -> ssize_t {
    if (++calls % 2) return errno = EINTR, -1;
    return ::pread(file, to, 1, offset);
  };
  EXPECT_EQ(read_file(folder / "file", 100), "0123456789");
  file_calls().pread = [&](int, void*, size_t, off_t) -> ssize_t { return errno = EIO, -1; };
  EXPECT_TRUE(throws([&] { read_file(folder / "file", 100); }, "Input/output error"));
}

TEST(AtomicFile, ReplacesAWholeFileAndLeavesNothingElse) {
  const TemporaryFolder folder;
  write_file(folder / "file", "old");
  {
    AtomicFile file(folder / "file", 6);
    file.write("new");
    EXPECT_EQ(get(folder / "file"), "old");
    EXPECT_EQ(folder.names().size(), 2u);
    file.write("...");
    file.rewrite(0, "NEW");
    EXPECT_TRUE(throws([&] { file.rewrite(4, "NEW"); }, "are not all among the 6 written"));
    file.publish();
    EXPECT_TRUE(throws([&] { file.publish(); }, "published or given up already"));
  }
  EXPECT_EQ(get(folder / "file"), "NEW...");
  EXPECT_EQ(folder.names(), std::vector<std::string>{"file"});
  { AtomicFile(folder / "file", 3).write("bad"); }
  EXPECT_TRUE(throws([&] { AtomicFile(folder / "file", 3).publish(); }, "0 bytes were written, 3 announced"));
  EXPECT_EQ(get(folder / "file"), "NEW...");
  EXPECT_EQ(folder.names(), std::vector<std::string>{"file"});
}

TEST(AtomicFile, ReplacesWhatALinkLeadsTo) {
  const TemporaryFolder folder;
  make_folder(folder / "there");
  put(folder / "there/target", "old");
  fs::create_symlink("there/target", folder / "relative");
  fs::create_symlink(folder / "relative", folder / "link");
  write_file(folder / "link", "new");
  EXPECT_EQ(get(folder / "there/target"), "new");
  fs::create_symlink("there/later", folder / "dangling");
  write_file(folder / "dangling", "x");
  EXPECT_EQ(get(folder / "there/later"), "x");
  fs::create_symlink("circle", folder / "circle");
  EXPECT_TRUE(throws([&] { write_file(folder / "circle", "x"); }, "lead in a circle"));
  for (const char* name : {"relative", "link", "dangling", "circle"})
    EXPECT_TRUE(fs::is_symlink(folder / name)) << name;
  EXPECT_EQ(folder.names().size(), 5u);
}

TEST(WithSuffix, IsTheSameForAFolderWithASlash) {
  for (const char* const folder : {"a/out", "a/out/", "a/out//"})
    EXPECT_EQ(with_suffix(folder, ".partial"), "a/out.partial") << folder;
}

TEST(MakeFolder, FollowsLinksThatLeadToNothing) {
  const TemporaryFolder folder;
  fs::create_symlink("later/deep", folder / "link");
  make_folder(folder / "link/inner");
  EXPECT_TRUE(fs::is_symlink(folder / "link"));
  EXPECT_TRUE(fs::is_directory(folder / "later/deep/inner"));
  fs::create_symlink("circle", folder / "circle");
  EXPECT_TRUE(throws([&] { make_folder(folder / "circle/inner"); }, "circle"));
}

TEST(AtomicFile, KeepsPermissionsAndRefusesAReadOnlyFile) {
  const TemporaryFolder folder;
  fs::permissions(folder.path(), fs::perms::all);
  const UnprivilegedUser user;
  const auto secret = fs::perms::owner_read | fs::perms::owner_write;
  put(folder / "secret", "old");
  fs::permissions(folder / "secret", secret);
  write_file(folder / "secret", "new");
  EXPECT_EQ(fs::status(folder / "secret").permissions(), secret);
  put(folder / "kept", "old");
  fs::permissions(folder / "kept", fs::perms::owner_read);
  EXPECT_TRUE(throws([&] { write_file(folder / "kept", "new"); }, "kept is read-only"));
  EXPECT_EQ(get(folder / "kept"), "old");
}

TEST(AtomicFile, WritesTheLongestNameThatThereIs) {
  const TemporaryFolder folder;
  const std::string name(255, 'n');
  write_file(folder / name, "x");
  EXPECT_EQ(folder.names(), std::vector<std::string>{name});
}

TEST(AtomicFile, RefusesWhatIsNoFileName) {
  const TemporaryFolder folder;
  EXPECT_TRUE(throws([&] { write_file(folder.path(), "x"); }, "is a directory"));
  EXPECT_TRUE(throws([&] { write_file(folder / "no/such/file", "x"); }, "there is no folder"));
  put(folder / "file", "x");
  EXPECT_TRUE(throws([&] { make_folder(folder / "file/below"); }, "cannot create the folder"));
  EXPECT_TRUE(throws([&] { make_folder(folder / std::string(256, 'n')); }, "cannot create the folder"));
  EXPECT_TRUE(throws([&] { make_folder(""); }, "has no name"));
  make_folder(folder / "a/b/c");
  EXPECT_TRUE(fs::is_directory(folder / "a/b/c"));
}

TEST(AtomicFile, ReplacesNoPipeAndNoDevice) {
  const TemporaryFolder folder;
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  fs::create_symlink(folder / "pipe", folder / "link");
  for (const char* name : {"pipe", "link"}) {
    EXPECT_TRUE(throws([&] { write_file(folder / name, "x"); }, "is not a regular file")) << name;
    EXPECT_TRUE(fs::is_fifo(folder / name)) << name;
  }
}

TEST(AtomicFile, RefusesBeforeTheFirstByteIfThereIsNoRoom) {
  const RestoreFileCalls restore;
  const TemporaryFolder folder;
  write_file(folder / "file", "old");
  file_calls().free_bytes = [](const char*) { return uint64_t{7}; };
  file_calls().open = [](const char*, int, mode_t) -> int { throw std::logic_error("opened"); };
  EXPECT_TRUE(
      throws([&] { AtomicFile(folder / "file", 8); }, "8 bytes are needed, 0 were written, 7 are free in"));
  EXPECT_EQ(get(folder / "file"), "old");
}

/// The order is what makes a file survive: content on the disk before its name, the name before we say so.
TEST(AtomicFile, FlushesTheFileBeforeItsNameAndThenTheFolder) {
  const RestoreFileCalls restore;
  const TemporaryFolder folder;
  std::string order;
  const FileCalls system = FileCalls::system();
  file_calls().pwrite = [&](int f, const void* d, size_t n, off_t o) {
    return order += "w", system.pwrite(f, d, n, o);
  };
  file_calls().fsync = [&](int f) {
    struct stat info {};
    ::fstat(f, &info);
    return order += S_ISDIR(info.st_mode) ? "D" : "F", system.fsync(f);
  };
  file_calls().rename = [&](const char* a, const char* b) { return order += "r", system.rename(a, b); };
  file_calls().unlink = [&](const char* p) { return order += "u", system.unlink(p); };
  write_file(folder / "file", "content");
  EXPECT_EQ(order, "wFrD");
}

struct Failure {
  const char* call;
  int error;
  const char* text;
};

TEST(AtomicFile, EveryFailureNamesPathAndRoomAndLeavesTheOldFile) {
  const Failure failures[] = {{"open", EROFS, "Read-only file system"},
                              {"open", EACCES, "Permission denied"},
                              {"open", EMFILE, "Too many open files"},
                              {"pwrite", ENOSPC, "No space left on device"},
                              {"pwrite", EDQUOT, "quota"},
                              {"pwrite", EIO, "Input/output error"},
                              {"pwrite", EFBIG, "File too large"},
                              {"pwrite", 0, "No space left on device"},
                              {"fsync", EIO, "Input/output error"},
                              {"fsync", ENOSPC, "No space left on device"},
                              {"rename", EIO, "Input/output error"},
                              {"rename", EXDEV, "cross-device"}};
  const FileCalls system = FileCalls::system();
  for (const Failure& failure : failures) {
    SCOPED_TRACE(std::string(failure.call) + " " + std::strerror(failure.error));
    const RestoreFileCalls restore;
    const TemporaryFolder folder;
    write_file(folder / "file", "old");
    const std::string call = failure.call;
    // A write that stops half-way, then fails; 0 stands for a call that writes nothing.
    const auto fail = [&] { return errno = failure.error, failure.error ? -1 : 0; };
    if (call == "open") file_calls().open = [&](const char*, int, mode_t) { return fail(); };
    if (call == "fsync") file_calls().fsync = [&](int) { return fail(); };
    if (call == "rename") file_calls().rename = [&](const char*, const char*) { return fail(); };
    if (call == "pwrite")
      file_calls().pwrite = [&](int file, const void* from, size_t, off_t offset) -> ssize_t {
        return offset < 3 ? system.pwrite(file, from, 3, offset) : fail();
      };
    const std::string text = message_of([&] { write_file(folder / "file", "new content"); });
    EXPECT_NE(text.find(failure.text), std::string::npos) << text;
    EXPECT_NE(text.find(folder / "file"), std::string::npos) << text;
    EXPECT_NE(text.find("11 bytes are needed"), std::string::npos) << text;
    EXPECT_NE(text.find(" are free in " + folder.path()), std::string::npos) << text;
    EXPECT_EQ(get(folder / "file"), "old");
    EXPECT_EQ(folder.names(), std::vector<std::string>{"file"});
  }
}

TEST(AtomicFile, SaysWhenOnlyTheFolderCouldNotBeFlushed) {
  const RestoreFileCalls restore;
  const TemporaryFolder folder;
  int calls = 0;
  file_calls().fsync = [&](int) { return ++calls == 2 ? (errno = EIO, -1) : 0; };
  EXPECT_TRUE(throws([&] { write_file(folder / "file", "new"); }, "could not be flushed"));
  EXPECT_EQ(get(folder / "file"), "new");
}

TEST(AtomicFile, SignalsAndShortWritesDoNotDisturb) {
  const RestoreFileCalls restore;
  const TemporaryFolder folder;
  const FileCalls system = FileCalls::system();
  int calls = 0;
  const auto interrupted = [&] { return ++calls % 3 != 0 ? (errno = EINTR, true) : false; };
  file_calls().open = [&](const char* p, int f, mode_t m) {
    return interrupted() ? -1 : system.open(p, f, m);
  };
  file_calls().pwrite = [&](int f, const void* d, size_t, off_t o) {
    return interrupted() ? -1 : system.pwrite(f, d, 1, o);
  };
  file_calls().fsync = [&](int f) { return interrupted() ? -1 : system.fsync(f); };
  file_calls().rename = [&](const char* a, const char* b) {
    return interrupted() ? -1 : system.rename(a, b);
  };
  write_file(folder / "file", "content");
  EXPECT_EQ(get(folder / "file"), "content");
  EXPECT_GT(calls, 20);
}

TEST(StaleTemporaries, GoUnlessTheirWriterLives) {
  const TemporaryFolder folder;
  const std::vector<std::string> foreign = {"x.tmp-1-2", ".x.tmp-",    ".x.tmp-1",     ".x.tmp-1-",
                                            ".x.tmp--1", ".x.tmp-1-a", ".x.tmp-1-2-3", "data"};
  for (const std::string& name : foreign) put(folder / name, "keep");
  fs::create_directory(folder / ".dir.tmp-1-2");
  fs::create_symlink(folder / "data", folder / ".link.tmp-1-2");
  put(folder / ".file.safetensors.tmp-123-4", "half");
  AtomicFile living(folder / "living", 1);
  // A file, and a folder in which several were being written together.
  EXPECT_EQ(remove_stale_temporaries(folder.path()),
            (std::vector<std::string>{".dir.tmp-1-2", ".file.safetensors.tmp-123-4"}));
  EXPECT_EQ(folder.names().size(), foreign.size() + 2);
  living.write("x");
  living.publish();
  EXPECT_EQ(get(folder / "living"), "x");
}

TEST(StaleTemporaries, OfAFileGoWhenItIsWrittenAgain) {
  const TemporaryFolder folder;
  put(folder / ".page.tmp-1-2", "of a writer that was killed");
  put(folder / ".other.tmp-1-2", "of another file");
  AtomicFile living(folder / "page", 1);
  write_file(folder / "page", "new");
  EXPECT_FALSE(fs::exists(folder / ".page.tmp-1-2"));
  EXPECT_TRUE(fs::exists(folder / ".other.tmp-1-2"));
  living.write("x");
  living.publish();
  EXPECT_EQ(get(folder / "page"), "x");
}

/// A real full file system, where the machine lets us mount one.
TEST(AtomicFile, SurvivesARealFullDisk) {
  const TemporaryFolder folder;
  if (::mount("tmpfs", folder.path().c_str(), "tmpfs", 0, "size=1m") != 0)
    GTEST_SKIP() << "cannot mount a small tmpfs: " << std::strerror(errno);
  struct Unmount {
    const TemporaryFolder& folder;
    ~Unmount() { ::umount2(folder.path().c_str(), MNT_DETACH); }
  } const unmount{folder};
  const std::string path = folder / "file", much(2 << 20, 'x');
  write_file(path, "old");
  EXPECT_TRUE(throws([&] { write_file(path, much); }, "2097152 bytes are needed, 0 were written"));
  const RestoreFileCalls restore;
  file_calls().free_bytes = [](const char*) { return uint64_t(-1); };  // past the early check
  EXPECT_TRUE(throws([&] { write_file(path, much); }, "No space left on device"));
  EXPECT_EQ(get(path), "old");
  EXPECT_EQ(folder.names(), std::vector<std::string>{"file"});
}

}  // namespace
}  // namespace tessera::io::test
