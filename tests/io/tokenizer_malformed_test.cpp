#include <nlohmann/json.hpp>

#include "io/tokenizer/file_internal.h"
#include "io/tokenizer/tokenizer.h"
#include "io/tokenizer/train.h"
#include "tests/errors.h"
#include "tests/io/files.h"
#include "tests/place.h"

// Files that are no tokenizers, or only almost: each is refused with a message that names the place.

namespace tessera::io::test {
namespace {

struct Case {
  const char* what;
  std::string file;
  std::string error;
};

std::string whole(const std::string& model, const std::string& more = "") {
  return R"({"version":"1.0",)" + more + R"("model":)" + model + "}";
}
std::string bpe(const std::string& vocabulary, const std::string& merges, const std::string& more = "") {
  return whole(R"({"type":"BPE",)" + more + R"("vocab":)" + vocabulary + R"(,"merges":)" + merges + "}");
}
/// Around a sound model.
std::string with(const std::string& more) {
  return whole(R"({"type":"BPE","vocab":{"a":0,"b":1,"ab":2},"merges":["a b"]})", more + ",");
}
std::string added(const std::string& tokens) {
  return with(R"("added_tokens":[)" + tokens + "]");
}
std::vector<Case> json_cases() {
  return {
      // JSON.
      {"text", "hello", "not valid JSON at byte 1"},
      {"number", "3", "is a number, expected an object"},
      {"list", "[]", "is a list, expected an object"},
      {"string", "\"x\"", "is a string, expected an object"},
      {"null", "null", "is null, expected an object"},
      {"cut", R"({"model":{"type":"BPE","vocab":{"a":0)", "not valid JSON at byte"},
      {"trailing", with(R"("normalizer":null)") + "x", "not valid JSON at byte"},
      {"second object", with(R"("normalizer":null)") + "{}", "not valid JSON at byte"},
      {"NUL", std::string("{}\0", 3), "holds a NUL byte"},
      {"not UTF-8", "{\"\xFF\":1}", "not valid JSON at byte"},
      {"lone surrogate", R"({"\ud800":1})", "not valid JSON at byte"},
      {"1e400", R"({"a":1e400})", "not valid JSON at byte"},
      {"lists without end", repeated("[", 100000), "is a list, expected an object"},
      {"deep", R"({"a":)" + repeated("[", 100000), "nested deeper than 64"},
      {"deep objects", repeated(R"({"a":)", 100000), "nested deeper than 64"},
      {"100,000 values", R"({"a":[)" + repeated("0,", 100000) + "0]}", "more than 65536 values"},
      {"key twice", R"({"model":{},"model":{}})", "the key \"model\" occurs twice"},
      {"LFS pointer", "version https://git-lfs.github.com/spec/v1\n", "not valid JSON at byte 1"},
      {"empty object", "{}", "has no \"model\""},
      {"model null", R"({"model":null})", "has no \"model\""},
      {"model number", R"({"model":3})", "model has no \"vocab\""},
      // Vocabulary.
      {"no vocabulary", R"({"model":{"type":"BPE","merges":[]}})", "model has no \"vocab\""},
      {"vocabulary null", bpe("null", "[]"), "model has no \"vocab\""},
      {"vocabulary list", bpe(R"([["a",-1.5]])", "[]"), "model.vocab is a list, as of a Unigram model"},
      {"vocabulary text", bpe(R"("a")", "[]"), "model.vocab is a string, expected an object"},
      {"negative", bpe(R"({"a":-1})", "[]"), "token \"a\" has the number -1; expected 0 to 4194303"},
      {"2^31", bpe(R"({"a":2147483648})", "[]"), "has the number 4194304; expected"},
      {"2^64 - 1", bpe(R"({"a":18446744073709551615})", "[]"), "has the number 4194304; expected"},
      {"2^22", bpe(R"({"a":4194304})", "[]"), "token \"a\" has the number 4194304"},
      {"1.5", bpe(R"({"a":1.5})", "[]"), "the number of \"a\" is a number that is not whole"},
      {"number as text", bpe(R"({"a":"1"})", "[]"),
       "the number of \"a\" is a string, expected a whole number"},
      {"number null", bpe(R"({"a":null})", "[]"), "the number of \"a\" is null"},
      {"number list", bpe(R"({"a":[0]})", "[]"), "the number of \"a\" is a list"},
      {"number object", bpe(R"({"a":{}})", "[]"), "the number of \"a\" is an object"},
      {"token twice", bpe(R"({"a":0,"a":1})", "[]"), "the token \"a\" occurs twice"},
      {"number twice", bpe(R"({"a":0,"b":0})", "[]"), "the tokens \"a\" and \"b\" both have the number 0"},
      {"vocabulary twice", R"({"model":{"vocab":{"a":0},"vocab":{"a":0},"merges":[]}})",
       "the key \"vocab\" occurs twice"},
      // Merges.
      {"merges text", bpe(R"({"a":0})", R"("a b")"), "model.merges is a string, expected a list"},
      {"merges object", bpe(R"({"a":0})", "{}"), "model.merges is an object, expected a list"},
      {"one token", bpe(R"({"a":0})", R"(["a"])"), "model.merges[0] is \"a\", expected two tokens"},
      {"three tokens", bpe(R"({"a":0})", R"(["a a a"])"),
       "model.merges[0] is \"a a a\", expected two tokens"},
      {"merge number", bpe(R"({"a":0})", "[3]"), "model.merges[0] is a number, expected \"left right\""},
      {"merge null", bpe(R"({"a":0})", "[null]"), "model.merges[0] is null"},
      {"merge object", bpe(R"({"a":0})", "[{}]"), "model.merges[0] is an object"},
      {"pair of one", bpe(R"({"a":0})", R"([["a"]])"), "model.merges[0] has 1 tokens, expected 2"},
      {"pair of three", bpe(R"({"a":0})", R"([["a","a","a"]])"), "model.merges[0] has more than two tokens"},
      {"pair of numbers", bpe(R"({"a":0})", "[[0,0]]"),
       "model.merges[0] holds a number, expected two strings"},
      {"pair of lists", bpe(R"({"a":0})", "[[[]]]"), "model.merges[0] holds a list"},
      {"left unknown", bpe(R"({"a":0,"b":1,"ab":2})", R"(["a b","c b"])"),
       "model.merges[1] joins \"c\", which is not in the vocabulary"},
      {"right unknown", bpe(R"({"a":0})", R"([["a","z"]])"), "joins \"z\", which is not in the vocabulary"},
      {"result unknown", bpe(R"({"a":0,"b":1})", R"(["a b"])"),
       "makes \"ab\", which is not in the vocabulary"},
      {"shorter than the prefix",
       bpe(R"({"a":0,"b":1})", R"(["a b"])", R"("continuing_subword_prefix":"##",)"),
       "joins \"b\", shorter than the prefix"},
      // Models.
      {"Unigram", whole(R"({"type":"Unigram","vocab":{}})"),
       "is of type \"Unigram\", which is not supported"},
      {"type number", whole(R"({"type":3,"vocab":{"a":0}})"), "model.type is a number, expected a string"},
      {"dropout", bpe(R"({"a":0})", "[]", R"("dropout":0.1,)"), "model.dropout is set"},
      {"unknown token", bpe(R"({"a":0})", "[]", R"("unk_token":"<unk>",)"),
       "model.unk_token \"<unk>\" is not in the vocabulary"},
      {"flag as text", bpe(R"({"a":0})", "[]", R"("fuse_unk":"no",)"),
       "model.fuse_unk is a string, expected true or false"},
      {"WordPiece without", whole(R"({"type":"WordPiece","vocab":{"a":0}})"), "model has no \"unk_token\""},
      {"WordPiece unknown", whole(R"({"type":"WordPiece","unk_token":"u","vocab":{"a":0}})"),
       "model.unk_token \"u\" is not in the vocabulary"},
      {"word length",
       whole(R"({"type":"WordPiece","unk_token":"a","max_input_chars_per_word":-1,"vocab":{"a":0}})"),
       "max_input_chars_per_word is -1, expected a whole number from 0 to 10000"},
      {"word length 2^40",
       whole(
           R"({"type":"WordPiece","unk_token":"a","max_input_chars_per_word":1099511627776,"vocab":{"a":0}})"),
       "expected a whole number from 0 to 10000"},
      // Added tokens.
      {"added number", added("3"), "added_tokens[0] is no object"},
      {"added object", with(R"("added_tokens":{})"), "added_tokens is an object, expected a list"},
      {"no content", added(R"({"id":3})"), "added_tokens[0] has no \"content\""},
      {"no id", added(R"({"content":"<s>"})"), "added_tokens[0] has no \"id\""},
      {"negative id", added(R"({"id":-1,"content":"<s>"})"), "added_tokens[0].id is -1, expected"},
      {"large id", added(R"({"id":2147483647,"content":"<s>"})"),
       "added_tokens[0].id is 2147483647, expected"},
      {"id taken", added(R"({"id":0,"content":"<s>"})"),
       "\"<s>\" has the number 0, which is \"a\" in model.vocab"},
      {"id other", added(R"({"id":7,"content":"a"})"), "\"a\" has the number 7, but 0 in model.vocab"},
      {"id twice", added(R"({"id":7,"content":"x"},{"id":7,"content":"y"})"),
       "added_tokens[1]: \"y\" and \"x\" both have the number 7"},
      {"content twice", added(R"({"id":7,"content":"x"},{"id":8,"content":"x"})"), "\"x\" has two numbers"},
      {"long", added(R"({"id":7,"content":")" + std::string(1025, 'x') + R"("})"), "a token of 1025 bytes"},
      {"flag", added(R"({"id":7,"content":"x","lstrip":1})"), "added_tokens[0].lstrip is a number"},
      // Normalizers and pre-tokenizers.
      {"normalizer text", with(R"("normalizer":"NFC")"), "normalizer is a string, expected an object"},
      {"normalizer type", with(R"("normalizer":{"type":"Nmt"})"),
       "is of type \"Nmt\", which is not supported"},
      {"no type", with(R"("normalizer":{})"), "normalizer has no \"type\""},
      {"sequence", with(R"("normalizer":{"type":"Sequence","normalizers":3})"), "normalizers is a number"},
      {"in the sequence", with(R"("normalizer":{"type":"Sequence","normalizers":[{"type":"Prepend"}]})"),
       "normalizer.normalizers[0] has no \"prepend\""},
      {"empty text", with(R"("normalizer":{"type":"Replace","pattern":{"String":""},"content":"x"})"),
       "pattern.String is empty"},
      {"no pattern", with(R"("pre_tokenizer":{"type":"Split","behavior":"Isolated"})"), "has no \"pattern\""},
      {"behavior", with(R"("pre_tokenizer":{"type":"Split","pattern":{"String":"x"},"behavior":"Odd"})"),
       "behavior is not one of Removed"},
      {"pre-tokenizer type", with(R"("pre_tokenizer":{"type":"UnicodeScripts"})"), "which is not supported"},
      {"ByteLevel first",
       with(
           R"("pre_tokenizer":{"type":"Sequence","pretokenizers":[{"type":"ByteLevel","use_regex":false},{"type":"BertPreTokenizer"}]})"),
       "ByteLevel stands before another step"},
      {"replacement", with(R"("pre_tokenizer":{"type":"Metaspace","replacement":"ab"})"),
       "is not one character"},
      {"scheme", with(R"("pre_tokenizer":{"type":"Metaspace","prepend_scheme":"odd"})"),
       "prepend_scheme is not one of"},
      {"delimiter", with(R"("pre_tokenizer":{"type":"CharDelimiterSplit","delimiter":""})"),
       "is not one character"},
      // Processors and decoders.
      {"processor type", with(R"("post_processor":{"type":"Odd"})"),
       "is of type \"Odd\", which is not supported"},
      {"cls", with(R"("post_processor":{"type":"BertProcessing","sep":["a",0],"cls":["a",9]})"),
       "there is no token 9"},
      {"cls of one", with(R"("post_processor":{"type":"BertProcessing","sep":["a",0],"cls":["a"]})"),
       "cls has 1 parts"},
      {"template id",
       with(R"("post_processor":{"type":"TemplateProcessing","single":[{"Sequence":{"id":"C"}}]})"),
       "id is \"C\", expected A"},
      {"template without", with(R"("post_processor":{"type":"TemplateProcessing","single":[]})"),
       "single has the text A 0 times"},
      {"template twice",
       with(
           R"("post_processor":{"type":"TemplateProcessing","single":[{"Sequence":{"id":"A"}},{"Sequence":{"id":"A"}}]})"),
       "single has the text A 2 times"},
      {"template special",
       with(
           R"("post_processor":{"type":"TemplateProcessing","special_tokens":{},"single":[{"SpecialToken":{"id":"x"}}]})"),
       "id is \"x\", which is not among special_tokens"},
      {"two processors",
       with(
           R"("post_processor":{"type":"Sequence","processors":[{"type":"BertProcessing","sep":["a",0],"cls":["a",0]},{"type":"BertProcessing","sep":["a",0],"cls":["a",0]}]})"),
       "a second processor that adds tokens"},
      {"decoder type", with(R"("decoder":{"type":"CTC"})"), "is of type \"CTC\", which is not supported"},
      {"strip", with(R"("decoder":{"type":"Strip","content":"ab","start":0,"stop":0})"),
       "is not one character"},
      {"strip start", with(R"("decoder":{"type":"Strip","content":"a","start":-1,"stop":0})"), "start is -1"},
  };
}

TEST(TokenizerMalformed, RefusesFilesWithAReason) {
  const std::vector<Case> cases = json_cases();
  EXPECT_GE(cases.size(), 90u);
  for (const Case& one : cases)
    EXPECT_TRUE(throws([&] { Tokenizer::parse("x.json", one.file); }, one.error)) << one.what;
  EXPECT_EQ(message_of([] { Tokenizer::parse("x.json", with(R"("normalizer":null)")); }), "");
}

TEST(TokenizerMalformed, RefusesPatternsWithAReason) {
  const auto split = [](const std::string& pattern) {
    return with(R"("pre_tokenizer":{"type":"Split","behavior":"Isolated","pattern":{"Regex":)" +
                nlohmann::json(pattern).dump() + "}}");
  };
  if (message_of([&] { Tokenizer::parse("x.json", split("a")); }) != "") GTEST_SKIP() << "skipped: no PCRE2";
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"(", "is not understood: missing closing parenthesis"},
      {"[a", "is not understood"},
      {"a{2,1}", "is not understood"},
      {"*a", "is not understood"},
      {"\\", "a backslash without a character"},
      {"[a[bc]]", "a class within a class"},
      {"[a&&b]", "an intersection of classes"},
      {"[]a]", "an empty class"},
      {"\\p{L", "an open \\p{"},
      {"\\p{Nonsense}", "is not understood"},
      {"[[:alpha]", "an open class"},
      {"a{1,3}+", "a + after an interval"},
      {"(?m:.)", "the flag m or s"},
      {"[\\W]", "\\W in a class"},
      {"\\Ga", "\\G at byte 0"},
      {"\\X", "\\X at byte 0"},
      {"a\\Q.\\E", "\\Q at byte 1"},
      {"a{2}?", "a ? after the interval {n}"},
      {"a(?i)b|c", "flags within an alternative"},
      {"[[:alpha:]]", "[:alpha:] at byte 1"},
      {std::string(70000, 'a'), "a pattern of 70000 bytes, more than 65536"}};
  for (const auto& [pattern, error] : cases)
    EXPECT_TRUE(throws([&] { Tokenizer::parse("x.json", split(pattern)); }, error)) << pattern.substr(0, 40);
  // An expression that explodes is stopped.
  const Tokenizer bomb = Tokenizer::parse("x.json", split("(a|aa)+$"));
  EXPECT_TRUE(
      throws([&] { bomb.encode(std::string(200, 'a') + "b"); }, "fails on this text: it takes more than"));
}

TEST(TokenizerMalformed, APatternHasABudgetForTheWholeText) {
  const auto split = [](const std::string& pattern) {
    return Tokenizer::parse(
        "x.json", with(R"("pre_tokenizer":{"type":"Split","behavior":"Isolated","pattern":{"Regex":)" +
                       nlohmann::json(pattern).dump() + "}}"));
  };
  if (message_of([&] { split("a"); }) != "") GTEST_SKIP() << "skipped: no PCRE2";
  // Each start position fails after it has read, or taken steps for, all of the rest: a million times a
  // million. The second kind is not counted by PCRE2 at all. Both end with an error, after 64 steps per byte.
  const std::string text(1'000'000, 'a');
  for (const char* pattern : {"a*[bc]", "a*+[bc]", "[^b]*+[bc]", "(?:a(?=a*[bc]))+", "x|a{1,2000}[bc]"}) {
    const Tokenizer tokenizer = split(pattern);
    const std::string error = message_of([&] { tokenizer.encode(text); });
    EXPECT_NE(error.find("fails on this text: it takes more than 64065536 steps for 1000000 bytes"),
              std::string::npos)
        << pattern << ": " << error;
  }
  // What is long, but read a few times, is not refused.
  for (const char* pattern : {"a+", "a*|b", "\\s+(?!\\S)|\\s+|a+", "(?=b)|c", "$", "a*?$", "(?:a|b){1,50}"})
    EXPECT_EQ(message_of([&] { split(pattern).encode(text); }), "") << pattern;
}

TEST(TokenizerMalformed, RefusesOldFilesWithAReason) {
  const TemporaryFolder folder;
  const auto pair = [&](const std::string& vocabulary, const std::string& merges) {
    put(folder / "vocab.json", vocabulary);
    put(folder / "merges.txt", merges);
    return message_of([&] { Tokenizer::load(folder / "merges.txt"); });
  };
  const std::string good = R"({"a":0,"b":1,"ab":2})";
  const std::vector<Case> pairs = {{"", "[]", "vocab.json is a list"},
                                   {"", "{", "not valid JSON"},
                                   {"", R"({"a":{}})", "is an object, expected a whole number"},
                                   {"", R"({"a":0,"a":1})", "vocab.json: the token \"a\" occurs twice"},
                                   {"", R"({"a":-5})", "has the number -5"}};
  for (const Case& one : pairs)
    EXPECT_NE(pair(one.file, "a b\n").find(one.error), std::string::npos) << pair(one.file, "a b\n");
  for (const auto& [merges, error] : std::vector<std::pair<std::string, std::string>>{
           {"a\n", "merges.txt: line 1 is \"a\", expected two tokens"},
           {"#version: 0.2\na b\na b b\n", "merges.txt: line 3 is \"a b b\""},
           {"a b\n a\n", "line 2 is \" a\""},
           {"a \n", "line 1 is \"a \""},
           {"a \xFF\n", "merges.txt: line 1 is no UTF-8 text"},
           {"a c\n", "joins \"c\", which is not in the vocabulary"}})
    EXPECT_NE(pair(good, merges).find(error), std::string::npos) << merges << pair(good, merges);
  const auto lines = [](const std::string& text) {
    return message_of([&] { parse_vocab_txt("vocab.txt", text); });
  };
  EXPECT_NE(lines("[UNK]\n\n[CLS]\n").find("line 2 is empty"), std::string::npos);
  EXPECT_NE(lines("a\nb\n").find("has no [UNK]"), std::string::npos);
  EXPECT_NE(lines("[UNK]\n[CLS]\n[SEP]\n[UNK]\n").find("line 4: the token \"[UNK]\" occurs twice"),
            std::string::npos);
  EXPECT_NE(lines("[UNK]\n\xC3\n").find("line 2 is no UTF-8"), std::string::npos);
  EXPECT_TRUE(throws([&] { Tokenizer::load(folder / "weights.bin"); }, "is neither a file nor a folder"));
  put(folder / "weights.bin", "");
  EXPECT_TRUE(throws([&] { Tokenizer::load(folder / "weights.bin"); }, "is no tokenizer.json, vocab.json"));
  EXPECT_TRUE(throws([&] { Tokenizer::load("/nowhere/tokenizer.json"); }, "there is no file"));
  const TemporaryFolder empty;
  EXPECT_TRUE(throws([&] { Tokenizer::load(empty.path()); }, "is a folder without tokenizer.json"));
  fs::permissions(empty.path(), fs::perms::none);
  {
    const UnprivilegedUser user;
    EXPECT_TRUE(throws([&] { Tokenizer::load(empty.path()); }, empty.path() + ": Permission denied"));
  }
  fs::permissions(empty.path(), fs::perms::owner_all);
}

/// A field of a protocol buffer.
std::string field(int number, const std::string& bytes) {
  std::string text(1, char(number << 3 | 2));
  size_t size = bytes.size();
  for (; size >= 128; size >>= 7) text += char((size & 127) | 128);
  return text + char(size) + bytes;
}
std::string piece(const std::string& text, int type = 1) {
  const std::string score("\x15\0\0\0\0", 5);
  return field(1, field(1, text) + score + "\x18" + char(type));
}

TEST(TokenizerMalformed, RefusesSentencePieceModelsWithAReason) {
  const auto table = [](const std::string& bytes) { return piece("a") + field(3, field(2, bytes)); };
  const auto units = [](std::vector<uint32_t> units, const std::string& rest) {
    const uint32_t size = uint32_t(units.size() * 4);
    std::string bytes(reinterpret_cast<const char*>(&size), 4);
    return bytes.append(reinterpret_cast<const char*>(units.data()), size) + rest;
  };
  std::vector<uint32_t> small(256, 0x80000000);
  small[0] = 0;
  std::vector<uint32_t> outside = small, leaf = small;
  outside[0] = 0x3FFFu << 10;                                 // children past the end
  leaf[0] = 0;                                                // children at 0 ^ byte
  leaf['x'] = uint32_t('x') | 1u << 8 | uint32_t('x') << 10;  // "x": its value at 'x' ^ 'x' = 0
  std::vector<uint32_t> far = leaf;
  far[0] = 0x7FFFFFFF;
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"hello", "the file has"},
      {"\x0A", "a number that does not end"},
      {std::string("\x0A\x05"
                   "ab",
                   4),
       "a field of 5 bytes where 2 are left"},
      {"\x0A\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x01", "a field of 18446744073709551615 bytes"},
      {"\x0A\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x02", "a number of more than 64 bits"},
      {std::string("\x0B\0", 2), "a field of wire type 3"},
      {std::string("\0\0", 2), "a field number that there cannot be"},
      {std::string("\x08\x01", 2), "a part of wire type 0"},
      {field(9, "x"), "a field of number 9"},
      {field(2, ""), "has no pieces"},
      {field(1, ""), "piece 0 has 0 bytes, expected 1 to 4096"},
      {piece(std::string(5000, 'a')), "piece 0 has 5000 bytes"},
      {piece("a") + piece("a"), "the piece \"a\" occurs twice"},
      {piece("\xFF"), "piece 0 (\"\xFF\") is no UTF-8 text"},
      {piece(std::string("a\0b", 3)), "is no UTF-8 text"},
      {piece("a", 7), "the type 7"},
      {piece("a", 0), "the type 0"},
      {field(1, field(1, "a") + std::string("\x15\0\0\x80\x7F", 5)), "a score that is not finite"},
      {field(1, field(1, "a") + "\x10\x01"), "a score of wire type 0"},
      {field(1, "\x08\x01"), "a text of wire type 0"},
      {table("abc"), "the table of normalisation has 3 bytes"},
      {table(std::string("\xFF\xFF\xFF\xFF"
                         "abcd",
                         8)),
       "has an array of 4294967295 bytes in 8"},
      {table(std::string("\x05\0\0\0abcdefgh", 12)), "has an array of 5 bytes"},
      {table(std::string("\0\0\0\0abcd", 8)), "has an array of 0 bytes"},
      {table(units(small, "x")), "does not end with a zero"},
      {table(units({0}, std::string(1, '\0'))), "leads outside its array"},
      {table(units(outside, std::string(1, '\0'))), "leads outside its array"},
      {table(units(far, std::string(1, '\0'))), "leads outside its array"},
      {table(units(leaf, std::string(5000, 'a') + '\0')), "has a replacement of more than 4096 bytes"}};
  EXPECT_GE(cases.size(), 25u);
  for (const auto& [bytes, error] : cases)
    EXPECT_TRUE(throws([&] { check_sentencepiece("x.model", bytes); }, error)) << error;
  EXPECT_EQ(message_of([&] { check_sentencepiece("x.model", table(units(small, std::string(1, '\0')))); }),
            "");
  EXPECT_EQ(message_of([&] { check_sentencepiece("x.model", table(units(leaf, std::string("b\0", 2)))); }),
            "");
}

