#include "io/utf8.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

namespace tessera::io {
namespace {

using nlohmann::json;

TEST(Utf8, OnlyWhatIsNoCharacterIsEscaped) {
  const std::string text = "caf\xC3\xA9 \xE4\xB8\xAD \xF0\x9F\x98\x80 back\\slash \x01";
  EXPECT_TRUE(is_utf8(text));
  EXPECT_EQ(utf8_text(text), text);
  EXPECT_EQ(utf8_text(""), "");
  // Latin-1; a character cut short at the end and within; a surrogate; an overlong slash.
  EXPECT_EQ(utf8_text("caf\xE9!"), "caf\\xE9!");
  EXPECT_EQ(utf8_text("a\xE4\xB8"), "a\\xE4\\xB8");
  EXPECT_EQ(utf8_text("\xE4\xB8z"), "\\xE4\\xB8z");
  EXPECT_EQ(utf8_text("\xED\xA0\x80"), "\\xED\\xA0\\x80");
  EXPECT_EQ(utf8_text("\xC0\xAF"), "\\xC0\\xAF");
  for (const char* bad : {"\xFF", "caf\xE9!", "\xED\xA0\x80"}) {
    EXPECT_FALSE(is_utf8(bad));
    EXPECT_TRUE(is_utf8(utf8_text(bad)));
  }
}

TEST(Utf8, NamesThatDifferStillDo) {
  EXPECT_NE(utf8_text("r\xFE"), utf8_text("r\xFF"));
}

TEST(Utf8, ANameIsThatOfTheFolderHoweverItIsWritten) {
  for (const char* path : {"models/llama", "models/llama/", "/models/llama//", "models/other/../llama/."})
    EXPECT_EQ(utf8_name(path), "llama") << path;
  const std::string here = std::filesystem::current_path().filename().string();
  for (const char* path : {".", "./", "x/.."}) EXPECT_EQ(utf8_name(path), here) << path;
  EXPECT_EQ(utf8_name("models/caf\xE9/"), "caf\\xE9");
}

TEST(Utf8, JsonHasEveryStringAndKeyEscaped) {
  const json value = {{"a\xFF", {1, 2.5, nullptr, true, "b\xFE", {{"c", "\xFD"}}}}, {"plain", "x"}};
  const std::string text = json_text(value);
  EXPECT_EQ(json::parse(text),
            json::parse(R"({"a\\xFF": [1, 2.5, null, true, "b\\xFE", {"c": "\\xFD"}], "plain": "x"})"));
  EXPECT_EQ(json_text({{"x", 1}}, 2), "{\n  \"x\": 1\n}");
  EXPECT_EQ(json_text(json::array()), "[]");
}

}  // namespace
}  // namespace tessera::io
