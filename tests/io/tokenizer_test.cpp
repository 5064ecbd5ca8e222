#include "io/tokenizer/tokenizer.h"

#include <nlohmann/json.hpp>

#include "io/tokenizer/train.h"
#include "io/tokenizer/unicode_internal.h"
#include "tests/errors.h"
#include "tests/io/files.h"
#include "tests/place.h"

namespace tessera::io::test {
namespace {

using Ids = std::vector<int32_t>;

std::string data(const std::string& name) {
  return tessera::test::place("TESSERA_TEST_DATA", TESSERA_TEST_DATA) + "/io/tokenizers/" + name;
}

std::string from_hex(const std::string& hex) {
  std::string bytes;
  for (size_t i = 0; i + 1 < hex.size(); i += 2) bytes += char(std::stoi(hex.substr(i, 2), nullptr, 16));
  return bytes;
}

/// Whether this build lacks what the tokenizer needs; the message says what.
bool lacks_library(const std::string& path) {
  const std::string error = message_of([&] { Tokenizer::load(path); });
  return error.find("which this build lacks") != std::string::npos;
}

/// Tokens and texts that the library of Hugging Face and SentencePiece gave
/// (tests/parity/tokenizer_golden.py).
class GoldenTokens : public ::testing::TestWithParam<const char*> {};

TEST_P(GoldenTokens, SameTokensAndTextAsThePeer) {
  const std::string name = GetParam();
  const std::string path = data(name + (name.starts_with("sp_") ? ".model" : ".json"));
  if (lacks_library(path)) GTEST_SKIP() << "skipped: this build lacks a library of " << name;
  const Tokenizer tokenizer = Tokenizer::load(path);
  const nlohmann::json golden = nlohmann::json::parse(get(data("golden.json")))[name];
  ASSERT_GT(golden["texts"].size(), 100u);
  for (const auto& one : golden["texts"]) {
    const std::string text = from_hex(one["text"]);
    const Encoding encoding = tokenizer.encode(text);
    ASSERT_EQ(encoding.ids, one["ids"].get<Ids>()) << text;
    ASSERT_EQ(encoding.types.size(), encoding.ids.size());
    const std::string decoded = tokenizer.decode(encoding.ids);
    ASSERT_EQ(decoded, from_hex(one["decoded"])) << text;
    TokenStream stream(tokenizer);
    std::string streamed;
    for (const int32_t id : encoding.ids) streamed += stream.next(id);
    ASSERT_EQ(streamed + stream.finish(), decoded) << text;
  }
  for (const auto& one : golden["pairs"]) {
    const Encoding pair =
        tokenizer.encode_pair(from_hex(one["first"]), from_hex(one["second"]), {.max_length = 40});
    ASSERT_EQ(pair.ids, one["ids"].get<Ids>());
    ASSERT_EQ(pair.types, one["types"].get<Ids>());
  }
}

INSTANTIATE_TEST_SUITE_P(Tokenizer, GoldenTokens,
                         ::testing::Values("gpt2", "llama3", "roberta", "bert", "bert_cased", "llama2",
                                           "llama2_metaspace", "mixed", "word_level", "sp_bpe"),
                         [](const auto& info) { return std::string(info.param); });

TEST(Utf8, RepairsAsPythonDoes) {
  // Unicode 15, tables 3-8 to 3-11; and what errors="replace" gives.
  const std::string u = "\xEF\xBF\xBD";
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"plain", "plain"},
      {"\xC0\xAF\xE0\x80\xBF\xF0\x81\x82\x41", u + u + u + u + u + u + u + u + "A"},
      {"\xED\xA0\x80\xED\xBF\xBF\xED\xAF\x41", u + u + u + u + u + u + u + u + "A"},
      {"\xF4\x91\x92\x93\xFF\x41\x80\xBF\x42", u + u + u + u + u + "A" + u + u + "B"},
      {"\xE1\x80\xE2\xF0\x91\x92\xF1\xBF\x41", u + u + u + u + "A"},
      {"\xE2\x82", u},
      {"long enough for a word of eight \xC3", "long enough for a word of eight " + u}};
  for (const auto& [bytes, text] : cases) EXPECT_EQ(unicode::repaired(bytes), text);
  EXPECT_EQ(unicode::open_end("a\xE2\x82"), 2u);
  EXPECT_EQ(unicode::open_end("a\xF0\x9F\x98"), 3u);
  EXPECT_EQ(unicode::open_end("a\xF0\x9F\x98\x80"), 0u);
  EXPECT_EQ(unicode::open_end("a\x80\x80\x80\x80"), 0u);
  EXPECT_EQ(unicode::open_end("\xC3"), 1u);
}

