#include "io/text_file.h"

#include <algorithm>
#include <array>

#include "io/file.h"
#include "io/tokenizer/unicode_internal.h"

namespace tessera::io {
namespace {

struct Format {
  std::string_view start, name, next_step;
};
constexpr std::string_view kDecompress = "decompress it first";
constexpr std::string_view kExtract = "extract its text first";
constexpr std::string_view kConvert = "convert it to UTF-8 first, with iconv";

/// UTF-32 before UTF-16, whose mark begins that of the former.
constexpr Format kFormats[] = {
    {"\x1F\x8B", "compressed by gzip", kDecompress},
    {"BZh", "compressed by bzip2", kDecompress},
    {"\xFD"
     "7zXZ",
     "compressed by xz", kDecompress},
    {"\x28\xB5\x2F\xFD", "compressed by zstd", kDecompress},
    {"PK\3\4", "a zip archive", kExtract},
    {"7z\xBC\xAF\x27\x1C", "a 7z archive", kExtract},
    {"%PDF-", "a PDF document", kExtract},
    {"PAR1", "a Parquet table", kExtract},
    {"\x7F"
     "ELF",
     "a program", kExtract},
    {"\x89PNG", "a picture", kExtract},
    {"\xFF\xD8\xFF", "a picture", kExtract},
    {"TESSTOK1", "a shard of tokens", "give its folder with --data"},
    {std::string_view("\xFF\xFE\0\0", 4), "UTF-32", kConvert},
    {std::string_view("\0\0\xFE\xFF", 4), "UTF-32", kConvert},
    {"\xFF\xFE", "UTF-16", kConvert},
    {"\xFE\xFF", "UTF-16", kConvert},
};

/// Without a mark at the start: every other byte of Latin text is 0.
bool looks_like_utf16(std::string_view content) {
  const std::string_view start = content.substr(0, 4096);
  std::array<size_t, 2> zeros{};
  for (size_t i = 0; i < start.size(); ++i) zeros[i % 2] += start[i] == '\0';
  const auto [fewer, more] = std::minmax(zeros[0], zeros[1]);
  return start.size() >= 4 && 4 * more > start.size() && 8 * fewer < more;
}

}  // namespace

uint64_t invalid_bytes(std::string_view content) {
  uint64_t invalid = 0;
  while (!content.empty()) {
    content.remove_prefix(unicode::valid_prefix(content));
    if (content.empty()) break;
    content.remove_prefix(1);
    invalid += 1;
  }
  return invalid;
}

namespace {

/// What the content of a file that is no text is instead, and what to do; "" for a text.
std::string refusal(std::string_view content) {
  const auto told = [](const std::string& what, std::string_view next_step) {
    return " is " + what + ", not UTF-8 text; " + std::string(next_step);
  };
  for (const Format& format : kFormats)
    // "BZh" and "PAR1" could begin a text; what follows there cannot.
    if (content.starts_with(format.start) && (unicode::valid_prefix(content) < content.size() ||
                                              content.find('\0') != content.npos || format.start == "%PDF-"))
      return told(std::string(format.name), format.next_step);
  if (const size_t nul = content.find('\0'); nul != content.npos) {
    if (looks_like_utf16(content)) return told("UTF-16 by its zero bytes", kConvert);
    return told("a binary file (a NUL byte at offset " + std::to_string(nul) + ")", kExtract);
  }
  const size_t first = unicode::valid_prefix(content);
  if (first == content.size()) return "";
  const uint64_t invalid = invalid_bytes(content.substr(first));
  if (1000 * invalid <= content.size()) return "";
  return told("in another encoding, or binary (" + std::to_string(invalid) + " of " +
                  std::to_string(content.size()) + " bytes are not UTF-8, the first at offset " +
                  std::to_string(first) + ")",
              "convert it first, as with iconv -f LATIN1 -t UTF-8");
}

}  // namespace

void check_text(const std::string& path, std::string_view content) {
  const std::string why = refusal(content);
  check(why.empty(), "read: ", path, why);
}

void check_text_unless(bool any_bytes, const std::string& path, std::string_view content) {
  const std::string why = any_bytes ? "" : refusal(content);
  check(why.empty(), "read: ", path, why,
        " (--any-bytes takes it as it is, each invalid byte sequence as U+FFFD)");
}

std::string read_text(const std::string& path, uint64_t limit, bool any_bytes) {
  std::string content = read_file(path, limit);
  check_text_unless(any_bytes, path, content);
  return content;
}

}  // namespace tessera::io
