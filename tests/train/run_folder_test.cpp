#include "train/run_folder.h"

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <thread>

#if defined(TESSERA_WITH_SQLITE)
#include <sqlite3.h>
#endif

#include "report/run_table.h"
#include "tests/errors.h"
#include "tests/folder.h"

namespace tessera::train {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

TEST(RunFolder, CreateCountsUpWhereANameIsTaken) {
  const TemporaryFolder root;
  EXPECT_EQ(RunFolder::create(root / "deep/er", "r").path(), root / "deep/er/r");
  EXPECT_EQ(RunFolder::create(root / "deep/er", "r").path(), root / "deep/er/r-2");
  EXPECT_EQ(RunFolder::create(root / "deep/er", "r-2").path(), root / "deep/er/r-2-2");
  EXPECT_EQ(RunFolder::create(root / "deep/er", "r").path(), root / "deep/er/r-3");
  EXPECT_TRUE(fs::is_directory(root / "deep/er/r-3/checkpoints"));
}

TEST(RunFolder, CreateInSeveralThreadsGivesEachItsOwn) {
  const TemporaryFolder root;
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) threads.emplace_back([&] { RunFolder::create(root.path(), "r"); });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(std::distance(fs::directory_iterator(root.path()), fs::directory_iterator()), 8);
}

TEST(RunFolder, CreateRefusesWhatIsNoPlainNameAndWhatIsInTheWay) {
  const TemporaryFolder root;
  for (const char* name : {"", ".", "..", "a/b", "/a", "../a"})
    EXPECT_NE(message_of([&] { RunFolder::create(root / "runs", name); }).find("plain name"),
              std::string::npos)
        << name;
  EXPECT_FALSE(fs::exists(root / "runs"));
  put(root / "file", "x");
  EXPECT_NE(message_of([&] { RunFolder::create(root / "file", "r"); }).find("file"), std::string::npos);
  EXPECT_NE(message_of([&] { RunFolder::create(root.path(), "file"); }).find("file"), std::string::npos);
  EXPECT_NE(message_of([&] { RunFolder::create(root.path(), std::string(300, 'n')); }), "");
}

TEST(RunFolder, CreateFollowsALinkThatLeadsToNothing) {
  const TemporaryFolder root;
  fs::create_symlink("disk/runs", root / "runs");
  RunFolder::create(root / "runs", "r");
  EXPECT_TRUE(fs::is_directory(root / "disk/runs/r/checkpoints"));
}

TEST(RunFolder, OneThatMayNotBeReadIsNotCalledNone) {
  const TemporaryFolder root;
  fs::permissions(root.path(), fs::perms::all);
  const UnprivilegedUser user;
  const RunFolder run = RunFolder::create(root.path(), "r");
  run.write_settings({{"seed", 1}});
  fs::permissions(run.path(), fs::perms::none);
  EXPECT_NE(message_of([&] { RunFolder::open(run.path()); }).find("Permission denied"), std::string::npos);
  fs::permissions(run.path(), fs::perms::owner_all);
}

TEST(RunFolder, SettingsComeBackAndGarbageIsNamed) {
  const TemporaryFolder root;
  EXPECT_NE(
      message_of([&] {
        RunFolder::open(root.path());
      }).find("no run.json; name the folder of a run (runs/...), or start the run again if it was killed"),
      std::string::npos);
  const RunFolder run = RunFolder::create(root.path(), "r");
  const json settings = {{"seed", ~uint64_t(0)}, {"lr", 0.1}, {"name", "\xC3\xA4\n\""}};
  run.write_settings(settings);
  EXPECT_EQ(RunFolder::open(run.path()).settings(), settings);
  // As a shell completes it, and from within: the name and the folder above are the same.
  EXPECT_EQ(RunFolder::open(run.path() / "").path(), run.path());
  EXPECT_EQ(RunFolder::open(run.path() / ".").path(), std::filesystem::canonical(run.path()));
  for (const char* bad : {"{", "[1]", "3", "{} {}", "nul"}) {
    put(run.path() / "run.json", bad);
    EXPECT_NE(message_of([&] {
                run.settings();
              }).find("run.json: it is not a JSON object; restore it, or remove the run's folder"),
              std::string::npos)
        << bad;
  }
}

