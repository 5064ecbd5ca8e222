#include <fcntl.h>
#include <sched.h>
#include <sys/wait.h>

#include <map>

#include "io/checkpoint_folder.h"
#include "tests/errors.h"
#include "tests/io/files.h"

// A save is killed, or fails, at each of its system calls in turn, until one runs to the end. After each the
// newest checkpoint that was published must load, and hold what was saved under that step.

namespace tessera::io::test {
namespace {

constexpr int kCrashed = 42;

Checkpoint state_at(int64_t step) {
  Checkpoint checkpoint;
  checkpoint.add("weight", random_bits({16, 8}, DType::f32, uint32_t(step)));
  checkpoint.add("mask", random_bits({7}, DType::boolean, uint32_t(step) + 1));
  checkpoint.add("step", step);
  return checkpoint;
}

::testing::AssertionResult holds(const std::string& file, int64_t step) {
  const Checkpoint read = Checkpoint::read(file), saved = state_at(step);
  if (read.get<int64_t>("step") != step)
    return ::testing::AssertionFailure() << "step " << read.get<int64_t>("step");
  for (const char* name : {"weight", "mask"})
    if (const auto equal = same(read.get<Tensor>(name), saved.get<Tensor>(name)); !equal) return equal;
  return ::testing::AssertionSuccess();
}

enum class When { before, half_way, after };

/// Puts `interrupt()` before, in the middle of, or after the call number `index` of all that are made.
class Interruption {
 public:
  Interruption(int index, When when, std::function<void()> interrupt)
      : index_(index), when_(when), interrupt_(std::move(interrupt)) {
    FileCalls& calls = file_calls();
    calls.open = [this](const char* p, int f, mode_t m) {
      return around([&] { return system_.open(p, f, m); });
    };
    calls.pread = [this](int f, void* to, size_t n, off_t o) {
      return around([&] { return system_.pread(f, to, n, o); });
    };
    calls.pwrite = [this](int f, const void* from, size_t n, off_t o) {
      unflushed_.emplace(f, ::dup(f));  // still there when the file is closed
      return around([&] { return system_.pwrite(f, from, n, o); },
                    [&] { return system_.pwrite(f, from, n / 2, o); });
    };
    calls.fsync = [this](int f) {
      return around([&] {
        if (flushes_) unflushed_.erase(f);
        return system_.fsync(f);
      });
    };
    calls.close = [this](int f) { return around([&] { return system_.close(f); }); };
    calls.rename = [this](const char* a, const char* b) {
      return around([&] { return system_.rename(a, b); });
    };
    calls.unlink = [this](const char* p) { return around([&] { return system_.unlink(p); }); };
  }
  ~Interruption() { file_calls() = FileCalls::system(); }

  int made() const { return made_; }
  /// What a power failure does to bytes that were not flushed, though their file may have a name by then.
  void lose_unflushed() const {
    for (const auto& [closed, file] : unflushed_)
      if (::ftruncate(file, 0) != 0) ::_exit(1);
  }
  void flush_nothing() { flushes_ = false; }

 private:
  template <class Whole>
  auto around(Whole&& whole) -> decltype(whole()) {
    return around(whole, whole);
  }
  template <class Whole, class Half>
  auto around(Whole&& whole, Half&& half) -> decltype(whole()) {
    const bool here = made_++ == index_;
    if (here && when_ == When::before) {
      interrupt_();
      errno = EIO;
      return decltype(whole())(-1);
    }
    const auto result = here && when_ == When::half_way ? half() : whole();
    if (here) interrupt_();
    return result;
  }

