#include "io/events.h"

#include "tests/io/files.h"

namespace tessera::io::test {
namespace {

/// RFC 3720, appendix B.4.
TEST(Crc32c, KnownValues) {
  EXPECT_EQ(crc32c(""), 0u);
  EXPECT_EQ(crc32c("123456789"), 0xE3069283u);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8A9136AAu);
  EXPECT_EQ(crc32c(std::string(32, '\xFF')), 0x62A8AB43u);
}

TEST(Events, AreFramedRecords) {
  const TemporaryFolder folder;
  if (!EventWriter::available()) {
    EXPECT_TRUE(throws([&] { EventWriter(folder / "run"); }, "this build has no libprotobuf"));
    return;
  }
  EventWriter events(folder / "run");
  events.scalar("a", 3, 0.5, 2.0);
  events.flush();
  const std::string bytes = get(events.path());
  // The second record: Event{wall_time: 2, step: 3, summary{value{tag: "a", simple_value: 0.5}}}, by hand.
  const std::string message("\x09\0\0\0\0\0\0\0\x40\x10\3\x2A\x0A\x0A\x08\x0A\1a\x15\0\0\0\x3F", 23);
  ASSERT_GT(bytes.size(), message.size() + 16);
  EXPECT_EQ(bytes.substr(bytes.size() - 4 - message.size(), message.size()), message);
  EXPECT_NE(bytes.find("brain.Event:2"), std::string::npos);
  const std::string length("\x17\0\0\0\0\0\0\0", 8);
  const auto masked = [](const std::string& data) {
    const uint32_t crc = crc32c(data);
    const uint32_t value = ((crc >> 15) | (crc << 17)) + 0xA282EAD8u;
    return std::string(reinterpret_cast<const char*>(&value), 4);
  };
  EXPECT_TRUE(bytes.ends_with(length + masked(length) + message + masked(message)));
}

TEST(Events, AFailedRecordIsWrittenOver) {
  if (!EventWriter::available()) GTEST_SKIP() << "this build has no libprotobuf";
  const RestoreFileCalls restore;
  const TemporaryFolder folder;
  EventWriter events(folder.path());
  const size_t before = get(events.path()).size();
  const FileCalls system = FileCalls::system();
  int calls = 0;
  file_calls().pwrite = [&](int file, const void* from, size_t, off_t offset) -> ssize_t {
    return ++calls == 1 ? system.pwrite(file, from, 5, offset) : (errno = ENOSPC, -1);
  };
  EXPECT_TRUE(throws([&] { events.scalar("a", 1, 1); },
                     events.path() + " at byte " + std::to_string(before) + ": No space left on device"));
  file_calls() = system;
  events.scalar("b", 2, 2);
  const std::string bytes = get(events.path());
  uint64_t length = 0;
  std::memcpy(&length, bytes.data() + before, 8);
  EXPECT_EQ(bytes.size(), before + 16 + length);
}

}  // namespace
}  // namespace tessera::io::test