TEST(Metrics, ComeBackExactlyAndNonFiniteOnesAsNaN) {
  const TemporaryFolder root;
  const RunFolder run = RunFolder::create(root.path(), "r");
  EXPECT_TRUE(run.metrics().empty());
  run.append({1, {{"loss", 0.1}, {"lr", 1e-300}}});
  run.append({2, {{"loss", std::nan("")}, {"lr", std::numeric_limits<double>::infinity()}}});
  const auto records = run.metrics();
  ASSERT_EQ(records.size(), 2u);
  EXPECT_EQ(records[0].step, 1);
  EXPECT_EQ(records[0].values.at("loss"), 0.1);
  EXPECT_EQ(records[0].values.at("lr"), 1e-300);
  EXPECT_TRUE(std::isnan(records[1].values.at("loss")));
  EXPECT_TRUE(std::isnan(records[1].values.at("lr")));
  // Any JSON reader takes the file: NaN is no JSON.
  EXPECT_TRUE(get(run.path() / "metrics.jsonl").find("\"loss\":null") != std::string::npos);
}

TEST(Metrics, ATornOrForeignLineIsLeftOut) {
  const TemporaryFolder root;
  const RunFolder run = RunFolder::create(root.path(), "r");
  run.append({1, {{"loss", 3}}});
  run.append({2, {{"loss", 2}}});
  const std::string whole = get(run.path() / "metrics.jsonl");
  const size_t last = whole.find('\n') + 1;
  for (size_t length = last; length < whole.size() - 1; ++length) {  // killed at any byte of the second line
    put(run.path() / "metrics.jsonl", whole.substr(0, length));
    EXPECT_EQ(run.metrics().size(), 1u) << length;
  }
  put(run.path() / "metrics.jsonl",
      "[1]\n{\"loss\":1}\n{\"step\":\"one\"}\n{\"step\":1.5}\n\n\x01\n" + whole);
  EXPECT_EQ(run.metrics().size(), 2u);
}

TEST(Metrics, ALineThatCannotBeWrittenSaysWhy) {
  const TemporaryFolder root;
  const RunFolder run = RunFolder::create(root.path(), "r");
  fs::remove_all(run.path());
  const std::string gone = message_of([&] { run.append({1, {{"loss", 2}}}); });
  EXPECT_NE(gone.find("metrics.jsonl: cannot append 22 bytes: No such file or directory"), std::string::npos)
      << gone;
  fs::create_directory(run.path());
  fs::create_symlink("/dev/full", run.path() / "metrics.jsonl");
  const std::string full = message_of([&] { run.append({1, {{"loss", 2}}}); });
  EXPECT_NE(full.find("No space left on device"), std::string::npos) << full;
}

TEST(Metrics, TheLastLineIsReplacedByAFullerOne) {
  const TemporaryFolder root;
  const RunFolder run = RunFolder::create(root.path(), "r");
  run.append({1, {{"loss", 2.0}}});
  run.append({2, {{"loss", 1.0}, {"unevaluated", 1}}});
  run.replace_last({2, {{"loss", 1.0}, {"eval_nll", 0.5}}});
  const auto records = run.metrics();
  ASSERT_EQ(records.size(), 2u);
  EXPECT_EQ(records[0].values, (std::map<std::string, double>{{"loss", 2.0}}));
  EXPECT_EQ(records[1].values, (std::map<std::string, double>{{"eval_nll", 0.5}, {"loss", 1.0}}));
}

