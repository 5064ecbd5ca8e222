#include "io/events.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>

#include "io/events_internal.h"
#include "io/file.h"
#include "io/syscall_internal.h"

namespace tessera::io {
namespace {

constexpr std::array<uint32_t, 256> kCrcTable = [] {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? 0x82F63B78u : 0);
    table[i] = crc;
  }
  return table;
}();

std::string bytes_of(auto number) {
  std::string bytes(sizeof number, '\0');
  std::memcpy(bytes.data(), &number, sizeof number);
  return bytes;
}

/// A CRC of data that holds CRCs would be weak: records store it rotated and shifted.
std::string masked_crc(std::string_view data) {
  const uint32_t crc = crc32c(data);
  return bytes_of(uint32_t(((crc >> 15) | (crc << 17)) + 0xA282EAD8u));
}

double now() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace

uint32_t crc32c(std::string_view data) {
  uint32_t crc = 0xFFFFFFFFu;
  for (const char c : data) crc = (crc >> 8) ^ kCrcTable[(crc ^ static_cast<unsigned char>(c)) & 0xFF];
  return ~crc;
}

bool EventWriter::available() {
  return events::available();
}

EventWriter::EventWriter(const std::string& folder) {
  const double start = now();
  const std::string version = events::version_message(start);
  make_folder(folder);
  static std::atomic<int> number{0};
  std::array<char, 256> host{};
  if (::gethostname(host.data(), host.size() - 1) != 0) std::strcpy(host.data(), "localhost");
  path_ = (std::filesystem::path(folder) /
           ("events.out.tfevents." + std::to_string(int64_t(start)) + '.' + host.data() + '.' +
            std::to_string(::getpid()) + '.' + std::to_string(number.fetch_add(1))))
              .string();
  constexpr int kFlags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
  file_ = retry([&] { return file_calls().open(path_.c_str(), kFlags, 0666); });
  const int error = errno;
  check(file_ >= 0, "events: cannot create ", path_, ": ", text_of(error));
  append(version);
}

EventWriter::~EventWriter() {
  if (file_ >= 0) file_calls().close(file_);
}

void EventWriter::append(const std::string& message) {
  const std::string length = bytes_of(uint64_t(message.size()));
  const std::string record = length + masked_crc(length) + message + masked_crc(message);
  for (size_t done = 0; done < record.size();) {
    const ssize_t put = retry([&] {
      return file_calls().pwrite(file_, record.data() + done, record.size() - done, off_t(written_ + done));
    });
    // A partly written record is overwritten by the next one, so that no half of a record stays in the
    // middle.
    const int error = put < 0 ? errno : ENOSPC;
    check(put > 0, "events: cannot write ", path_, " at byte ", written_, ": ", text_of(error));
    done += size_t(put);
  }
  written_ += record.size();
}

void EventWriter::scalar(std::string_view tag, int64_t step, double value) {
  scalar(tag, step, value, now());
}

void EventWriter::scalar(std::string_view tag, int64_t step, double value, double wall_time) {
  append(events::scalar_message(tag, step, float(value), wall_time));
}

void EventWriter::flush() {
  const bool flushed = retry([&] { return file_calls().fsync(file_); }) == 0;
  const int error = errno;
  check(flushed, "events: cannot flush ", path_, " to the disk: ", text_of(error));
}

}  // namespace tessera::io