/// A BPE whose normalizer has the given steps and that has one added token more.
Tokenizer with_added(const TemporaryFolder& folder, const std::string& steps, const std::string& content,
                     bool special) {
  const std::string flags = R"("single_word": false, "lstrip": false, "rstrip": false, "normalized": true)";
  put(folder / "tokenizer.json",
      R"({"normalizer": {"type": "Sequence", "normalizers": )" + steps +
          R"(}, "decoder": {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                 "added_tokens": [{"id": 8, "content": ")" +
          content + R"(", "special": )" + (special ? "true, " : "false, ") + flags +
          R"(}], "model": {"type": "BPE", "unk_token": "<unk>", "merges": ["\u2581 x"], "vocab": {"<unk>": 0,
                 "\u2581": 1, "h": 2, "i": 3, "x": 4, "\u2581x": 5, "n": 6, "e": 7}}})");
  return Tokenizer::load(folder / "tokenizer.json");
}

TEST(Tokenizer, EmptyMatchesEndPiecesWhateverTheBehavior) {
  if (!tokenizer_libraries().pcre2) GTEST_SKIP() << "skipped: no PCRE2";
  const auto pieces = [](const std::string& pattern, const std::string& behavior, bool invert) {
    const nlohmann::json json = {
        {"pre_tokenizer",
         {{"type", "Sequence"},
          {"pretokenizers",
           {{{"type", "Split"},
             {"pattern", {{"Regex", pattern}}},
             {"behavior", behavior},
             {"invert", invert}},
            // An empty piece would get a mark.
            {{"type", "Metaspace"}, {"replacement", "_"}, {"prepend_scheme", "always"}, {"split", false}}}}}},
        {"decoder", {{"type", "Fuse"}}},
        {"model",
         {{"type", "WordLevel"},
          {"unk_token", "?"},
          {"vocab",
           {{"?", 0},
            {"_foo", 1},
            {"_Bar", 2},
            {"_B", 3},
            {"_Axxa", 4},
            {"_f", 5},
            {"_o", 6},
            {"_a", 7},
            {"_r", 8},
            {"_A", 9},
            {"_xx", 10},
            {"_Axx", 11},
            {"_xxa", 12}}}}}};
    const Tokenizer tokenizer = Tokenizer::parse("t.json", json.dump());
    return tokenizer.decode(tokenizer.encode("fooBarBAxxa").ids);
  };
  // As tokenizers 0.23 splits.
  for (const char* const behavior : {"Isolated", "Contiguous", "MergedWithPrevious", "MergedWithNext"})
    for (const bool invert : {false, true}) {
      SCOPED_TRACE(std::string(behavior) + (invert ? ", inverted" : ""));
      EXPECT_EQ(pieces("(?=[A-Z])", behavior, invert), "_foo_Bar_B_Axxa");
      const bool merged = std::string(behavior).starts_with("Merged");
      const bool next = std::string(behavior) == "MergedWithNext";
      EXPECT_EQ(pieces("x*", behavior, invert),
                std::string("_f_o_o_B_a_r_B") + (!merged          ? "_A_xx_a"
                                                 : next != invert ? "_A_xxa"
                                                                  : "_Axx_a"));
    }
  EXPECT_EQ(pieces("(?=[A-Z])", "Removed", true), "");
  EXPECT_EQ(pieces("x*", "Removed", true), "_xx");
}

TEST(Tokenizer, NormalizedAddedTokensDecodeToTheirNormalizedText) {
  // As tokenizers 0.23 does, whether the token is special or not.
  const TemporaryFolder folder;
  const std::string blanks =
      R"([{"type": "Prepend", "prepend": "\u2581"},
          {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}])";
  for (const bool special : {false, true}) {
    const Tokenizer tokenizer = with_added(folder, blanks, "foo bar", special);
    const Ids ids = tokenizer.encode("hi foo bar x").ids;
    EXPECT_EQ(ids, (Ids{1, 2, 3, 8, 5}));
    EXPECT_EQ(tokenizer.decode(ids, false), " hi foo bar x");
    EXPECT_EQ(tokenizer.decode(ids), special ? " hi x" : " hi foo bar x");
    EXPECT_EQ(tokenizer.token(8),
              "\xE2\x96\x81"
              "foo"
              "\xE2\x96\x81"
              "bar");
    EXPECT_EQ(tokenizer.id_of("foo bar"), 8);
    TokenStream stream(tokenizer, false);
    std::string streamed;
    for (const int32_t id : ids) streamed += stream.next(id);
    EXPECT_EQ(streamed + stream.finish(), " hi foo bar x");
  }
  if (!tokenizer_libraries().utf8proc) GTEST_SKIP() << "skipped: no utf8proc";
  const Tokenizer lower = with_added(folder, R"([{"type": "Lowercase"}])", "NewTok", false);
  EXPECT_EQ(lower.encode("hiNEWTOKx").ids, (Ids{2, 3, 8, 4}));
  EXPECT_EQ(lower.decode(Ids{8}), "newtok");
}

