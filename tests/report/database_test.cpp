#include "report/database.h"

#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "io/file.h"
#include "report/run_table.h"
#include "tests/errors.h"
#include "tests/folder.h"

namespace tessera::report {
namespace {

constexpr int32_t kId = 77;

class DatabaseTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!has_database()) GTEST_SKIP() << "skipped: no SQLite";
    Database made = Database::open(path());
    made.run("PRAGMA application_id = 77");
    made.run("CREATE TABLE t (name TEXT, number REAL, count INTEGER)");
    made.insert("INSERT INTO t VALUES (?1, ?2, ?3)",
                {{std::string("a|b"), 0.1, int64_t{1}}, {std::string("say \"x\", y"), NAN, int64_t{2}}});
  }
  std::string path() const { return folder_ / "d.sqlite"; }
  Database opened() const { return Database::read_only(path(), kId, "a database of the test"); }

  TemporaryFolder folder_;
};

TEST_F(DatabaseTest, RowsAreShownAsMarkdownCsvAndJson) {
  const Table rows = opened().query("SELECT * FROM t ORDER BY count", 10, 10);
  EXPECT_EQ(to_markdown(rows),
            "| name | number | count |\n|---|---|---|\n| a\\|b | 0.1 | 1 |\n| say \"x\", y |  | 2 |\n");
  EXPECT_EQ(csv_text(rows), "name,number,count\na|b,0.1,1\n\"say \"\"x\"\", y\",,2\n");
  const nlohmann::json json = to_json(rows);
  EXPECT_EQ(json[1]["name"], "say \"x\", y");
  EXPECT_TRUE(json[1]["number"].is_null());
  EXPECT_EQ(json[0]["count"], 1);
}

TEST_F(DatabaseTest, AQueryOnlyReads) {
  Database database = opened();
  for (const char* sql :
       {"DELETE FROM t", "INSERT INTO t VALUES (1, 2, 3)", "CREATE TABLE u (x)", "DROP TABLE t",
        "UPDATE t SET count = 3", "ATTACH '/etc/passwd' AS p", "PRAGMA user_version = 3", "VACUUM", "BEGIN"})
    expect_error([&] { database.query(sql, 10, 10); }, {"query: ", "expected one SELECT"});
  EXPECT_EQ(database.query("WITH s AS (SELECT count(*) AS n FROM t) SELECT n FROM s;\n", 10, 10).rows.size(),
            1u);
}

TEST_F(DatabaseTest, AQueryThatIsWrongOrTooLargeSaysSo) {
  Database database = opened();
  expect_error([&] { database.query("SELECT", 10, 10); }, {"query: ", "incomplete input"});
  expect_error([&] { database.query("", 10, 10); }, {"it is empty"});
  expect_error([&] { database.query("SELECT * FROM nowhere", 10, 10); }, {"no such table: nowhere"});
  expect_error([&] { database.query("SELECT 1; SELECT 2", 10, 10); }, {"more than one statement"});
  expect_error([&] { database.query("SELECT * FROM t", 10, 1); }, {"more than 1 rows", "LIMIT", "--rows"});
  const char* const endless =
      "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT sum(i) FROM n";
  expect_error([&] { database.query(endless, 0, 10); }, {"stopped after 0 s", "--seconds"});
  EXPECT_EQ(database.query("SELECT 1", 10, 10).rows.size(), 1u);  // and it still answers
}

TEST_F(DatabaseTest, OtherFilesAreRefused) {
  const auto open = [](const std::string& path, int32_t id) {
    Database::read_only(path, id, "a database of the test");
  };
  expect_error([&] { open(folder_ / "none", kId); },
               {"there is no such file", "expected a database of the test"});
  expect_error([&] { open(path(), 78); }, {"made by another program"});
  io::write_file(folder_ / "text.sqlite", std::string(5000, 'x'));
  expect_error([&] { open(folder_ / "text.sqlite", kId); }, {"no SQLite database"});
}

}  // namespace
}  // namespace tessera::report
