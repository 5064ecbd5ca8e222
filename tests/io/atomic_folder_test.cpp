#include <fcntl.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <map>

#include "io/weights.h"
#include "runtime/interrupt.h"
#include "tests/io/files.h"

// Several files appear together or not at all, whatever happens on the way.

namespace tessera::io::test {
namespace {

using Existing = AtomicFolder::Existing;

/// Every file below a folder with its content, hidden ones too.
std::map<std::string, std::string> content_of(const std::string& folder) {
  std::map<std::string, std::string> content;
  for (const auto& entry : fs::recursive_directory_iterator(folder))
    content[fs::relative(entry.path(), folder).string()] =
        entry.is_directory() ? "(folder)" : get(entry.path().string());
  return content;
}
using Content = std::map<std::string, std::string>;

void publish(const std::string& folder, Existing existing, const Content& files) {
  AtomicFolder atomic(folder, existing);
  for (const auto& [name, text] : files) write_file(atomic.path() + "/" + name, text);
  atomic.publish();
}

const Content kOld = {{"config.json", "old"}, {"only-old", "x"}, {"weights", "old"}};
const Content kNew = {{"config.json", "new"}, {"weights", "new"}, {"index.json", "i"}};

/// Where a folder "model" lies next to a file that is not ours.
class AtomicFolders : public ::testing::Test {
 protected:
  void SetUp() override {
    put(root / "other", "mine");
    fs::create_directory(model);
    for (const auto& [name, text] : kOld) put(model + "/" + name, text);
    before = content_of(root.path());
  }
  Content with_model(const Content& files) const {
    Content all = {{"other", "mine"}, {"model", "(folder)"}};
    for (const auto& [name, text] : files) all["model/" + name] = text;
    return all;
  }
  Content merged() const {
    Content all = kOld;
    for (const auto& [name, text] : kNew) all[name] = text;
    return with_model(all);
  }
  const RestoreFileCalls restore;
  const TemporaryFolder root;
  const std::string model = root / "model";
  Content before;
};

TEST_F(AtomicFolders, TakeThePlaceOfTheOldOneOrAreMergedIntoIt) {
  publish(model, Existing::merge, kNew);
  EXPECT_EQ(content_of(root.path()), merged());
  publish(model + "/", Existing::replace, kNew);
  EXPECT_EQ(content_of(root.path()), with_model(kNew));
  publish(root / "a/b/c", Existing::replace, {{"x", "1"}});
  publish(root / "a/b/d", Existing::merge, {{"x", "1"}});
  EXPECT_EQ(
      content_of(root / "a"),
      (Content{{"b", "(folder)"}, {"b/c", "(folder)"}, {"b/c/x", "1"}, {"b/d", "(folder)"}, {"b/d/x", "1"}}));
}

/// Also one that appears between the look and the call that gives the name.
TEST_F(AtomicFolders, AreMergedIntoAFolderThatAppearsMeanwhile) {
  const std::string late = root / "late";
  const auto appear = [&] {
    fs::create_directory(late);
    put(late + "/notes", "mine");
  };
  for (const bool at_the_last : {false, true}) {
    AtomicFolder atomic(late, Existing::merge);
    for (const auto& [name, text] : kNew) write_file(atomic.path() + "/" + name, text);
    if (!at_the_last) appear();
    file_calls().rename = [&](const char* from, const char* to) {
      if (std::string(to) == late && !fs::exists(late)) appear();
      return std::rename(from, to);
    };
    atomic.publish();
    file_calls() = FileCalls::system();
    Content expected = kNew;
    expected["notes"] = "mine";
    EXPECT_EQ(content_of(late), expected) << at_the_last;
    fs::remove_all(late);
    EXPECT_EQ(content_of(root.path()), before);
  }
}

/// As a run locks its folder, in which it writes its model at the end.
TEST_F(AtomicFolders, AreMergedIntoOneThatThisProcessHasLocked) {
  const int lock = ::open(model.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  ASSERT_EQ(::flock(lock, LOCK_EX), 0);
  publish(model, Existing::merge, kNew);
  EXPECT_EQ(content_of(root.path()), merged());
  ::close(lock);
}

TEST_F(AtomicFolders, OfTwoWritersTheSecondIsRefused) {
  const std::string folder = root / "weights";
  for (const bool is_there : {false, true}) {
    if (is_there) fs::create_directory(folder);
    AtomicFolder first(folder, Existing::merge, check_no_weights),
        second(folder, Existing::merge, check_no_weights);
    write_file(first.path() + "/model.safetensors", "first");
    write_file(second.path() + "/model.safetensors", "second");
    first.publish();
    EXPECT_TRUE(throws([&] { second.publish(); }, "has model.safetensors already"));
    EXPECT_TRUE(throws([&] { AtomicFolder(folder, Existing::merge, check_no_weights); }, "already"));
    EXPECT_EQ(content_of(folder), (Content{{"model.safetensors", "first"}}));
    fs::remove_all(folder);
    EXPECT_EQ(content_of(root.path()), before);
  }
}

TEST_F(AtomicFolders, KeepALinkAndThePermissions) {
  fs::create_directory_symlink("model", root / "link");
  fs::permissions(model, fs::perms::owner_all);
  publish(root / "link", Existing::replace, kNew);
  EXPECT_TRUE(fs::is_symlink(root / "link"));
  EXPECT_EQ(get(model + "/config.json"), "new");
  EXPECT_EQ(fs::status(model).permissions(), fs::perms::owner_all);
}

TEST_F(AtomicFolders, DoNotReplaceOneThatThisUserMayNotWriteTo) {
  fs::permissions(root.path(), fs::perms::all);
  const UnprivilegedUser user;
  const std::string kept = root / "kept";
  publish(kept, Existing::replace, {{"x", "old"}});
  fs::permissions(kept, fs::perms::owner_read | fs::perms::owner_exec);
  for (const Existing existing : {Existing::replace, Existing::merge})
    EXPECT_TRUE(throws([&] { publish(kept, existing, {{"x", "new"}}); }, "kept is read-only for this user"));
  fs::permissions(kept, fs::perms::owner_all);
  EXPECT_EQ(content_of(kept), (Content{{"x", "old"}}));
  EXPECT_EQ(root.names(), (std::vector<std::string>{"kept", "model", "other"}));
}

TEST_F(AtomicFolders, ThatAreGivenUpLeaveEverythingAsItWas) {
  for (const Existing existing : {Existing::replace, Existing::merge}) {
    {
      AtomicFolder atomic(model, existing);
      write_file(atomic.path() + "/config.json", "new");
    }
    EXPECT_EQ(content_of(root.path()), before);
    {
      AtomicFolder atomic(root / "new/deep", existing);
      write_file(atomic.path() + "/config.json", "new");
    }
    EXPECT_EQ(content_of(root.path()), before);  // the parent that was made for it is gone too
  }
  EXPECT_TRUE(throws([&] { AtomicFolder atomic(root / "other", Existing::replace); }, "other is a file"));
}

TEST_F(AtomicFolders, WithoutAnExchangeTheOldOneComesBackIfTheNewOneCannotTakeItsPlace) {
  file_calls().exchange = [](const char*, const char*) {
    errno = EINVAL;
    return -1;
  };
  publish(model, Existing::replace, kNew);
  EXPECT_EQ(content_of(root.path()), with_model(kNew));
  publish(model, Existing::replace, kOld);
  ASSERT_EQ(content_of(root.path()), before);
  int renames = 0;
  file_calls().rename = [&](const char* from, const char* to) {
    if (std::string(to).ends_with("/model") && ++renames == 1) {  // the new one
      errno = EIO;
      return -1;
    }
    return std::rename(from, to);
  };
  EXPECT_TRUE(throws([&] { publish(model, Existing::replace, kNew); }, "cannot rename the new folder"));
  EXPECT_EQ(renames, 2);
  EXPECT_EQ(content_of(root.path()), before);
}

TEST_F(AtomicFolders, AMergeThatFailsHalfWayIsUndone) {
  for (int failing = 0;; ++failing) {
    int renames = 0;
    bool failed = false;
    file_calls() = FileCalls::system();
    file_calls().rename = [&](const char* from, const char* to) {
      // Those of write_file have their own tests.
      const bool publishes = std::string(to).find("/.files-to-merge.tmp-") == std::string::npos ||
                             std::string(to).find("/replaced/") != std::string::npos;
      if (publishes && renames++ == failing) {
        failed = true;
        errno = ENOSPC;
        return -1;
      }
      return std::rename(from, to);
    };
    const std::string error = message_of([&] { publish(model, Existing::merge, kNew); });
    if (!failed) {
      EXPECT_EQ(error, "");
      EXPECT_EQ(content_of(root.path()), merged());
      EXPECT_EQ(failing, 5);  // two are replaced, three come
      return;
    }
    EXPECT_NE(error.find("cannot rename a new file"), std::string::npos) << error;
    EXPECT_EQ(content_of(root.path()), before) << failing;
  }
}

/// A process is ended at each of the calls that give names; afterwards the folder is the old one or the new
/// one, and of the rest nothing is left.
TEST_F(AtomicFolders, SurviveAKillAtEveryCall) {
  for (const bool exchanges : {true, false}) {
    int olds = 0, news = 0;
    for (int at = 0;; ++at) {
      fs::remove_all(model);
      fs::create_directory(model);
      for (const auto& [name, text] : kOld) put(model + "/" + name, text);
      const pid_t child = ::fork();
      if (child == 0) {
        int calls = 0;
        const auto around = [&](auto&& call) {
          if (calls++ == at) ::_exit(42);
          return call();
        };
        file_calls().rename = [&](const char* from, const char* to) {
          return around([&] { return std::rename(from, to); });
        };
        file_calls().exchange = [&](const char* a, const char* b) {
          return around([&] {
            errno = ENOSYS;
            return exchanges ? ::renameat2(AT_FDCWD, a, AT_FDCWD, b, RENAME_EXCHANGE) : -1;
          });
        };
        file_calls().fsync = [&](int file) { return around([&] { return ::fsync(file); }); };
        try {
          publish(model, Existing::replace, kNew);
        } catch (...) {
          ::_exit(1);
        }
        ::_exit(0);
      }
      int status = 0;
      ::waitpid(child, &status, 0);
      remove_stale_temporaries(root.path());
      const Content after = content_of(root.path());
      EXPECT_TRUE(after == before || after == with_model(kNew)) << exchanges << " call " << at;
      (after == before ? olds : news) += 1;
      if (WEXITSTATUS(status) != 42) {
        EXPECT_EQ(WEXITSTATUS(status), 0);
        break;
      }
    }
    EXPECT_GE(olds, 5);
    EXPECT_GE(news, 2);  // killed after the exchange, and not killed
  }
}

TEST_F(AtomicFolders, OfALivingWriterAreNotTouched) {
  AtomicFolder atomic(model, Existing::replace);
  write_file(atomic.path() + "/config.json", "new");
  EXPECT_TRUE(remove_stale_temporaries(root.path()).empty());
  EXPECT_TRUE(fs::exists(atomic.path() + "/config.json"));
  // A folder that only looks like one of ours is not removed by a writer of another name.
  fs::create_directory(root / ".notes.tmp-1-2");
  AtomicFolder other(root / "second", Existing::replace);
  EXPECT_TRUE(fs::exists(root / ".notes.tmp-1-2"));
}

// ---- shards of weights ----

std::vector<WeightToWrite> five_weights(std::function<void(int)> on_make = {}) {
  std::vector<WeightToWrite> weights;
  for (int i = 0; i < 5; ++i)
    weights.push_back({{"t" + std::to_string(i), DType::f32, {3}}, [=] {
                         if (on_make) on_make(i);
                         return Tensor::from(std::vector<float>{1, 2, 3}, {3});
                       }});
  return weights;
}

TEST_F(AtomicFolders, ShardsOfASaveThatFailsAreRemoved) {
  const auto save = [](const std::string& folder) { save_weights(folder, five_weights(), 24); };
  for (const std::string& folder : {root / "fresh", model}) {
    for (int failing = 0;; ++failing) {
      int writes = 0;
      file_calls() = FileCalls::system();
      file_calls().pwrite = [&](int file, const void* from, size_t bytes, off_t offset) -> ssize_t {
        if (writes++ < failing) return ::pwrite(file, from, bytes, offset);
        errno = ENOSPC;
        return -1;
      };
      const std::string error = message_of([&] { save(folder); });
      if (error.empty()) {
        EXPECT_GE(failing, 9);  // five tensors, three heads and the index
        EXPECT_TRUE(fs::exists(folder + "/model-00003-of-00003.safetensors"));
        break;
      }
      EXPECT_NE(error.find("No space left"), std::string::npos) << error;
      EXPECT_NE(error.find("write: " + folder + "/model"), std::string::npos) << error;
      EXPECT_EQ(error.find(".tmp-"), std::string::npos) << error;  // an unknown name
      const Content after = content_of(root.path());
      EXPECT_TRUE(std::ranges::none_of(after, [](const auto& file) {
        return file.first.find("fresh") != std::string::npos || file.first.find("tmp") != std::string::npos;
      })) << failing;
      if (folder == model) EXPECT_EQ(content_of(model).size(), kOld.size()) << failing;
    }
    fs::remove_all(root / "fresh");
  }
}

TEST_F(AtomicFolders, ShardsOfASaveThatIsInterruptedAreRemoved) {
  const InterruptGuard guard;
  int made = 0;
  EXPECT_TRUE(throws(
      [&] {
        save_weights(root / "fresh", five_weights([&](int i) {
                       made += 1;
                       if (i == 3) std::raise(SIGINT);
                     }),
                     1);
      },
      "interrupted by Ctrl-C"));
  EXPECT_EQ(made, 4);
  EXPECT_EQ(content_of(root.path()), before);
}

}  // namespace
}  // namespace tessera::io::test
