#include "datasets/token_shard.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "io/checksum.h"
#include "io/file.h"
#include "runtime/error.h"
#include "runtime/integers.h"

namespace tessera::datasets {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr char kMagic[] = "TESSTOK1";
constexpr uint32_t kVersion = 1;
constexpr size_t kHeadBytes = 128, kHeadDigits = 16;
constexpr int64_t kLargestVocabulary = int64_t{1} << 31;

struct Head {
  char magic[8];
  uint32_t version, token_bytes;
  uint64_t tokens, documents, vocab_size;
  int64_t end_token;
  char fingerprint[32], checksum[32], head_checksum[kHeadDigits];
};
static_assert(sizeof(Head) == kHeadBytes);

uint32_t bytes_of_token(uint64_t vocab_size) {
  return vocab_size <= 65536 ? 2 : 4;
}

std::string digits_of(const void* data, size_t bytes) {
  io::Xxh3 hash;
  hash.add(data, bytes);
  return hash.digits();
}

bool is_hexadecimal(std::string_view text) {
  return text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

}  // namespace

TokenShardWriter::TokenShardWriter(int64_t vocab_size, std::string fingerprint, int64_t end_token)
    : vocab_size_(vocab_size), end_token_(end_token), fingerprint_(std::move(fingerprint)) {
  check(vocab_size >= 1 && vocab_size <= kLargestVocabulary, "shard: a vocabulary of ", vocab_size,
        "; expected 1 to 2^31");
  check(fingerprint_.size() == sizeof Head::fingerprint && is_hexadecimal(fingerprint_),
        "shard: the fingerprint \"", fingerprint_, "\" has not 32 hexadecimal digits");
  check(end_token >= -1 && end_token < vocab_size, "shard: the end token ", end_token,
        " is outside the vocabulary of ", vocab_size);
}

void TokenShardWriter::add(std::span<const int32_t> document) {
  for (const int32_t token : document)
    check(token >= 0 && token < vocab_size_, "shard: token ", token, " is outside the vocabulary of ",
          vocab_size_);
  const size_t width = bytes_of_token(uint64_t(vocab_size_));
  for (const int32_t token : document) bytes_.append(reinterpret_cast<const char*>(&token), width);
  tokens_ += document.size();
  ends_.push_back(tokens_);
}

void TokenShardWriter::write(const std::string& path) {
  bytes_.resize(round_up(bytes_.size(), 8), '\0');
  bytes_.append(reinterpret_cast<const char*>(ends_.data()), 8 * ends_.size());
  Head head{};
  std::memcpy(head.magic, kMagic, sizeof head.magic);
  head.version = kVersion;
  head.token_bytes = bytes_of_token(uint64_t(vocab_size_));
  head.tokens = tokens_;
  head.documents = ends_.size();
  head.vocab_size = uint64_t(vocab_size_);
  head.end_token = end_token_;
  std::memcpy(head.fingerprint, fingerprint_.data(), sizeof head.fingerprint);
  std::memcpy(head.checksum, digits_of(bytes_.data(), bytes_.size()).data(), sizeof head.checksum);
  std::memcpy(head.head_checksum, digits_of(&head, kHeadBytes - kHeadDigits).data(), kHeadDigits);
  io::AtomicFile file(path, sizeof head + bytes_.size());
  file.write(&head, sizeof head);
  file.write(bytes_);
  file.publish();
  bytes_.clear();
  ends_.clear();
  tokens_ = 0;
}

struct TokenShard::Mapping {
  std::string path;
  ShardInfo info;
  size_t token_bytes = 0;
  int file = -1;
  const char* data = nullptr;
  size_t bytes = 0;
  const uint64_t* ends = nullptr;

