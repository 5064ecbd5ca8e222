#include "io/checkpoint.h"
#include "tests/errors.h"
#include "tests/io/files.h"

// Whatever happens to a checkpoint's bytes is noticed before anything of it is used.

namespace tessera::io::test {
namespace {

std::string whole_checkpoint(const TemporaryFolder& folder) {
  save(folder / "file", named("weight", random_bits({16, 8}, DType::f32, 1)),
       named("moment", random_bits({16, 8}, DType::bf16, 2)),
       named("mask", random_bits({40}, DType::boolean, 3)), named("none", random_bits({0, 4}, DType::f32, 4)),
       named("step", int64_t{1200}), named("rng", Rng(42)));
  return get(folder / "file");
}

std::string error_of_reading(const std::string& bytes) {
  return message_of([&] { Checkpoint::read(InputFile("memory", bytes)); });
}

TEST(CheckpointDamage, EveryBitOfTheHeaderIsWatched) {
  const TemporaryFolder folder;
  std::string bytes = whole_checkpoint(folder);
  const size_t head = SafetensorsFile(InputFile("memory", bytes)).head().size();
  ASSERT_EQ(error_of_reading(bytes), "");
  for (size_t bit = 0; bit < head * 8; ++bit) {
    bytes[bit / 8] ^= char(1 << bit % 8);
    const std::string error = error_of_reading(bytes);
    ASSERT_NE(error.find("memory"), std::string::npos) << "bit " << bit << ": " << error;
    bytes[bit / 8] ^= char(1 << bit % 8);
  }
}

TEST(CheckpointDamage, RandomFlipsOfThePayloadNameTheTensorAndItsPlace) {
  const TemporaryFolder folder;
  std::string bytes = whole_checkpoint(folder);
  const SafetensorsFile file(InputFile("memory", std::string_view(bytes)));
  std::mt19937 random(1);
  for (int flip = 0; flip < 2000; ++flip) {
    const size_t head = file.head().size();
    const size_t at = head + random() % (bytes.size() - head);
    const char mask = char(1 << random() % 8);
    bytes[at] ^= mask;
    const std::string error = error_of_reading(bytes);
    for (const SafetensorsEntry& entry : file.entries())
      if (at >= entry.offset && at < entry.offset + entry.bytes) {
        std::ostringstream part;
        part << "memory: tensor '" << entry.name << "' (bytes " << entry.offset << " to "
             << entry.offset + entry.bytes << ") is damaged";
        ASSERT_NE(error.find(part.str()), std::string::npos) << "byte " << at << ": " << error;
      }
    bytes[at] ^= mask;
  }
  EXPECT_EQ(error_of_reading(bytes), "");
}

TEST(CheckpointDamage, ZeroedPagesAreNoticed) {
  const TemporaryFolder folder;
  save(folder / "file", named("x", random_bits({5000}, DType::f32, 1)));
  const std::string whole = get(folder / "file");
  for (size_t page = 0; page < whole.size(); page += 4096) {
    std::string bytes = whole;
    std::fill(bytes.begin() + ptrdiff_t(page), bytes.begin() + ptrdiff_t(std::min(page + 4096, whole.size())),
              '\0');
    EXPECT_NE(error_of_reading(bytes), "") << page;
  }
}

TEST(CheckpointDamage, TruncationAtEveryByteIsNoticed) {
  const TemporaryFolder folder;
  const std::string whole = whole_checkpoint(folder);
  for (size_t size = 0; size < whole.size(); ++size)
    ASSERT_NE(error_of_reading(whole.substr(0, size)), "") << size;
  EXPECT_NE(error_of_reading(whole + '\0'), "");
}

TEST(CheckpointDamage, NothingIsChangedByAFileThatIsRefused) {
  const TemporaryFolder folder;
  save(folder / "file", named("a", random_bits({4}, DType::i64, 1)),
       named("b", random_bits({4}, DType::f32, 2)));
  std::string bytes = get(folder / "file");
  bytes.back() ^= 1;  // the last tensor
  put(folder / "file", bytes);
  Tensor a = random_bits({4}, DType::i64, 5), b = random_bits({4}, DType::f32, 6);
  const std::string before = bits_of(a) + bits_of(b);
  EXPECT_TRUE(throws([&] { load(folder / "file", named("a", a), named("b", b)); }, "tensor 'b'"));
  EXPECT_EQ(bits_of(a) + bits_of(b), before);
}

}  // namespace
}  // namespace tessera::io::test
