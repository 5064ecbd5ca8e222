#include "datasets/tokenize.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "datasets/tokens.h"
#include "io/tokenizer/train.h"

namespace tessera::datasets {
namespace {

namespace fs = std::filesystem;

TEST(Tokenize, AnEmptyLastDocumentAfterAFullShardCounts) {
  const fs::path folder = fs::path(testing::TempDir()) / ("tessera_tokenize_" + std::to_string(::getpid()));
  fs::remove_all(folder);
  fs::create_directories(folder);
  std::vector<std::string> paths;
  for (const std::string text : {"one\ntwo\n", "one-word-has-no-part-that-is-held-out\n"}) {
    paths.push_back((folder / (std::to_string(paths.size()) + ".txt")).string());
    std::ofstream(paths.back()) << text;
  }
  const io::Tokenizer tokenizer = io::Tokenizer::parse("bytes", io::byte_tokenizer({"<end>"}));
  const std::string out = (folder / "shards").string();
  const Tokenized done = tokenize_files(paths, tokenizer, out, {.validation = 0.5, .shard_tokens = 2});
  EXPECT_EQ(done.train.documents, 2u);
  EXPECT_EQ(done.train.shards, 2);
  EXPECT_EQ(done.validation.documents, 2u);
  EXPECT_EQ(done.validation.empty_documents, 1u);
  EXPECT_EQ(done.validation.shards, 1);
  EXPECT_EQ(TokenShard((fs::path(out) / shard_name("validation", 0)).string()).info().documents, 2u);
  fs::remove_all(folder);
}

}  // namespace
}  // namespace tessera::datasets
