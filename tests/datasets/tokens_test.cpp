#include "datasets/tokens.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <functional>
#include <numeric>

#include "datasets/loader.h"
#include "io/checksum.h"
#include "io/file.h"
#include "tests/errors.h"
#include "tests/folder.h"

namespace tessera::datasets {
namespace {

namespace fs = std::filesystem;

const std::string kPrint(32, 'a');

class Shards : public ::testing::Test {
 protected:
  std::string path(const std::string& name = "x.tokens") const { return folder_ / name; }
  void put(const std::string& name, const std::string& content) const { folder_.put(name, content); }
  std::string bytes(const std::string& name = "x.tokens") const { return folder_.get(name); }
  /// Documents of the numbers from 0 on, of these lengths.
  std::string make(const std::string& name, const std::vector<int>& lengths, int first = 0,
                   int64_t vocab = 1000, const std::string& print = kPrint) const {
    TokenShardWriter writer(vocab, print, 0);
    for (const int length : lengths) {
      std::vector<int32_t> document(size_t(length), 0);
      std::iota(document.begin(), document.end(), first);
      first += length;
      writer.add(document);
    }
    writer.write(path(name));
    return path(name);
  }
  const TemporaryFolder folder_;
};

TEST_F(Shards, KeepTokensAndDocuments) {
  for (const int64_t vocab : {1000, 65536, 65537, 1 << 20}) {
    const TokenShard shard(make("x.tokens", {3, 0, 4, 1}, 7, vocab));
    EXPECT_EQ(shard.info().tokens, 8u);
    EXPECT_EQ(shard.info().documents, 4u);
    EXPECT_EQ(shard.info().vocab_size, uint64_t(vocab));
    EXPECT_EQ(shard.info().fingerprint, kPrint);
    EXPECT_EQ(fs::file_size(path()), 128u + (vocab <= 65536 ? 16 : 32) + 32);
    std::vector<int64_t> tokens(5);
    shard.read(2, tokens);
    EXPECT_EQ(tokens, (std::vector<int64_t>{9, 10, 11, 12, 13}));
    EXPECT_EQ(shard.borders(0, 8), (std::vector<uint64_t>{3, 7}));
    EXPECT_EQ(shard.borders(3, 7), (std::vector<uint64_t>{}));
    EXPECT_NE(message_of([&] { shard.read(4, tokens); }).find("reach past its end"), std::string::npos);
  }
  TokenShardWriter writer(10, kPrint);
  EXPECT_NE(message_of([&] { writer.add(std::vector<int32_t>{10}); }).find("outside the vocabulary of 10"),
            std::string::npos);
  EXPECT_NE(message_of([] { TokenShardWriter(10, "abc"); }).find("32 hexadecimal digits"), std::string::npos);
  EXPECT_NE(message_of([] { TokenShardWriter(10, kPrint, 10); }).find("end token 10"), std::string::npos);
}

TEST_F(Shards, RefuseEveryCutAndEveryFlippedBit) {
  make("x.tokens", {5, 6});
  const std::string good = bytes();
  for (size_t size = 0; size < good.size(); ++size) {
    put("cut.tokens", good.substr(0, size));
    ASSERT_NE(message_of([&] { TokenShard shard(path("cut.tokens")); }), "") << size;
  }
  for (size_t bit = 0; bit < 8 * good.size(); ++bit) {
    std::string bad = good;
    bad[bit / 8] = char(bad[bit / 8] ^ 1 << (bit % 8));
    put("bad.tokens", bad);
    ASSERT_NE(message_of([&] { TokenShard shard(path("bad.tokens")); }), "") << bit;
  }
  put("long.tokens", good + "x");
  EXPECT_NE(message_of([&] { TokenShard shard(path("long.tokens")); }).find("cut short"), std::string::npos);
}

/// Heads that have their checksum and lie.
TEST_F(Shards, RefuseHeadsThatLie) {
  make("x.tokens", {5, 6});
  const std::string good = bytes();
  struct Case {
    size_t place;
    uint64_t value;
    size_t size;
    const char* error;
  };
  const std::vector<Case> cases = {{8, 2, 4, "is of version 2, expected 1"},
                                   {8, 0, 4, "is of version 0"},
                                   {12, 4, 4, "do not fit together"},
                                   {12, 0, 4, "do not fit together"},
                                   {16, 12, 8, "the documents end at 11, the tokens at 12"},
                                   {16, 10, 8, "document 1 ends at 11"},
                                   {16, 0, 8, "cut short"},
                                   {16, uint64_t{1} << 63, 8, "cut short"},
                                   {16, ~uint64_t{0}, 8, "cut short"},
                                   {24, 3, 8, "cut short"},
                                   {24, 1, 8, "cut short"},
                                   {24, uint64_t{1} << 61, 8, "cut short"},
                                   {24, (uint64_t{1} << 61) + 2, 8, "cut short"},
                                   {32, 0, 8, "do not fit together"},
                                   {32, 1 << 20, 8, "do not fit together"},
                                   {32, ~uint64_t{0}, 8, "do not fit together"},
                                   {40, 1000, 8, "do not fit together"},
                                   {40, ~uint64_t{1}, 8, "do not fit together"},
                                   {48, 'Z', 1, "the fingerprint has not 32 digits"},
                                   {0, 'X', 1, "does not begin with TESSTOK1"}};
  for (const Case& one : cases) {
    std::string bad = good;
    std::memcpy(bad.data() + one.place, &one.value, one.size);
    io::Xxh3 hash;
    hash.add(bad.data(), 112);
    std::memcpy(bad.data() + 112, hash.digits().data(), 16);
    put("bad.tokens", bad);
    const std::string error = message_of([&] { TokenShard shard(path("bad.tokens")); });
    EXPECT_NE(error.find(one.error), std::string::npos) << one.place << " " << one.value << ": " << error;
    EXPECT_NE(error.find("bad.tokens"), std::string::npos);
  }
  for (const auto& [name, content, error] : std::vector<std::tuple<std::string, std::string, std::string>>{
           {"a", "hello", "fewer than the head of 128"},
           {"b", std::string(200, 'x'), "does not begin with TESSTOK1"},
           {"c", "version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"}}) {
    put(name, content);
    EXPECT_NE(message_of([&] { TokenShard shard(path(name)); }).find(error), std::string::npos);
  }
  EXPECT_NE(message_of([&] { TokenShard shard(folder_.path()); }).find("is a directory"), std::string::npos);
}

TEST_F(Shards, NoticesTokensOutsideTheVocabularyAndACutAfterOpening) {
  make("x.tokens", {5, 6});
  std::string bad = bytes();
  bad[128 + 2 * 7] = char(0xFF), bad[128 + 2 * 7 + 1] = char(0xFF);
  put("bad.tokens", bad);
  const TokenShard unverified(path("bad.tokens"), false);
  std::vector<int64_t> tokens(11);
  expect_error([&] { unverified.read(0, tokens); }, {"token 7 is 65535, outside the vocabulary of 1000"});
  const TokenShard shard(path("x.tokens"));
  fs::resize_file(path("x.tokens"), 130);
  EXPECT_NE(message_of([&] { shard.read(0, tokens); }).find("another process is changing it"),
            std::string::npos);
}

TEST_F(Shards, WindowsGoOnAcrossShards) {
  // 0 ... 99 in three shards, whatever their sizes.
  const std::vector<std::string> paths = {make("a", {10, 23}, 0), make("b", {1}, 33), make("c", {60, 6}, 34)};
  const TokenWindows windows(paths, {.length = 8});
  EXPECT_EQ(windows.tokens(), 100u);
  ASSERT_EQ(windows.size(), 12);
  for (int64_t i = 0; i < windows.size(); ++i) {
    const TokenBatch batch = windows.batch(std::vector<int64_t>{i});
    for (int64_t k = 0; k < 8; ++k) {
      EXPECT_EQ(batch.inputs.to_vector<int64_t>()[size_t(k)], 8 * i + k);
      EXPECT_EQ(batch.targets.to_vector<int64_t>()[size_t(k)], 8 * i + k + 1);
    }
  }
  const std::vector<int64_t> past = {12};
  EXPECT_NE(message_of([&] { windows.batch(past); }).find("no window 12 of 12"), std::string::npos);
  EXPECT_NE(message_of([&] { TokenWindows(paths, {.length = 100}); }).find("give no window of 100"),
            std::string::npos);
  expect_error([&] { TokenWindows(paths, {.length = 8, .fingerprint = std::string(32, 'b')}); },
               {"tokenize the text again"});
  const std::vector<std::string> mixed = {paths[0], make("d", {9}, 0, 1000, std::string(32, 'c'))};
  EXPECT_NE(message_of([&] { TokenWindows(mixed, {.length = 8}); }).find("different tokenizers"),
            std::string::npos);
}

TEST_F(Shards, WindowsMayOverlap) {
  const std::vector<std::string> shards = {make("a.tokens", {5, 4}), make("b.tokens", {6}, 9)};
  for (const int64_t stride : {1, 2, 3, 4}) {
    const TokenWindows windows(shards, {.length = 4, .stride = stride});
    EXPECT_EQ(windows.size(), (15 - 1 - 4) / stride + 1);
    for (int64_t index = 0; index < windows.size(); ++index) {
      const TokenBatch batch = windows.batch(std::vector<int64_t>{index});
      for (int64_t t = 0; t < 4; ++t) {
        EXPECT_EQ(batch.inputs.to_vector<int64_t>()[size_t(t)], index * stride + t);
        EXPECT_EQ(batch.targets.to_vector<int64_t>()[size_t(t)], index * stride + t + 1);
      }
    }
  }
  EXPECT_EQ(TokenWindows(shards, {.length = 4}).size(),
            TokenWindows(shards, {.length = 4, .stride = 4}).size());
  EXPECT_NE(message_of([&] { TokenWindows(shards, {.length = 4, .stride = 5}); }).find("a stride of 5"),
            std::string::npos);
}

TEST_F(Shards, KeepsDocumentsApart) {
  const TokenWindows windows({make("a", {3, 6}, 10), make("b", {2, 9}, 50)},
                             {.length = 8, .documents = true});
  ASSERT_EQ(windows.size(), 2);
  const TokenBatch batch = windows.batch(std::vector<int64_t>{0, 1});
  // Tokens 10 11 12 | 13 ... 18 | 50 51 | 52 ... 60; windows of 8: 10 ... 17, then 18 50 51 52 ... 56.
  EXPECT_EQ(batch.lengths.to_vector<int32_t>(), (std::vector<int32_t>{0, 3, 8, 9, 11, 16}));
  EXPECT_EQ(batch.inputs.to_vector<int64_t>(),
            (std::vector<int64_t>{10, 11, 12, 13, 14, 15, 16, 17, 18, 50, 51, 52, 53, 54, 55, 56}));
  EXPECT_EQ(batch.targets.to_vector<int64_t>(),
            (std::vector<int64_t>{11, 12, -100, 14, 15, 16, 17, 18, -100, 51, -100, 53, 54, 55, 56, 57}));
  EXPECT_EQ(batch.positions.to_vector<int64_t>(),
            (std::vector<int64_t>{0, 1, 2, 0, 1, 2, 3, 4, 0, 0, 1, 0, 1, 2, 3, 4}));
}

TEST_F(Shards, LoaderShufflesAndResumes) {
  const TokenWindows windows({make("a", {500}), make("b", {400}, 500)}, {.length = 8});
  const auto firsts = [](const TokenBatch& batch) {
    std::vector<int64_t> found;
    for (int64_t row = 0; row < batch.inputs.size(0); ++row)
      found.push_back(batch.inputs.data<int64_t>()[row * 8]);
    return found;
  };
  const auto run = [&](int workers, uint64_t from, int count) {
    Rng rng(5);
    Loader<TokenWindows> loader(
        windows,
        {.size = 4, .shuffle = &rng, .drop_last = true, .workers = workers, .device = Device::cpu()});
    LoaderState state = loader.state();
    state.batch = from;
    loader.set_state(state);
    std::vector<int64_t> all;
    for (int i = 0; i < count; ++i)
      for (const int64_t first : firsts(loader.next())) all.push_back(first);
    return all;
  };
  const std::vector<int64_t> whole = run(1, 0, 40);
  EXPECT_EQ(run(3, 0, 40), whole);
  EXPECT_EQ(run(2, 17, 23), std::vector<int64_t>(whole.begin() + 17 * 4, whole.end()));
  // An epoch has each window once, in another order than the file's.
  std::vector<int64_t> epoch(whole.begin(), whole.begin() + 28 * 4);
  EXPECT_FALSE(std::is_sorted(epoch.begin(), epoch.end()));
  std::sort(epoch.begin(), epoch.end());
  EXPECT_EQ(std::unique(epoch.begin(), epoch.end()), epoch.end());
}

TEST_F(Shards, NamesOfAFolder) {
  make(shard_name("train", 0), {5});
  make(shard_name("train", 1), {5});
  EXPECT_EQ(shard_paths(folder_.path(), "train").size(), 2u);
  expect_error([&] { shard_paths(folder_.path(), "validation"); }, {"no shards of the part validation"});
  fs::rename(path(shard_name("train", 0)), path(shard_name("train", 2)));
  EXPECT_NE(message_of([&] { shard_paths(folder_.path(), "train"); }).find("but not train-00000.tokens"),
            std::string::npos);
}

TEST(SplitPieces, AreTheWholeTextInLines) {
  std::string text;
  for (int i = 0; i < 100; ++i) text += std::string(size_t(i % 13), 'x') + "\n";
  for (const uint64_t bytes : {1, 5, 40, 333, 1000}) {
    std::string joined;
    const auto pieces = split_pieces(text, bytes);
    for (const std::string_view piece : pieces) {
      joined += piece;
      EXPECT_EQ(piece.back(), '\n');
      EXPECT_GE(piece.size(), std::min<size_t>(bytes, text.size()));
      EXPECT_LE(piece.size(), bytes + std::max<uint64_t>(bytes / 2, 13));
    }
    EXPECT_EQ(joined, text);
    EXPECT_GE(pieces.size(), text.size() / (bytes + 13));
  }
  EXPECT_EQ(split_pieces(text, 0).size(), 1u);
  EXPECT_EQ(split_pieces("no line ends here\n", 3),
            (std::vector<std::string_view>{"no ", "line ", "ends ", "here\n"}));
  EXPECT_EQ(split_pieces("no line\nends here", 3), (std::vector<std::string_view>{"no line\n", "ends here"}))
      << "only a text of one line is cut at spaces";
  EXPECT_EQ(split_pieces("wordwithoutend", 3).size(), 1u);
  EXPECT_EQ(split_pieces("", 3).size(), 0u);
}

TEST(SplitText, CutsBehindALine) {
  const std::string text = "one\ntwo\nthree\nfour\n";
  EXPECT_EQ(split_text(text, 0.3).validation, "four\n");
  EXPECT_EQ(split_text(text, 0.3).train, "one\ntwo\nthree\n");
  EXPECT_EQ(split_text(text, 0).validation, "");
  EXPECT_EQ(split_text("one\nno line end here", 0.3).validation, "");
  // A text of one line has no other place.
  EXPECT_EQ(split_text("no line end", 0.5).validation, "end");
  EXPECT_EQ(split_text("no line end\n", 0.5).validation, "end\n");
  EXPECT_EQ(split_text("wordwithoutend", 0.5).validation, "");
  EXPECT_TRUE(is_one_line("a b") && is_one_line("a b\n") && is_one_line(""));
  EXPECT_FALSE(is_one_line("a\nb") || is_one_line("\na\n"));
  for (const double share : {0.01, 0.2, 0.5, 0.9, 0.99}) {
    const TextSplit split = split_text(text, share);
    EXPECT_EQ(std::string(split.train) + std::string(split.validation), text);
  }
}

}  // namespace
}  // namespace tessera::datasets
