#pragma once

#include <cstdint>
#include <string>
#include <string_view>

/// Text files. The input of a tokenizer is UTF-8; a compressed, UTF-16 or binary file would be tokenized too,
/// and a model would learn its bytes.

namespace tessera::io {

/// The whole of a text file. Throws as read_file does and, unless `any_bytes` (--any-bytes), as check_text.
std::string read_text(const std::string& path, uint64_t limit, bool any_bytes = false);

/// Throws as check_text and names the way around it, unless `any_bytes` (--any-bytes).
void check_text_unless(bool any_bytes, const std::string& path, std::string_view content);

/// Throws, saying what the content of the file `path` is instead and what to do: one of the known compressed
/// and binary formats (by its first bytes), UTF-16 or UTF-32, a file with NUL bytes, or one of which more
/// than a thousandth of the bytes are not UTF-8. Fewer are taken as damage of a text: tokenizers replace each
/// invalid sequence by U+FFFD.
void check_text(const std::string& path, std::string_view content);

/// Number of bytes that are not part of a valid UTF-8 character.
uint64_t invalid_bytes(std::string_view content);

}  // namespace tessera::io
