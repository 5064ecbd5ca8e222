#include <cmath>
#include <cstring>
#include <string>
#include <unordered_set>
#include <vector>

#include "io/safetensors_internal.h"
#include "io/tokenizer/file_internal.h"
#include "io/tokenizer/unicode_internal.h"
#include "runtime/error.h"

// The library trusts a .model file: it follows the double array of the normalisation table wherever that
// points. So the file is walked here first: the wire format of protocol buffers
// (https://protobuf.dev/programming-guides/encoding), the pieces, and every place of that array that a text
// could lead to.

namespace tessera::io {
namespace {

/// The library needs some 200 bytes per piece; the largest models in use have 262,144.
constexpr size_t kMostPieces = 300'000;
constexpr size_t kLongestPiece = 4096, kLongestReplacement = 4096;

struct Field {
  uint32_t number;
  uint32_t wire;  // 0 varint, 1 eight bytes, 2 bytes, 5 four bytes
  uint64_t value;
  std::string_view bytes;
};

/// The fields of a message, one after the other.
class Fields {
 public:
  Fields(const std::string& path, const char* what, std::string_view bytes, size_t offset)
      : path_(path), what_(what), bytes_(bytes), offset_(offset) {}

  bool next(Field& field) {
    if (at_ == bytes_.size()) return false;
    const uint64_t key = varint();
    field = {uint32_t(key >> 3), uint32_t(key & 7), 0, {}};
    if (key >> 3 == 0 || key >> 3 > 0x1FFFFFFF) refuse("a field number that there cannot be");
    if (field.wire == 0) {
      field.value = varint();
    } else if (field.wire == 1) {
      field.bytes = take(8);
    } else if (field.wire == 5) {
      field.bytes = take(4);
    } else if (field.wire == 2) {
      field.bytes = take(varint());
    } else {
      refuse("a field of wire type " + std::to_string(field.wire));
    }
    return true;
  }
  /// Where the last field's bytes begin in the file.
  size_t place(const Field& field) const { return offset_ + size_t(field.bytes.data() - bytes_.data()); }
  void expect(const Field& field, uint32_t wire, const char* name) {
    if (field.wire != wire) refuse(std::string(name) + " of wire type " + std::to_string(field.wire));
  }
  [[noreturn]] void refuse(const std::string& found) const {
    fail_at(Site::here(), "tokenizer: ", path_, ": ", what_, " has ", found, " before byte ", offset_ + at_,
            "; the file is damaged, cut short or no SentencePiece model");
  }

 private:
  uint64_t varint() {
    uint64_t value = 0;
    for (int shift = 0; shift < 70; shift += 7) {
      if (at_ == bytes_.size()) refuse("a number that does not end");
      const auto byte = static_cast<unsigned char>(bytes_[at_++]);
      if (shift == 63 && byte > 1) break;
      value |= uint64_t(byte & 0x7F) << shift;
      if (byte < 0x80) return value;
    }
    refuse("a number of more than 64 bits");
  }
  std::string_view take(uint64_t bytes) {
    if (bytes > bytes_.size() - at_)
      refuse("a field of " + std::to_string(bytes) + " bytes where " + std::to_string(bytes_.size() - at_) +
             " are left");
    const std::string_view part = bytes_.substr(at_, size_t(bytes));
    at_ += size_t(bytes);
    return part;
  }

