#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace tessera::io {

/// Scalars for TensorBoard: an event file (records of an Event message, each framed by its length and the
/// masked CRC32C of length and message; tensorflow/core/lib/io/record_writer.h). Needs libprotobuf; without
/// it, creating a writer throws and says so.
///
/// The file is a log: each record is appended by one write, so a killed process leaves whole records except
/// perhaps the last. Values are stored as f32; NaN and infinity as they are.
class EventWriter {
 public:
  static bool available();
  /// Creates `folder` if need be, and a new file "events.out.tfevents.<seconds>.<host>.<process>.<number>" in
  /// it.
  explicit EventWriter(const std::string& folder);
  ~EventWriter();
  EventWriter(const EventWriter&) = delete;

  const std::string& path() const { return path_; }
  void scalar(std::string_view tag, int64_t step, double value);
  /// With the seconds since 1970 given: for tests and for logs written afterwards.
  void scalar(std::string_view tag, int64_t step, double value, double wall_time);
  /// Waits until the disk has all of it.
  void flush();

 private:
  void append(const std::string& message);
  std::string path_;
  int file_ = -1;
  uint64_t written_ = 0;
};

/// CRC-32C (Castagnoli polynomial 0x1EDC6F41, reflected; RFC 3720, appendix B.4).
uint32_t crc32c(std::string_view data);

}  // namespace tessera::io
