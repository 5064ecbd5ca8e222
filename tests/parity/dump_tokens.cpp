#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "io/file.h"
#include "io/tokenizer/tokenizer.h"

// dump_tokens TOKENIZER IN OUT MOST: tokens of many texts, for tokenizer_parity.py.
// IN: texts, each a 32-bit length and its bytes. OUT: for each text a 32-bit count, the tokens, their types,
// a 32-bit length and the bytes of what they decode to; the same for each two texts that follow each other,
// as a pair of at most MOST tokens.

using namespace tessera;

namespace {

void put(std::string& out, uint32_t value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

void put(std::string& out, const io::Encoding& encoding, const std::string& text) {
  put(out, uint32_t(encoding.ids.size()));
  out.append(reinterpret_cast<const char*>(encoding.ids.data()), 4 * encoding.ids.size());
  out.append(reinterpret_cast<const char*>(encoding.types.data()), 4 * encoding.types.size());
  put(out, uint32_t(text.size()));
  out += text;
}

int run(char** words) {
  const io::Tokenizer tokenizer = io::Tokenizer::load(words[1]);
  const std::string in = io::read_file(words[2], uint64_t{1} << 32);
  const int64_t most = std::stoll(words[4]);
  std::vector<std::string> texts;
  for (size_t at = 0; at < in.size();) {
    uint32_t bytes = 0;
    std::memcpy(&bytes, in.data() + at, 4);
    texts.push_back(in.substr(at + 4, bytes));
    at += 4 + bytes;
  }
  std::string out;
  size_t torn = 0;
  for (const std::string& text : texts) {
    const io::Encoding encoding = tokenizer.encode(text);
    const std::string decoded = tokenizer.decode(encoding.ids);
    put(out, encoding, decoded);
    io::TokenStream stream(tokenizer);
    std::string streamed;
    for (const int32_t id : encoding.ids) streamed += stream.next(id);
    torn += streamed + stream.finish() != decoded;
  }
  for (size_t i = 0; i + 1 < texts.size(); i += 2) {
    const io::Encoding encoding = tokenizer.encode_pair(texts[i], texts[i + 1], {.max_length = most});
    put(out, encoding, "");
  }
  io::write_file(words[3], out);
  std::printf("%zu texts, %zu decoded otherwise as a stream\n", texts.size(), torn);
  return 0;
}

}  // namespace

int main(int count, char** words) {
  if (count != 5) {
    std::fputs("usage: dump_tokens TOKENIZER IN OUT MOST\n", stderr);
    return 2;
  }
  try {
    return run(words);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "dump_tokens: %s\n", error.what());
    return 1;
  }
}