  ~Mapping() {
    if (data) ::munmap(const_cast<char*>(data), bytes);
    if (file >= 0) ::close(file);
  }
  void check_size() const {
    struct stat now {};
    check(::fstat(file, &now) == 0 && uint64_t(now.st_size) >= bytes, "shard: ", path, " has ",
          uint64_t(now.st_size), " bytes, it had ", bytes,
          " when it was opened; another process is changing it");
  }
};

TokenShard::TokenShard(const std::string& path, bool verify) {
  auto mapping = std::make_shared<Mapping>();
  mapping->path = path;
  Head head{};
  {
    const io::InputFile file(path);  // refuses what is no regular file
    mapping->bytes = file.size();
    check(mapping->bytes >= sizeof head, "shard: ", path, " has ", mapping->bytes,
          " bytes, fewer than the head of ", sizeof head, "; it is cut short or no shard of tokens");
    file.read(0, &head, sizeof head);
  }
  check(std::memcmp(head.magic, kMagic, sizeof head.magic) == 0, "shard: ", path, " does not begin with ",
        kMagic, "; it is no shard of tokens (tessera data tokenize writes them)");
  check(digits_of(&head, kHeadBytes - kHeadDigits).compare(0, kHeadDigits, head.head_checksum, kHeadDigits) ==
            0,
        "shard: ", path, ": the head does not have its checksum; the file is damaged");
  check(head.version == kVersion, "shard: ", path, " is of version ", head.version, ", expected ", kVersion);
  check(head.vocab_size >= 1 && head.vocab_size <= uint64_t(kLargestVocabulary) && head.end_token >= -1 &&
            head.end_token < int64_t(head.vocab_size) && head.token_bytes == bytes_of_token(head.vocab_size),
        "shard: ", path, " has a vocabulary of ", head.vocab_size, ", ", head.token_bytes,
        " bytes per token and the end token ", head.end_token, ", which do not fit together");
  const uint64_t rest = mapping->bytes - sizeof head;
  uint64_t need = 0, of_ends = 0;
  const bool fits = !__builtin_mul_overflow(head.tokens, uint64_t{head.token_bytes}, &need) && need <= rest &&
                    !__builtin_mul_overflow(head.documents, uint64_t{8}, &of_ends) && of_ends <= rest &&
                    round_up(need, 8) + of_ends == rest;
  check(fits, "shard: ", path, " has ", rest, " bytes after its header, which says ", head.tokens,
        " tokens of ", head.token_bytes, " bytes and ", head.documents,
        " documents; it is cut short, as by an unfinished copy, or damaged");
  mapping->file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  check(mapping->file >= 0, "shard: cannot open ", path, ": ", std::generic_category().message(errno));
  mapping->check_size();
  void* const data = ::mmap(nullptr, mapping->bytes, PROT_READ, MAP_SHARED, mapping->file, 0);
  check(data != MAP_FAILED, "shard: cannot map ", path, ": ", std::generic_category().message(errno));
  mapping->data = static_cast<const char*>(data);
  mapping->token_bytes = head.token_bytes;
  mapping->info = {head.tokens,
                   head.documents,
                   head.vocab_size,
                   head.end_token,
                   std::string(head.fingerprint, sizeof head.fingerprint),
                   std::string(head.head_checksum, sizeof head.head_checksum)};
  mapping->ends = reinterpret_cast<const uint64_t*>(mapping->data + sizeof head + round_up(need, 8));
  if (verify)
    check(
        digits_of(mapping->data + sizeof head, rest) == std::string_view(head.checksum, sizeof head.checksum),
        "shard: ", path, ": the content does not have its checksum; the file is damaged, write it again");
  uint64_t last = 0;
  for (uint64_t i = 0; i < head.documents; ++i) {
    check(mapping->ends[i] >= last && mapping->ends[i] <= head.tokens, "shard: ", path, ": document ", i,
          " ends at ", mapping->ends[i], ", after one that ends at ", last, " of ", head.tokens);
    last = mapping->ends[i];
  }
  check(last == head.tokens, "shard: ", path, ": the documents end at ", last, ", the tokens at ",
        head.tokens);
  check(is_hexadecimal(mapping->info.fingerprint), "shard: ", path, ": the fingerprint has not 32 digits");
  mapping_ = std::move(mapping);
}

const std::string& TokenShard::path() const {
  return mapping_->path;
}

const ShardInfo& TokenShard::info() const {
  return mapping_->info;
}

void TokenShard::read(uint64_t begin, std::span<int64_t> to) const {
  const Mapping& m = *mapping_;
  check(begin <= m.info.tokens && to.size() <= m.info.tokens - begin, "shard: ", m.path, " has ",
        m.info.tokens, " tokens; ", to.size(), " from ", begin, " on reach past its end");
  m.check_size();
  const char* const from = m.data + kHeadBytes + begin * m.token_bytes;
  uint64_t largest = 0;
  const auto copy = [&](auto unit) {
    for (size_t i = 0; i < to.size(); ++i) {
      std::memcpy(&unit, from + i * sizeof unit, sizeof unit);
      to[i] = int64_t(unit);
      largest = std::max<uint64_t>(largest, unit);
    }
  };
  if (m.token_bytes == 2)
    copy(uint16_t{});
  else
    copy(uint32_t{});
  if (largest < m.info.vocab_size) return;
  const size_t place =
      size_t(std::find_if(to.begin(), to.end(), [&](int64_t t) { return uint64_t(t) >= m.info.vocab_size; }) -
             to.begin());
  fail_at(Site::here(), "shard: ", m.path, ": token ", begin + place, " is ", to[place],
          ", outside the vocabulary of ", m.info.vocab_size, "; the file is damaged");
}

std::span<const uint64_t> TokenShard::ends() const {
  return {mapping_->ends, size_t(mapping_->info.documents)};
}

uint64_t TokenShard::empty_documents() const {
  uint64_t empty = 0, begin = 0;
  for (const uint64_t end : ends()) empty += std::exchange(begin, end) == end ? 1 : 0;
  return empty;
}

std::vector<uint64_t> TokenShard::borders(uint64_t begin, uint64_t end) const {
  const uint64_t* const first = mapping_->ends;
  const uint64_t* const last = first + mapping_->info.documents;
  std::vector<uint64_t> found;
  for (const uint64_t* at = std::upper_bound(first, last, begin); at != last && *at < end; ++at)
    if (found.empty() || found.back() != *at) found.push_back(*at);
  return found;
}

}  // namespace tessera::datasets