  const std::string& path_;
  const char* what_;
  std::string_view bytes_;
  size_t offset_, at_ = 0;
};

/// The table of normalisation: the size of a double array of 32-bit units (darts-clone), the array, and the
/// replacements, each with a zero after it.
void check_table(const std::string& path, std::string_view table) {
  if (table.empty()) return;
  const auto refuse = [&](const std::string& what) {
    fail_at(Site::here(), "tokenizer: ", path, ": the table of normalisation ", what,
            "; the file is damaged");
  };
  uint32_t bytes = 0;
  if (table.size() <= sizeof bytes) refuse("has " + std::to_string(table.size()) + " bytes");
  std::memcpy(&bytes, table.data(), sizeof bytes);
  if (bytes < 4 || bytes % 4 != 0 || bytes >= table.size() - sizeof bytes)
    refuse("has an array of " + std::to_string(bytes) + " bytes in " + std::to_string(table.size()));
  std::vector<uint32_t> units(bytes / 4);
  std::memcpy(units.data(), table.data() + sizeof bytes, bytes);
  const std::string_view replacements = table.substr(sizeof bytes + bytes);
  if (replacements.back() != '\0') refuse("does not end with a zero");

  // Darts-clone: "offset" leads from a unit to its children, "label" is the byte that leads to it, and a unit
  // with a leaf has its value at its offset.
  const auto offset = [](uint32_t unit) { return (unit >> 10) << ((unit & 1u << 9) >> 6); };
  const auto label = [](uint32_t unit) { return unit & (1u << 31 | 0xFF); };
  std::vector<bool> seen(units.size());
  std::vector<uint32_t> bases{offset(units[0])};
  while (!bases.empty()) {
    const uint32_t base = bases.back();
    bases.pop_back();
    if ((base | 0xFF) >= units.size()) refuse("leads outside its array");
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const uint32_t at = base ^ byte, unit = units[at];
      if (label(unit) != byte || seen[at]) continue;
      seen[at] = true;
      const uint32_t next = at ^ offset(unit);
      if (next >= units.size()) refuse("leads outside its array");
      if (unit >> 8 & 1) {
        const uint32_t value = units[next] & 0x7FFFFFFF;
        if (value >= replacements.size()) refuse("points past its replacements");
        if (replacements.substr(value, kLongestReplacement).find('\0') == std::string_view::npos)
          refuse("has a replacement of more than " + std::to_string(kLongestReplacement) + " bytes");
      }
      bases.push_back(next);
    }
  }
}

void check_normalizer(const std::string& path, std::string_view bytes, size_t offset) {
  Fields fields(path, "the normalizer", bytes, offset);
  Field field{};
  while (fields.next(field)) {
    if (field.number == 2) {
      fields.expect(field, 2, "a table");
      check_table(path, field.bytes);
    }
  }
}

void check_piece(const std::string& path, std::string_view bytes, size_t offset,
                 std::unordered_set<std::string_view>& pieces) {
  Fields fields(path, "a piece", bytes, offset);
  Field field{};
  std::string_view text;
  while (fields.next(field)) {
    if (field.number == 1) {
      fields.expect(field, 2, "a text");
      text = field.bytes;
    } else if (field.number == 2) {
      fields.expect(field, 5, "a score");
      float score = 0;
      std::memcpy(&score, field.bytes.data(), sizeof score);
      if (!std::isfinite(score)) fields.refuse("a score that is not finite");
    } else if (field.number == 3) {
      fields.expect(field, 0, "a type");
      if (field.value < 1 || field.value > 6) fields.refuse("the type " + std::to_string(field.value));
    }
  }
  const std::string name = shown(std::string(text));
  check(!text.empty() && text.size() <= kLongestPiece, "tokenizer: ", path, ": piece ", pieces.size(),
        " has ", text.size(), " bytes, expected 1 to ", kLongestPiece);
  check(text.find('\0') == std::string_view::npos && unicode::valid_prefix(text) == text.size(),
        "tokenizer: ", path, ": piece ", pieces.size(), " (\"", name, "\") is no UTF-8 text");
  check(pieces.size() < kMostPieces, "tokenizer: ", path, ": more than ", kMostPieces, " pieces");
  check(pieces.insert(text).second, "tokenizer: ", path, ": the piece \"", name, "\" occurs twice");
}

}  // namespace

void check_sentencepiece(const std::string& path, std::string_view bytes) {
  std::unordered_set<std::string_view> pieces;
  Fields fields(path, "the file", bytes, 0);
  Field field{};
  while (fields.next(field)) {
    if (field.number < 1 || field.number > 5) {
      // 200 and more are for extensions; below it the format has no other.
      if (field.number < 200) fields.refuse("a field of number " + std::to_string(field.number));
      continue;
    }
    fields.expect(field, 2, "a part");
    if (field.number == 1) check_piece(path, field.bytes, fields.place(field), pieces);
    if (field.number == 3 || field.number == 5) check_normalizer(path, field.bytes, fields.place(field));
  }
  check(!pieces.empty(), "tokenizer: ", path, " has no pieces; it is no SentencePiece model");
}

}  // namespace tessera::io
