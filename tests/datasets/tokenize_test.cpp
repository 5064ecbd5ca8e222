#include "datasets/tokenize.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "datasets/tokens.h"
#include "io/tokenizer/train.h"
#include "tests/folder.h"

namespace tessera::datasets {
namespace {

namespace fs = std::filesystem;

TEST(Tokenize, AnEmptyLastDocumentAfterAFullShardCounts) {
  const TemporaryFolder folder;
  std::vector<std::string> paths;
  for (const std::string text : {"one\ntwo\n", "one-word-has-no-part-that-is-held-out\n"}) {
    paths.push_back(folder / (std::to_string(paths.size()) + ".txt"));
    put(paths.back(), text);
  }
  const io::Tokenizer tokenizer = io::Tokenizer::parse("bytes", io::byte_tokenizer({"<end>"}));
  const std::string out = folder / "shards";
  const Tokenized done = tokenize_files(paths, tokenizer, out, {.validation = 0.5, .shard_tokens = 2});
  EXPECT_EQ(done.train.documents, 2u);
  EXPECT_EQ(done.train.shards, 2);
  EXPECT_EQ(done.validation.documents, 2u);
  EXPECT_EQ(done.validation.empty_documents, 1u);
  EXPECT_EQ(done.validation.shards, 1);
  EXPECT_EQ(TokenShard((fs::path(out) / shard_name("validation", 0)).string()).info().documents, 2u);
}

}  // namespace
}  // namespace tessera::datasets
