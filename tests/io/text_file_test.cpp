#include "io/text_file.h"

#include "tests/errors.h"
#include "tests/io/files.h"

namespace tessera::io::test {
namespace {

std::string utf16(const std::string& text, bool little, bool mark) {
  std::string out = !mark ? "" : little ? "\xFF\xFE" : "\xFE\xFF";
  for (const char c : text) out += little ? std::string{c, '\0'} : std::string{'\0', c};
  return out;
}

TEST(CheckText, SaysWhatAFileIsInstead) {
  const std::string text = "It is a truth universally acknowledged, that a single man\n";
  const std::vector<std::pair<std::string, std::string>> refused = {
      {std::string("\x1F\x8B\x08\0\0\0", 6) + "rest", "is compressed by gzip"},
      {"BZh91AY&SY\xA7\xF1", "is compressed by bzip2"},
      {std::string("\xFD"
                   "7zXZ\0",
                   6),
       "is compressed by xz"},
      {"\x28\xB5\x2F\xFD\x04", "is compressed by zstd"},
      {std::string("PK\3\4\x14\0", 6), "is a zip archive"},
      {"%PDF-1.4\nplain", "is a PDF document"},
      {std::string("PAR1\x15\0", 6), "is a Parquet table"},
      {std::string("\x7F"
                   "ELF\2\1\1\0",
                   8),
       "is a program"},
      {std::string("TESSTOK1\1\0\0\0", 12), "is a shard of tokens"},
      {utf16(text, true, true), "is UTF-16, not"},
      {utf16(text, false, true), "is UTF-16, not"},
      {utf16(text, true, false), "is UTF-16 by its zero bytes"},
      {utf16(text, false, false), "is UTF-16 by its zero bytes"},
      {std::string("\xFF\xFE\0\0a\0\0\0", 8), "is UTF-32"},
      {text + std::string(1, '\0') + text, "is a binary file (a NUL byte at offset 58)"},
      {text + "caf\xE9", "1 of 62 bytes are not UTF-8, the first at offset 61"},
      {std::string(100, '\xA7'), "100 of 100 bytes are not UTF-8"}};
  for (const auto& [bytes, says] : refused) {
    const std::string error = message_of([&] { check_text("corpus", bytes); });
    EXPECT_TRUE(error.starts_with("read: corpus is ")) << error;
    EXPECT_NE(error.find(says), std::string::npos) << error;
    EXPECT_EQ(error.find("--any-bytes"), std::string::npos) << error;  // the caller may not have the flag
  }
}

TEST(CheckText, TakesTextWithADamagedByteInAThousand) {
  const std::string good(1000, 'a');
  for (const std::string& text :
       {std::string("a"), good, std::string("BZh is how it begins\n"), std::string("PAR1 in words"),
        std::string("\xEF\xBB\xBFwith a mark"), std::string("\xE2\x82\xAC \xF0\x9F\x98\x80"), good + "\xFF"})
    EXPECT_EQ(message_of([&] { check_text("corpus", text); }), "") << text.substr(0, 20);
  EXPECT_NE(message_of([&] { check_text("corpus", good + "\xFF\xFF"); }), "");
  EXPECT_EQ(invalid_bytes(good + "\xFF" + good + "\xE2\x82"), 3u);
}

TEST(ReadText, RefusesUnlessToldOtherwise) {
  const TemporaryFolder folder;
  const std::string bytes("\x1F\x8B\x08\0", 4);
  put(folder / "corpus.gz", bytes);
  EXPECT_TRUE(throws([&] { read_text(folder / "corpus.gz", 100); }, "corpus.gz is compressed by gzip"));
  EXPECT_TRUE(throws([&] { read_text(folder / "corpus.gz", 100); }, "(--any-bytes takes it as it is"));
  EXPECT_EQ(read_text(folder / "corpus.gz", 100, true), bytes);
  EXPECT_TRUE(throws([&] { read_text(folder / "corpus.gz", 3, true); }, "more than the 3"));
}

}  // namespace
}  // namespace tessera::io::test
