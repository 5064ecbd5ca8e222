#include "io/checkpoint_folder.h"

#include "tests/errors.h"
#include "tests/io/files.h"

namespace tessera::io::test {
namespace {

TEST(CheckpointFolder, KeepsTheNewestAndFindsThem) {
  const TemporaryFolder base;
  const CheckpointFolder folder(base / "run/checkpoints", 3);
  EXPECT_FALSE(folder.latest().step.has_value());
  EXPECT_TRUE(folder.latest().warnings.empty());
  for (const int64_t step : {int64_t{0}, int64_t{5}, int64_t{999'999}, int64_t{1'000'000}, 1'234'567'890'123})
    folder.save(step, Checkpoint::of(step));
  EXPECT_EQ(folder.steps(), (std::vector<int64_t>{1'234'567'890'123, 1'000'000, 999'999}));
  EXPECT_EQ(folder.file_of(7), base / "run/checkpoints/step-000007.safetensors");
  int64_t step = 0;
  load(folder.latest().file, step);
  EXPECT_EQ(step, 1'234'567'890'123);
  // A run that went back to an older step keeps its own newest; the later file is not its to remove.
  folder.save(999'998, Checkpoint::of(step));
  folder.save(1'000'001, Checkpoint::of(step));
  EXPECT_EQ(folder.steps(), (std::vector<int64_t>{1'234'567'890'123, 1'000'001, 1'000'000, 999'999}));
  EXPECT_TRUE(throws([&] { folder.save(-1, Checkpoint::of(step)); }, "step -1 is negative"));
  EXPECT_TRUE(throws([&] { CheckpointFolder(base.path(), 0); }, "0 to keep, expected at least 1"));
}

TEST(CheckpointFolder, SparesAStepWhileItIsTold) {
  const TemporaryFolder base;
  const CheckpointFolder folder(base.path(), 2);
  for (const int64_t step : {1, 2, 3, 4}) folder.save(step, Checkpoint::of(step), 1);
  EXPECT_EQ(folder.steps(), (std::vector<int64_t>{4, 3, 1}));
  folder.save(5, Checkpoint::of(int64_t{5}), 5);
  EXPECT_EQ(folder.steps(), (std::vector<int64_t>{5, 4}));
}

TEST(CheckpointFolder, SaysBeforeASaveThatItMayNotWrite) {
  const TemporaryFolder base;
  fs::permissions(base.path(), fs::perms::all);
  const UnprivilegedUser user;
  const CheckpointFolder folder(base / "checkpoints");
  folder.check_writable();
  fs::permissions(folder.path(), fs::perms::owner_read | fs::perms::owner_exec);
  EXPECT_TRUE(throws([&] { folder.check_writable(); }, "checkpoints is read-only for this user"));
  fs::permissions(folder.path(), fs::perms::owner_all);
}

TEST(CheckpointFolder, FallsBackLoudlyAndNeverToNothing) {
  const TemporaryFolder base;
  const CheckpointFolder folder(base.path(), 3);
  for (const int64_t step : {1, 2, 3}) folder.save(step, Checkpoint::of(step));
  std::string bytes = get(folder.file_of(3));
  bytes.back() ^= 4;
  put(folder.file_of(3), bytes);
  put(folder.file_of(2), bytes.substr(0, 50));
  const auto latest = folder.latest();
  EXPECT_EQ(latest.step, 1);
  ASSERT_EQ(latest.warnings.size(), 2u);
  EXPECT_NE(latest.warnings[0].find("passed over " + folder.file_of(3)), std::string::npos);
  EXPECT_NE(latest.warnings[1].find("the file is cut short"), std::string::npos) << latest.warnings[1];
  fs::resize_file(folder.file_of(1), 0);
  EXPECT_TRUE(throws([&] { folder.latest(); }, "none of the 3 in " + base.path() + " can be loaded"));
}

TEST(CheckpointFolder, LooksOnlyAtItsOwnNames) {
  const TemporaryFolder base;
  for (const char* name :
       {"step-.safetensors", "step-7.safetensors", "step-0000007.safetensors", "step--00007.safetensors",
        "step-00000x.safetensors", "step-000007.safetensors.bak", "step-99999999999999999999.safetensors",
        "notes.txt", ".step-000009.safetensors.tmp-1-1"})
    put(base / name, "x");
  const CheckpointFolder folder(base.path());
  EXPECT_TRUE(folder.steps().empty());
  EXPECT_FALSE(folder.latest().step.has_value());
  EXPECT_EQ(base.names().size(), 8u);  // the temporary is gone
}

TEST(CheckpointFolder, AFileThatDoesNotReadBackStopsTheSaveAndKeepsTheOldOnes) {
  const RestoreFileCalls restore;
  const TemporaryFolder base;
  const CheckpointFolder folder(base.path(), 1);
  folder.save(1, Checkpoint::of(int64_t{1}));
  const FileCalls system = FileCalls::system();
  file_calls().pwrite = [&](int file, const void* from, size_t bytes, off_t offset) {
    std::string wrong(static_cast<const char*>(from), bytes);
    wrong.back() ^= 1;  // a disk that lies
    return system.pwrite(file, wrong.data(), bytes, offset);
  };
  EXPECT_NE(message_of([&] { folder.save(2, Checkpoint::of(int64_t{2})); }), "");
  EXPECT_EQ(folder.latest().step, 1);
  EXPECT_EQ(folder.latest().warnings.size(), 1u);
}

}  // namespace
}  // namespace tessera::io::test