TEST(Metrics, TruncateKeepsWhatIsUpToTheStep) {
  const TemporaryFolder root;
  const RunFolder run = RunFolder::create(root.path(), "r");
  for (int step = 1; step <= 5; ++step) run.append({step, {{"loss", 1.0 / step}}});
  const std::string whole = get(run.path() / "metrics.jsonl");
  run.truncate_metrics(9);
  EXPECT_EQ(get(run.path() / "metrics.jsonl"), whole);
  put(run.path() / "metrics.jsonl", whole + "{\"step\":\"six\"}\n{\"step\":3,\"lo");
  run.truncate_metrics(3);
  const auto records = run.metrics();
  ASSERT_EQ(records.size(), 3u);
  EXPECT_EQ(records.back().step, 3);
  EXPECT_EQ(records.back().values.at("loss"), 1.0 / 3);
  EXPECT_TRUE(get(run.path() / "metrics.jsonl").ends_with("}\n"));  // the next line starts on its own
  run.append({4, {{"loss", 9}}});
  EXPECT_EQ(run.metrics().size(), 4u);
  run.append({5, {{"loss", 9}, {"interrupted", 1}}});  // a stop between two logged steps
  run.truncate_metrics(5);
  EXPECT_EQ(run.metrics().back().step, 4);
  run.truncate_metrics(0);
  EXPECT_EQ(get(run.path() / "metrics.jsonl"), "");
}

#if defined(TESSERA_WITH_SQLITE)
std::vector<std::vector<std::string>> query(const fs::path& path, const char* sql) {
  sqlite3* handle = nullptr;
  EXPECT_EQ(sqlite3_open(path.c_str(), &handle), SQLITE_OK);
  std::vector<std::vector<std::string>> rows;
  const auto collect = [](void* to, int columns, char** values, char**) {
    auto& row = static_cast<std::vector<std::vector<std::string>>*>(to)->emplace_back();
    for (int i = 0; i < columns; ++i) row.push_back(values[i] ? values[i] : "null");
    return 0;
  };
  EXPECT_EQ(sqlite3_exec(handle, sql, collect, &rows, nullptr), SQLITE_OK) << sqlite3_errmsg(handle);
  sqlite3_close(handle);
  return rows;
}

TEST(RecordRun, WritesOneRowARunAndRenewsIt) {
  const TemporaryFolder root;
  ASSERT_TRUE(report::has_database());
  const fs::path database = root / "runs.sqlite";
  const char* sql = "SELECT model, status, steps, loss, best_eval, device FROM runs ORDER BY path";
  const RunFolder run = RunFolder::create(root.path(), "r"), other = RunFolder::create(root.path(), "s");
  run.write_settings({{"model", "tnp'; DROP TABLE runs; --"}, {"device", "cpu"}});
  other.write_settings({{"model", 3}});  // edited by hand
  record_run(database, run, "running");
  EXPECT_EQ(query(database, sql), (std::vector<std::vector<std::string>>{
                                      {"tnp'; DROP TABLE runs; --", "running", "0", "null", "null", "cpu"}}));
  run.append({5, {{"loss", 0.5}, {"eval_nll", 2.0}}});
  run.append({9, {{"loss", 0.25}, {"eval_nll", 3.0}}});
  run.append({10, {{"loss", std::nan("")}}});
  record_run(database, run, "finished");
  record_run(database, other, "failed");
  EXPECT_EQ(query(database, sql), (std::vector<std::vector<std::string>>{
                                      {"tnp'; DROP TABLE runs; --", "finished", "10", "0.25", "2.0", "cpu"},
                                      {"", "failed", "0", "null", "null", ""}}));
}

TEST(RecordRun, NamesADatabaseThatCannotBeUsed) {
  const TemporaryFolder root;
  const RunFolder run = RunFolder::create(root.path(), "r");
  run.write_settings(json::object());
  put(root / "bad.sqlite", std::string(2000, 'x'));
  for (const std::string& path : {root / "bad.sqlite", root / "none/runs.sqlite", root.path()})
    EXPECT_NE(message_of([&] { record_run(path, run, "running"); }).find(path), std::string::npos) << path;
}
#endif

}  // namespace
}  // namespace tessera::train
