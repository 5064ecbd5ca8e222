#include "report/table.h"

#include <gtest/gtest.h>

#include <limits>
#include <nlohmann/json.hpp>

#include "report/run_table.h"
#include "runtime/error.h"
#include "tests/folder.h"

#if defined(TESSERA_WITH_SQLITE)
#include <sqlite3.h>
#endif

namespace tessera::report {
namespace {

Table example() {
  return {"scores",
          {"arm", "seed", "score, \"final\""},
          {{"a,b", int64_t{1}, 0.1},
           {"say \"x\"\n", int64_t{-2}, std::numeric_limits<double>::quiet_NaN()},
           {std::monostate(), int64_t{3}, 1e300}}};
}

TEST(Table, CsvQuotesWhatNeedsItAndKeepsEveryDigit) {
  EXPECT_EQ(csv_text(example()),
            "arm,seed,\"score, \"\"final\"\"\"\n"
            "\"a,b\",1,0.1\n"
            "\"say \"\"x\"\"\n\",-2,\n"
            ",3,1e+300\n");
  EXPECT_EQ(csv_text({"t", {"x"}, {{1.0 / 3}}}), "x\n0.3333333333333333\n");
  EXPECT_EQ(csv_text({"t", {"x"}, {{HUGE_VAL}, {-HUGE_VAL}}}), "x\ninf\n-inf\n");
}

TEST(Table, JsonHasNullForWhatIsNotThere) {
  const nlohmann::json rows = to_json(example());
  ASSERT_EQ(rows.size(), 3u);
  EXPECT_EQ(rows[0], (nlohmann::json{{"arm", "a,b"}, {"seed", 1}, {"score, \"final\"", 0.1}}));
  EXPECT_TRUE(rows[1]["score, \"final\""].is_null());
  EXPECT_TRUE(rows[2]["arm"].is_null());
}

TEST(Table, JsonHasEveryColumnOnceAndIsUtf8) {
  EXPECT_EQ(to_json({"t", {"p"}, {{"p\xE9"}}}), nlohmann::json::parse(R"([{"p": "p\\xE9"}])"));
  try {
    to_json({"t", {"a", "a"}, {{int64_t(1), int64_t(2)}}});
    ADD_FAILURE() << "one of two columns was lost";
  } catch (const Error& error) {
    EXPECT_NE(error.message().find("two columns are named \"a\""), std::string::npos) << error.message();
  }
}

#if defined(TESSERA_WITH_SQLITE)
TEST(Table, ADatabaseIsReplacedAsAWholeAndHasTheSameBytes) {
  const TemporaryFolder root;
  const std::string file = root / "t.sqlite";
  write_database(file, {example(), {"empty", {"x"}, {}}});
  const std::string first = get(file);
  write_database(file, {example(), {"empty", {"x"}, {}}});
  EXPECT_EQ(get(file), first);
  sqlite3* handle = nullptr;
  ASSERT_EQ(sqlite3_open(file.c_str(), &handle), SQLITE_OK);
  std::vector<std::string> found;
  const auto collect = [](void* to, int count, char** values, char**) {
    for (int i = 0; i < count; ++i)
      static_cast<std::vector<std::string>*>(to)->push_back(values[i] ? values[i] : "NULL");
    return 0;
  };
  sqlite3_exec(handle,
               "SELECT arm, seed, \"score, \"\"final\"\"\", typeof(seed) FROM scores ORDER BY seed; "
               "SELECT count(*) FROM empty",
               collect, &found, nullptr);
  sqlite3_close(handle);
  EXPECT_EQ(found, (std::vector<std::string>{"say \"x\"\n", "-2", "NULL", "integer", "a,b", "1", "0.1",
                                             "integer", "NULL", "3", "1.0e+300", "integer", "0"}));
  EXPECT_THROW(write_database(root / "none/t.sqlite", {example()}), Error);
}
#endif

}  // namespace
}  // namespace tessera::report