TEST(Utf8, NormalFormsLeaveCharactersAloneThatTokenizersDoesNotKnow) {
  if (!unicode::available()) GTEST_SKIP() << "skipped: no utf8proc";
  using unicode::Form;
  EXPECT_EQ(unicode::normal_form("\u1D5B", Form::nfkd), "v");  // MODIFIER LETTER SMALL V
  EXPECT_EQ(unicode::normal_form("\U0001E030", Form::nfkd),
            "\U0001E030");  // MODIFIER LETTER CYRILLIC SMALL A, Unicode 15
  // A mark of class 9 of Unicode 15 stays after one of class 220.
  EXPECT_EQ(unicode::normal_form("a\u0323\U00011F41", Form::nfd), "a\u0323\U00011F41");
  EXPECT_EQ(unicode::normal_form("a\u0301\u0323", Form::nfd), "a\u0323\u0301");
}

// Ids are those of tokenizers 0.23.
TEST(Tokenizer, TokensOfBlanksCountWithinTheBlanksOfAnother) {
  const auto ids = [](const std::string& added, const std::string& text) {
    return Tokenizer::parse("t.json",
                            R"({"model": {"type": "WordLevel", "unk_token": "?", "vocab": {"?": 0, "a": 1}},
                                          "added_tokens": [)" +
                                added + "]}")
        .encode(text)
        .ids;
  };
  const std::string line = R"({"id": 2, "content": "\n", "rstrip": true})";
  EXPECT_EQ(ids(line, "\n \n \na\n\n"), (Ids{2, 2, 2, 1, 2, 2}));
  const std::string stripped = R"({"id": 2, "content": "\n", "lstrip": true, "rstrip": true})";
  EXPECT_EQ(ids(stripped, "\n \n \na"), (Ids{2, 1}));
  const std::string two = R"({"id": 2, "content": "<b>", "rstrip": true}, {"id": 3, "content": "  "})";
  EXPECT_EQ(ids(two, "<b>    a"), (Ids{2, 3, 3, 1}));
  EXPECT_EQ(ids(two, "<b>   a"), (Ids{2, 3, 0}));  // " a" after the token
  EXPECT_EQ(ids(line, std::string(200'000, '\n')).size(), 200'000u);
}

TEST(Tokenizer, AnEmptySequenceOfDecodersPutsNothingBetweenTokens) {
  const auto decoded = [](const std::string& decoder) {
    return Tokenizer::parse(
               "t.json",
               R"({"model": {"type": "WordLevel", "unk_token": "a", "vocab": {"a": 0}}, "decoder": )" +
                   decoder + "}")
        .decode(Ids{0, 0});
  };
  EXPECT_EQ(decoded(R"({"type": "Sequence", "decoders": []})"), "aa");
  EXPECT_EQ(decoded("null"), "a a");
}

TEST(Tokenizer, APartThatTheNormalizerEmptiesHasNoTokens) {
  // As in tokenizers 0.23: no blank is put before a part of the text of which nothing is left.
  const auto tokenizer = [](const std::string& pre_tokenizer) {
    return Tokenizer::parse("x.json", R"({"normalizer": {"type": "Strip"}, "pre_tokenizer": )" +
                                          pre_tokenizer +
                                          R"(, "added_tokens": [{"id": 0, "content": "<s>", "special": true}],
               "model": {"type": "BPE", "merges": [], "vocab": {"<s>": 0, "\u2581": 1, "a": 2, "\u0120": 3}}})");
  };
  const Tokenizer metaspace = tokenizer(R"({"type": "Metaspace"})");
  EXPECT_EQ(metaspace.encode("<s> <s> a").ids, (Ids{0, 0, 1, 2}));
  EXPECT_EQ(metaspace.encode(" ").ids, Ids{});
  const Tokenizer bytes = tokenizer(R"({"type": "ByteLevel", "use_regex": false})");
  EXPECT_EQ(bytes.encode("<s> <s> a").ids, (Ids{0, 0, 3, 2}));
}

TEST(Tokenizer, ByteLevelStandsBeforeEveryModel) {
  // The tokens are those of tokenizers 0.23. In the byte alphabet "\u00e9 a" is "\u00c3\u00a9\u0120a".
  const auto tokenizer = [](const std::string& model) {
    return Tokenizer::parse(
        "x.json", R"({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "use_regex": false},
                      "model": {"unk_token": "?", )" +
                      model + "}}");
  };
  const auto expect = [](const Tokenizer& made, const Ids& ids, const Ids& longer) {
    EXPECT_EQ(made.encode("\u00e9 a").ids, ids);
    EXPECT_EQ(made.encode("\u00e9 aa").ids, longer);
  };
  expect(tokenizer(R"("type": "WordLevel", "vocab": {"?": 0, "\u00c3\u00a9\u0120a": 1, "\u00e9 a": 2})"), {1},
         {0});
  expect(tokenizer(R"("type": "WordPiece", "max_input_chars_per_word": 4,
                      "vocab": {"?": 0, "\u00c3": 1, "##\u00a9": 2, "##\u0120": 3, "##a": 4, "\u00e9": 5})"),
         {1, 2, 3, 4}, {0});
  // Characters of the alphabet that are no tokens fall back to the bytes of their UTF-8.
  expect(tokenizer(R"("type": "BPE", "byte_fallback": true, "merges": [],
                      "vocab": {"?": 0, "\u00c3": 1, "a": 2, "<0xC2>": 3, "<0xA9>": 4, "<0xC4>": 5, "<0xA0>": 6})"),
         {1, 3, 4, 5, 6, 2}, {1, 3, 4, 5, 6, 2, 2});
}

TEST(Tokenizer, LongWordsTakeTimeInProportion) {
  // A quadratic merge would take minutes.
  const std::string path = data("gpt2.json");
  if (lacks_library(path)) GTEST_SKIP() << "skipped: no PCRE2";
  const Tokenizer tokenizer = Tokenizer::load(path);
  std::string word;
  for (int i = 0; i < 1 << 20; ++i) word += char('a' + (i * 7 + i / 13) % 26);
  const Encoding encoding = tokenizer.encode(word);
  EXPECT_EQ(tokenizer.decode(encoding.ids), word);
  // The start of a long word has the tokens of a short one: both ways of joining agree.
  const Ids few = tokenizer.encode(word.substr(0, 40)).ids, many = tokenizer.encode(word.substr(0, 400)).ids;
  EXPECT_TRUE(std::equal(few.begin(), few.end() - 4, many.begin()));
}

TEST(Tokenizer, OldPairOfFilesGivesTheSameTokens) {
  if (lacks_library(data("gpt2.json"))) GTEST_SKIP() << "skipped: no PCRE2";
  const TemporaryFolder folder;
  const nlohmann::json model = nlohmann::json::parse(get(data("gpt2.json")))["model"];
  put(folder / "vocab.json", model["vocab"].dump());
  std::string merges = "#version: 0.2\n";
  for (const auto& merge : model["merges"]) {
    merges += merge[0].get<std::string>();
    (merges += ' ') += merge[1].get<std::string>() + "\n";
  }
  put(folder / "merges.txt", merges);
  const Tokenizer old = Tokenizer::load(folder.path()), whole = Tokenizer::load(data("gpt2.json"));
  for (const char* text : {"The licence", " isn't <|endoftext|> free", "caf\xC3\xA9 12345"})
    EXPECT_EQ(old.encode(text).ids, whole.encode(text).ids);
  EXPECT_EQ(Tokenizer::load(folder / "merges.txt").vocab_size(), whole.vocab_size());
  EXPECT_EQ(old.special().eos, std::optional<int32_t>(0));
}

TEST(Tokenizer, VocabularyOfLinesGivesTheSameTokens) {
  if (lacks_library(data("bert.json"))) GTEST_SKIP() << "skipped: no utf8proc";
  const TemporaryFolder folder;
  const nlohmann::json vocabulary = nlohmann::json::parse(get(data("bert.json")))["model"]["vocab"];
  std::vector<std::string> lines(vocabulary.size());
  for (const auto& [token, id] : vocabulary.items()) lines[id.get<size_t>()] = token;
  std::string text;
  for (const std::string& line : lines) text += line + "\n";
  put(folder / "vocab.txt", text);
  const Tokenizer old = Tokenizer::load(folder / "vocab.txt"), whole = Tokenizer::load(data("bert.json"));
  EXPECT_EQ(old.encode_pair("The Free", "caf\xC3\xA9 software!").ids,
            whole.encode_pair("The Free", "caf\xC3\xA9 software!").ids);
  EXPECT_EQ(old.encode_pair("a", "b").types, (Ids{0, 0, 0, 1, 1}));
  put(folder / "tokenizer_config.json", R"({"do_lower_case": false, "pad_token": {"content": "[SEP]"}})");
  const Tokenizer cased = Tokenizer::load(folder.path());
  EXPECT_NE(cased.encode("The").ids, whole.encode("The").ids);
  EXPECT_EQ(cased.special().pad, cased.id_of("[SEP]"));
}

Ids joined(std::initializer_list<Ids> parts) {
  Ids all;
  for (const Ids& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

TEST(Tokenizer, OldPairHasTheTokensOfItsConfig) {
  if (lacks_library(data("gpt2.json"))) GTEST_SKIP() << "skipped: no PCRE2";
  const TemporaryFolder folder;
  const Tokenizer whole = Tokenizer::load(data("gpt2.json"));
  const int32_t end = int32_t(whole.vocab_size()), pad = end + 1, added = end + 2;
  nlohmann::json vocab = nlohmann::json::parse(get(data("gpt2.json")))["model"]["vocab"];
  vocab["</s>"] = end, vocab["<pad>"] = pad;
  put(folder / "vocab.json", vocab.dump());
  put(folder / "merges.txt", "#version: 0.2\n");
  const Tokenizer bare = Tokenizer::load(folder.path());
  put(folder / "tokenizer_config.json",
      R"({"bos_token": "</s>", "eos_token": {"content": "</s>"}, "add_bos_token": true})");
  put(folder / "special_tokens_map.json", R"({"pad_token": "<pad>", "eos_token": "<pad>"})");
  put(folder / "added_tokens.json", R"({"<call>": )" + std::to_string(added) + "}");
  // As OPT's: the end token begins each text, and is itself where a text names it.
  const Tokenizer opt = Tokenizer::load(folder.path());
  const Ids hi = bare.encode("Hi").ids, x = bare.encode("x").ids;
  EXPECT_EQ(opt.encode("Hi</s>x").ids, joined({{end}, hi, {end}, x}));
  EXPECT_EQ(opt.encode("Hi<call>x<pad>").ids, joined({{end}, hi, {added}, x, {pad}}));
  EXPECT_EQ(opt.encode("Hi", {.special = false}).ids, hi);
  EXPECT_EQ(opt.special().bos, std::optional(end));
  EXPECT_EQ(opt.special().eos, std::optional(pad));  // special_tokens_map.json takes precedence
  EXPECT_EQ(opt.special().pad, std::optional(pad));
  EXPECT_TRUE(opt.is_special(pad));
  EXPECT_FALSE(opt.is_special(added));
  EXPECT_NE(opt.fingerprint(), bare.fingerprint());
  const auto refused = [&](const std::string& config) {
    put(folder / "tokenizer_config.json", config);
    return message_of([&] { Tokenizer::load(folder.path()); });
  };
  EXPECT_NE(refused(R"({"add_bos_token": true})").find("add_bos_token is true, but there is no bos_token"),
            std::string::npos);
  EXPECT_NE(
      refused(R"({"add_bos_token": true, "bos_token": "<x>"})").find("bos_token is \"<x>\", which is not"),
      std::string::npos);
  EXPECT_NE(
      refused(R"({"added_tokens_decoder": {"x": {"content": "y"}}})").find("the key \"x\" is no number"),
      std::string::npos);
}

// As transformers 5.24, which takes the class of the model's type where no file of the tokenizer names it.
TEST(Tokenizer, APairWithTokensOfRobertaIsThatOfItsModel) {
  const TemporaryFolder folder;
  put(folder / "vocab.json", R"({"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "<mask>": 4, "H": 5, "i": 6})");
  put(folder / "merges.txt", "#version: 0.2\n");
  const auto encoded = [&] { return Tokenizer::load(folder.path()).encode("Hi").ids; };
  EXPECT_EQ(encoded(), (Ids{0, 5, 6, 2}));
  put(folder / "config.json", R"({"model_type": "roberta"})");
  EXPECT_EQ(encoded(), (Ids{0, 5, 6, 2}));
  put(folder / "config.json", R"({"model_type": "gpt2"})");
  EXPECT_EQ(encoded(), (Ids{5, 6}));
  put(folder / "tokenizer_config.json", R"({"tokenizer_class": "RobertaTokenizer"})");
  EXPECT_EQ(encoded(), (Ids{0, 5, 6, 2}));
}

TEST(Tokenizer, ARoleThatTheConfigNamesIsNotGuessed) {
  const TemporaryFolder folder;
  put(folder / "tokenizer.json",
      R"({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "added_tokens": [
    {"id": 1, "content": "<|endoftext|>", "special": true}]})");
  EXPECT_EQ(Tokenizer::load(folder.path()).special().eos, std::optional(1));
  put(folder / "tokenizer_config.json", R"({"eos_token": "<|end|>"})");  // which is not in the file
  EXPECT_EQ(Tokenizer::load(folder.path()).special().eos, std::optional(2));
}