  int index_;
  When when_;
  std::function<void()> interrupt_;
  int made_ = 0;
  bool flushes_ = true;
  std::map<int, int> unflushed_;
  const FileCalls system_ = FileCalls::system();
};

/// Saves step 30 into a folder that has 10 and 20 and keeps two, in a child that is stopped at call `index`.
/// Returns whether it was stopped.
bool crash_a_save(const TemporaryFolder& folder, int index, When when, bool power_fails, bool flushes) {
  const pid_t child = ::fork();
  if (child == 0) {
    Interruption* self = nullptr;
    Interruption interruption(index, when, [&] {
      if (power_fails) self->lose_unflushed();
      ::_exit(kCrashed);
    });
    self = &interruption;
    if (!flushes) interruption.flush_nothing();
    try {
      CheckpointFolder(folder.path(), 2).save(30, state_at(30));
    } catch (...) {
      ::_exit(1);
    }
    ::_exit(0);
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
  EXPECT_NE(WEXITSTATUS(status), 1);
  return WEXITSTATUS(status) == kCrashed;
}

TEST(CheckpointCrash, AfterEachCallThePublishedCheckpointLoads) {
  for (const When when : {When::before, When::half_way, When::after})
    for (const bool power_fails : {false, true}) {
      int published = 0, crashes = 0;
      for (bool crashed = true; crashed; ++crashes) {
        SCOPED_TRACE("call " + std::to_string(crashes) + ", when " + std::to_string(int(when)));
        const TemporaryFolder folder;
        CheckpointFolder(folder.path(), 2).save(10, state_at(10));
        CheckpointFolder(folder.path(), 2).save(20, state_at(20));
        crashed = crash_a_save(folder, crashes, when, power_fails, true);
        const CheckpointFolder after(folder.path(), 2);
        const auto latest = after.latest();
        ASSERT_TRUE(latest.step.has_value());
        EXPECT_TRUE(latest.warnings.empty()) << latest.warnings.front();
        EXPECT_TRUE(*latest.step == 20 || *latest.step == 30) << *latest.step;
        EXPECT_TRUE(holds(latest.file, *latest.step));
        published += *latest.step == 30;
        // What the killed save left is gone, and the older ones are as they were.
        for (const std::string& name : folder.names()) EXPECT_EQ(name.find("step-"), 0u) << name;
        for (const int64_t step : after.steps()) EXPECT_TRUE(holds(after.file_of(step), step));
        EXPECT_GE(after.steps().size(), 2u);
        EXPECT_NO_THROW(CheckpointFolder(folder.path(), 2).save(30, state_at(30)));
      }
      EXPECT_GT(crashes, 15);   // open, writes, fsync, rename, close, folder, reading back, unlink
      EXPECT_GT(published, 5);  // both sides of the rename were seen
      EXPECT_LT(published, crashes - 5);
    }
}

/// The check above must be able to fail: without fsync a power failure leaves a published file without its
/// bytes.
TEST(CheckpointCrash, ASaveThatDoesNotFlushIsCaught) {
  int lost = 0;
  bool crashed = true;
  for (int index = 0; crashed; ++index) {
    const TemporaryFolder folder;
    CheckpointFolder(folder.path(), 2).save(20, state_at(20));
    crashed = crash_a_save(folder, index, When::before, true, false);
    const auto latest = CheckpointFolder(folder.path(), 2).latest();
    lost += !latest.warnings.empty();
    EXPECT_TRUE(holds(latest.file, *latest.step));
  }
  EXPECT_GT(lost, 0);
}

TEST(CheckpointCrash, AfterEachFailingCallTheFolderIsWhole) {
  bool failed = true;
  int failures = 0, index = 0;
  for (; failed; ++index) {
    SCOPED_TRACE("call " + std::to_string(index));
    const TemporaryFolder folder;
    CheckpointFolder(folder.path(), 2).save(10, state_at(10));
    CheckpointFolder(folder.path(), 2).save(20, state_at(20));
    failed = false;
    std::string error;
    {
      Interruption interruption(index, When::before, [&] { failed = true; });
      error = message_of([&] { CheckpointFolder(folder.path(), 2).save(30, state_at(30)); });
    }
    failures += !error.empty();
    EXPECT_TRUE(error.empty() || error.find(folder.path()) != std::string::npos) << error;
    for (const std::string& name : folder.names()) EXPECT_EQ(name.find("step-"), 0u) << name;
    const auto latest = CheckpointFolder(folder.path(), 2).latest();
    EXPECT_TRUE(latest.warnings.empty());
    EXPECT_TRUE(holds(latest.file, *latest.step));
    EXPECT_TRUE(!error.empty() || *latest.step == 30);
  }
  EXPECT_GT(failures, 10);
  EXPECT_LT(failures, index);  // a close that fails after fsync loses nothing
}

/// A child that is really killed, between one save that it has reported and the next that it would report.
TEST(CheckpointCrash, KilledAtRandomMoments) {
  const TemporaryFolder folder;
  std::mt19937 random(1);
  int64_t newest = 0;
  CheckpointFolder(folder.path(), 2).save(newest, state_at(newest));
  for (int round = 0; round < 40; ++round) {
    int saved[2];
    ASSERT_EQ(::pipe(saved), 0);
    const pid_t child = ::fork();
    if (child == 0) {
      CheckpointFolder saver(folder.path(), 2);
      for (int64_t step = newest + 1;; ++step) {
        saver.save(step, state_at(step));
        if (::write(saved[1], "", 1) != 1) ::_exit(1);
      }
    }
    char byte = 0;
    for (auto saves = random() % 4; saves > 0; --saves) ASSERT_EQ(::read(saved[0], &byte, 1), 1);
    for (auto turns = random() % 100; turns > 0; --turns) ::sched_yield();
    ::kill(child, SIGKILL);
    ::close(saved[0]), ::close(saved[1]);
    ::waitpid(child, nullptr, 0);
    const auto latest = CheckpointFolder(folder.path(), 2).latest();
    ASSERT_TRUE(latest.step && latest.warnings.empty());
    EXPECT_GE(*latest.step, newest);
    EXPECT_TRUE(holds(latest.file, *latest.step));
    newest = *latest.step;
    for (const std::string& name : folder.names()) EXPECT_EQ(name.find("step-"), 0u) << name;
  }
  EXPECT_GT(newest, 0);
}

}  // namespace
}  // namespace tessera::io::test
