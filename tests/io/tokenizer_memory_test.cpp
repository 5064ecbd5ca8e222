#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>

#include "io/tokenizer/file_internal.h"
#include "io/tokenizer/tokenizer.h"
#include "tests/errors.h"
#include "tests/io/files.h"

// Reading takes no more memory than the file's size and 64 MiB, whatever the file says. The sanitizers have
// an allocator of their own, so they leave this to the other builds.

#if defined(__SANITIZE_ADDRESS__)
#define TESSERA_COUNTS_MEMORY 0
#else
#define TESSERA_COUNTS_MEMORY 1
#endif

namespace {

std::atomic<int64_t> in_use{0}, peak{0};

[[maybe_unused]] void* counted(size_t bytes) {
  void* const memory = std::malloc(std::max<size_t>(bytes, 1));
  if (!memory) throw std::bad_alloc();
  const int64_t now = in_use += int64_t(::malloc_usable_size(memory));
  int64_t before = peak;
  while (now > before && !peak.compare_exchange_weak(before, now)) {
  }
  return memory;
}

[[maybe_unused]] void uncounted(void* memory) {
  if (memory) in_use -= int64_t(::malloc_usable_size(memory));
  std::free(memory);
}

}  // namespace

#if TESSERA_COUNTS_MEMORY
void* operator new(size_t bytes) {
  return counted(bytes);
}
void* operator new[](size_t bytes) {
  return counted(bytes);
}
void operator delete(void* memory) noexcept {
  uncounted(memory);
}
void operator delete[](void* memory) noexcept {
  uncounted(memory);
}
void operator delete(void* memory, size_t) noexcept {
  uncounted(memory);
}
void operator delete[](void* memory, size_t) noexcept {
  uncounted(memory);
}
#endif

namespace tessera::io::test {
namespace {

/// Bytes in use at most while `f` runs, above those before.
template <class F>
int64_t peak_of(F&& f) {
  const int64_t before = in_use;
  peak = before;
  f();
  return peak - before;
}

TEST(TokenizerMemory, StaysWithinTheFileAnd64MiB) {
  if (!TESSERA_COUNTS_MEMORY) GTEST_SKIP() << "skipped: under a sanitizer";
  std::string many_tokens = R"({"model":{"vocab":{)", many_merges, many_added = R"({"added_tokens":[)";
  for (int i = 0; i < 1'500'000; ++i)
    many_tokens += "\"" + std::to_string(i) + "\":" + std::to_string(i) + ",";
  many_tokens += R"("x":1500000}}})";
  for (int i = 0; i < 1'000'000; ++i)
    many_added += R"({"id":)" + std::to_string(i) + R"(,"content":")" + std::to_string(i) + R"("},)";
  many_added += R"({"id":1000001,"content":"x"}],"model":{"vocab":{}}})";
  many_merges = R"({"model":{"merges":[)" + repeated(R"("a b",)", 3'000'000) +
                R"("a b"],"vocab":{"a":0,"b":1,"ab":2}}})";
  std::string pieces;
  for (int i = 0; i < 1'000'000; ++i) {
    const std::string text = std::to_string(i);
    pieces += std::string("\x0A", 1) + char(text.size() + 2) + "\x0A" + char(text.size()) + text;
  }
  const std::vector<std::pair<const char*, std::string>> files = {
      {"tokens", many_tokens},
      {"merges", many_merges},
      {"added", many_added},
      {"values", R"({"a":[)" + repeated("[],", 5'000'000) + "0]}"},
      {"lists", repeated("[", 20'000'000)},
      {"objects", repeated(R"({"a":)", 4'000'000)},
      {"largest number", R"({"model":{"vocab":{"a":4194303}}})"},
      {"largest added", R"({"added_tokens":[{"id":4194303,"content":"x"}],"model":{"vocab":{}}})"},
      {"one text", "\"" + std::string(20'000'000, 'x') + "\""}};
  for (const auto& [what, text] : files) {
    const int64_t used =
        peak_of([&, &text = text] { message_of([&] { Tokenizer::parse("x.json", text); }); });
    EXPECT_LE(used, int64_t(text.size()) + (int64_t{64} << 20)) << what << ", a file of " << text.size();
  }
  EXPECT_LE(peak_of([&] { message_of([&] { Tokenizer::parse_sentencepiece("x.model", pieces); }); }),
            int64_t(pieces.size()) + (int64_t{64} << 20));
  EXPECT_LE(peak_of([&] {
              message_of([&] { parse_vocab_txt("vocab.txt", repeated("abcd\n", 4'000'000)); });
            }) - 5 * 4'000'000,
            int64_t{84} << 20);
}

}  // namespace
}  // namespace tessera::io::test