// Numbers and flags are those of transformers 5.24.
TEST(Tokenizer, OfOneFileHasTheTokensOfItsConfigToo) {
  const TemporaryFolder folder;
  put(folder / "tokenizer.json",
      R"({"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}, "added_tokens": [
    {"id": 2, "content": "<e>", "special": true}]})");
  const Tokenizer bare = Tokenizer::load(folder.path());
  EXPECT_EQ(bare.vocab_size(), 3);
  put(folder / "tokenizer_config.json",
      R"({"pad_token": "<p>", "eos_token": "b", "added_tokens_decoder": {
    "9": {"content": "<x>", "lstrip": true, "special": true}, "7": {"content": "<y>"},
    "2": {"content": "<e>", "rstrip": true, "special": true}}, "extra_special_tokens": ["<z>"]})");
  const Tokenizer whole = Tokenizer::load(folder.path());
  EXPECT_EQ(whole.encode("a <x><y>b<e>  a<p><z>").ids, (Ids{0, 4, 3, 1, 2, 0, 5, 6}));
  EXPECT_EQ(whole.decode(Ids{0, 4, 3, 1, 2, 0, 5, 6}), "a <y> a");
  EXPECT_EQ(whole.special().pad, std::optional(5));
  EXPECT_EQ(whole.special().eos, std::optional(1));
  EXPECT_NE(whole.fingerprint(), bare.fingerprint());
  put(folder / "special_tokens_map.json", R"({"eos_token": "a", "mask_token": "<m>"})");
  EXPECT_EQ(Tokenizer::load(folder.path()).fingerprint(), whole.fingerprint());  // for lists of old folders
  put(folder / "special_tokens_map.json", "{}");
  // Old folders list them elsewhere; what the file has already changes nothing.
  put(folder / "tokenizer_config.json", R"({"eos_token": "<e>"})");
  EXPECT_EQ(Tokenizer::load(folder.path()).fingerprint(), bare.fingerprint());
  put(folder / "added_tokens.json", R"({"<n>": 8, "<m>": 5})");
  const Tokenizer old = Tokenizer::load(folder.path());
  EXPECT_EQ(old.encode("a<n><m>").ids, (Ids{0, 4, 3}));
  EXPECT_FALSE(old.is_special(3));
}