/// Every prefix and every flipped bit of small good files: an Error or a tokenizer that works, never more.
TEST(TokenizerMalformed, SurvivesCutsAndFlips) {
  const auto use = [](const Tokenizer& tokenizer) {
    const Encoding encoding = tokenizer.encode("The <|endoftext|> licence \xC3\xA9 is");
    for (const int32_t id : encoding.ids) EXPECT_TRUE(id >= 0 && id < tokenizer.vocab_size());
    tokenizer.decode(encoding.ids);
  };
  int accepted = 0, refused = 0;
  const auto attempt = [&](auto&& parse) {
    try {
      use(parse());
      ++accepted;
    } catch (const Error&) {
      ++refused;
    }
  };
  const std::string folder = tessera::test::place("TESSERA_TEST_DATA", TESSERA_TEST_DATA) + "/io/tokenizers/";
  for (const char* name : {"gpt2.json", "bert.json", "llama2.json", "mixed.json"}) {
    std::string text = get(folder + name);
    for (size_t i = 0; i < text.size(); i += 61) {
      attempt([&] { return Tokenizer::parse("x.json", text.substr(0, i)); });
      text[i] = char(text[i] ^ (1 << (i % 8)));
      attempt([&] { return Tokenizer::parse("x.json", text); });
      text[i] = char(text[i] ^ (1 << (i % 8)));
    }
  }
  std::string model = get(folder + "sp_bpe.model");
  for (size_t i = 0; i < model.size(); i += 29) {
    attempt([&] { return Tokenizer::parse_sentencepiece("x.model", model.substr(0, i)); });
    model[i] = char(model[i] ^ (1 << (i % 8)));
    attempt([&] { return Tokenizer::parse_sentencepiece("x.model", model); });
    model[i] = char(model[i] ^ (1 << (i % 8)));
  }
  EXPECT_GT(refused, 500);
  EXPECT_GT(accepted, 50);
}

}  // namespace
}  // namespace tessera::io::test