TEST(Tokenizer, SentencePieceHasTheTokensOfItsConfig) {
  if (lacks_library(data("sp_bpe.model"))) GTEST_SKIP() << "skipped: no SentencePiece";
  const TemporaryFolder folder;
  const Tokenizer bare = Tokenizer::load(data("sp_bpe.model"));
  const int32_t end = int32_t(bare.vocab_size());
  put(folder / "tokenizer.model", get(data("sp_bpe.model")));
  EXPECT_EQ(Tokenizer::load(folder.path()).fingerprint(), bare.fingerprint());
  put(folder / "added_tokens.json",
      R"({"<|im_end|>": )" + std::to_string(end) + R"(, "<note>": )" + std::to_string(end + 1) + "}");
  const auto with = [&](const std::string& more) {
    put(folder / "tokenizer_config.json", R"({"eos_token": "<|im_end|>")" + more + "}");
    return Tokenizer::load(folder.path());
  };
  const Ids hi = bare.encode("Hi", {.special = false}).ids, x = bare.encode("x", {.special = false}).ids;
  const Tokenizer chat = with(R"(, "add_bos_token": false)");
  const Ids ids = joined({hi, {end}, x});
  EXPECT_EQ(chat.encode("Hi<|im_end|>x").ids, ids);
  EXPECT_EQ(chat.encode("Hi<note>x").ids, joined({hi, {end + 1}, x}));
  EXPECT_EQ(chat.special().eos, std::optional(end));
  EXPECT_EQ(chat.special().bos, bare.special().bos);
  EXPECT_EQ(chat.vocab_size(), end + 2);
  EXPECT_EQ(chat.token(end), "<|im_end|>");
  EXPECT_EQ(chat.id_of("<|im_end|>"), std::optional(end));
  EXPECT_EQ(chat.decode(ids, false), "Hi<|im_end|>x");
  for (const bool skips : {false, true}) {
    TokenStream stream(chat, skips);
    std::string streamed;
    for (const int32_t id : ids) streamed += stream.next(id);
    EXPECT_EQ(streamed + stream.finish(), chat.decode(ids, skips));
  }
  EXPECT_NE(chat.fingerprint(), bare.fingerprint());
  EXPECT_EQ(with("").encode("Hi<|im_end|>").ids, joined({{*bare.special().bos}, hi, {end}}));
  EXPECT_EQ(with(R"(, "add_eos_token": true)").encode("Hi").ids, joined({{*bare.special().bos}, hi, {end}}));
  // Without the old ways, only a text's beginning gets a blank in front.
  const Tokenizer modern = with(R"(, "legacy": false)");
  const Ids inside = modern.encode("Hi<|im_end|>x", {.special = false}).ids;
  EXPECT_TRUE(std::equal(hi.begin(), hi.end(), inside.begin()));
  EXPECT_EQ(bare.token(inside.at(hi.size() + 1)), "x");
  EXPECT_EQ(modern.decode(inside, false), "Hi<|im_end|>x");
}

TEST(Tokenizer, VocabularyOfLinesKeepsAccentsAndChineseWordsAsItsConfigSays) {
  if (lacks_library(data("bert.json"))) GTEST_SKIP() << "skipped: no utf8proc";
  const TemporaryFolder folder;
  nlohmann::json file = nlohmann::json::parse(get(data("bert.json")));
  std::vector<std::string> lines(file["model"]["vocab"].size());
  for (const auto& [token, id] : file["model"]["vocab"].items()) lines[id.get<size_t>()] = token;
  std::string text;
  for (const std::string& line : lines) text += line + "\n";
  put(folder / "vocab.txt", text);
  put(folder / "tokenizer_config.json", R"({"strip_accents": false, "tokenize_chinese_chars": false})");
  file["normalizer"] = {{"type", "BertNormalizer"},
                        {"lowercase", true},
                        {"strip_accents", false},
                        {"handle_chinese_chars", false}};
  const std::string words = "\xC3\x84pfel sch\xC3\xB6n \xE4\xB8\x96\xE7\x95\x8C";
  const Ids ids = Tokenizer::load(folder.path()).encode(words).ids;
  EXPECT_EQ(ids, Tokenizer::parse("whole", file.dump()).encode(words).ids);
  EXPECT_NE(ids, Tokenizer::load(data("bert.json")).encode(words).ids);
}

TEST(Tokenizer, CutsPairsTheLongerFirst) {
  if (lacks_library(data("bert.json"))) GTEST_SKIP() << "skipped: no utf8proc";
  const Tokenizer tokenizer = Tokenizer::load(data("bert.json"));
  const auto sizes = [&](const std::string& a, const std::string& b, int64_t most) {
    const Encoding e = tokenizer.encode_pair(a, b, {.max_length = most});
    const size_t second = size_t(std::count(e.types.begin(), e.types.end(), 1));
    return std::make_pair(e.ids.size() - second - 2, second - 1);
  };
  using Sizes = std::pair<size_t, size_t>;
  EXPECT_EQ(sizes("a b c d e f", "a b", 9), (Sizes{4, 2}));
  EXPECT_EQ(sizes("a b", "a b c d e f", 9), (Sizes{2, 4}));
  EXPECT_EQ(sizes("a b c d", "a b c d", 8), (Sizes{2, 3}));
  EXPECT_EQ(sizes("a b c d e", "a b c d", 8), (Sizes{3, 2}));
  EXPECT_EQ(sizes("a b c d", "a b c d", 3), (Sizes{0, 0}));
  EXPECT_TRUE(
      throws([&] { sizes("a", "b", 2); }, "at most 2 tokens, but 3 special ones stand around a pair"));
}

TEST(Tokenizer, FingerprintIsOfTheMeaningNotTheLayout) {
  const std::string json = byte_tokenizer();
  const std::string compact = nlohmann::json::parse(json).dump();
  EXPECT_EQ(Tokenizer::parse("a", json).fingerprint(), Tokenizer::parse("b", compact).fingerprint());
  EXPECT_NE(Tokenizer::parse("a", json).fingerprint(),
            Tokenizer::parse("a", byte_tokenizer({"<end>"})).fingerprint());
}

TEST(TokenStream, GivesWholeCharactersAndNoMore) {
  const Tokenizer tokenizer = Tokenizer::parse("bytes", byte_tokenizer());
  TokenStream stream(tokenizer);
  std::vector<std::string> parts;
  for (const int32_t id : tokenizer.encode("a\xC3\xA9\xE4\xB8\xAD\xF0\x9F\x98\x80z").ids)
    parts.push_back(stream.next(id));
  EXPECT_EQ(parts, (std::vector<std::string>{"a", "", "\xC3\xA9", "", "", "\xE4\xB8\xAD", "", "", "",
                                             "\xF0\x9F\x98\x80", "z"}));
  EXPECT_EQ(stream.finish(), "");
  // Bytes that become nothing: U+FFFD as soon as that is certain, and for what is open at the end.
  const auto id = [&](unsigned byte) { return int32_t(byte) + 1; };
  EXPECT_EQ(stream.next(id(0xE4)), "");
  EXPECT_EQ(stream.next(id('a')),
            "\xEF\xBF\xBD"
            "a");
  EXPECT_EQ(stream.next(id(0xF0)), "");
  EXPECT_EQ(stream.next(id(0x9F)), "");
  EXPECT_EQ(stream.finish(), "\xEF\xBF\xBD");
  EXPECT_EQ(stream.next(id('b')), "b");
  EXPECT_TRUE(throws([&] { stream.next(257); }, "there is no token 257"));
}

TEST(TrainBpe, IsDeterministicAndLossless) {
  std::vector<std::string> texts = {"low lower lowest low low",
                                    "new newer newest wide wider widest \xC3\xA9\xC3\xA9"};
  const std::string one = message_of([&] { train_bpe(texts, {.vocab_size = 300}); });
  if (one.find("which this build lacks") != std::string::npos) GTEST_SKIP() << "skipped: no PCRE2";
  const std::string json = train_bpe(texts, {.vocab_size = 300});
  std::swap(texts[0], texts[1]);
  EXPECT_EQ(train_bpe(texts, {.vocab_size = 300}), json);
  const Tokenizer tokenizer = Tokenizer::parse("trained", json);
  // The first joined pair is "w" + "e" or "l" + "o": counted by hand, "we" 6 times ("lower", "lowest",
  // "newer", "newest", and in none of "wide"), "lo" 5, "st" 3, "ow" 5, "es" 3, "er" 3.
  const nlohmann::json merges = nlohmann::json::parse(json)["model"]["merges"];
  ASSERT_GT(merges.size(), 5u);
  EXPECT_LE(tokenizer.token_count(), 300);
  for (const std::string& text : texts) EXPECT_EQ(tokenizer.decode(tokenizer.encode(text).ids), text);
  EXPECT_LT(tokenizer.encode(texts[0]).ids.size() * 2, texts[0].size());
  EXPECT_TRUE(throws([&] { train_bpe(texts, {.vocab_size = 256}); }, "a vocabulary of 256; expected 257"));
  EXPECT_TRUE(throws(
      [&] {
        train_bpe(texts, {.vocab_size = 300, .special = {"a", "a"}});
      },
      "is given twice"));
}

TEST(TrainBpe, CountsByHand) {
  const std::string json = [] {
    try {
      return train_bpe({"aab aab aab ab"}, {.vocab_size = 260, .special = {}});
    } catch (const Error&) {
      return std::string();
    }
  }();
  if (json.empty()) GTEST_SKIP() << "skipped: no PCRE2";
  // Words: "aab", " aab" twice, " ab". Pairs: a+b 4, a+a 3, blank+a 3. After "ab": a+ab 3, blank+a 2,
  // blank+ab 1. After "aab": blank+aab 2. One pair more is left, once: too few.
  const nlohmann::json merges = nlohmann::json::parse(json)["model"]["merges"];
  EXPECT_EQ(merges, nlohmann::json::parse(R"([["a","b"],["a","ab"],["\u0120","aab"]])"));
}

TEST(TrainBpe, AWordMayBeAMillionCharacters) {
  std::string word;
  for (int i = 0; i < 1 << 19; ++i) word += "ab";
  std::string json;
  const std::string error = message_of([&] { json = train_bpe({word}, {.vocab_size = 400, .special = {}}); });
  if (json.empty()) GTEST_SKIP() << "skipped: " << error;
  const nlohmann::json merges = nlohmann::json::parse(json)["model"]["merges"];
  // "ab", "abab", ... until two halves are left, which occur once.
  ASSERT_EQ(merges.size(), 19u);
  EXPECT_EQ(merges[0], nlohmann::json::parse(R"(["a","b"])"));
  EXPECT_EQ(merges[18][0], word.substr(0, 1 << 18));
  EXPECT_EQ(merges[18][1], word.substr(0, 1 << 18));
}

TEST(CharacterTokenizer, FallsBackToBytes) {
  const Tokenizer tokenizer = Tokenizer::parse("characters", character_tokenizer({"ba\xC3\xA9"}));
  EXPECT_EQ(tokenizer.encode("ab\xC3\xA9").ids, (Ids{257, 258, 259}));
  EXPECT_EQ(tokenizer.encode("z").ids, (Ids{1 + 'z'}));
  for (const char* text : {"abba", "\xE4\xB8\xAD\xF0\x9F\x98\x80", "a z\n"})
    EXPECT_EQ(tokenizer.decode(tokenizer.encode(text).ids), text);
}

}  // namespace
}  // namespace tessera::io::test
