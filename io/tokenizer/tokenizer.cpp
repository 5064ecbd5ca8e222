#include "io/tokenizer/tokenizer.h"

#include <algorithm>

#include "io/tokenizer/tokenizer_core_internal.h"
#include "io/tokenizer/unicode_internal.h"
#include "runtime/error.h"
#include "runtime/interrupt.h"

namespace tessera::io {

/// A cache of words and their tokens, direct-mapped by hash: a new word replaces the one in its slot.
class Tokenizer::Cache {
 public:
  struct Slot {
    std::string word;
    std::vector<int32_t> ids;
  };
  static constexpr size_t kLongestWord = 64;

  Slot& slot(std::string_view word) {
    if (slots_.empty()) slots_.resize(kSlots);
    return slots_[size_t(hash_of(word)) % kSlots];
  }

 private:
  static constexpr size_t kSlots = 1 << 15;  // some 4 MB when full; English text hits in 97 % of words
  std::vector<Slot> slots_;
};

Tokenizer::Tokenizer(std::shared_ptr<const Core> core)
    : core_(std::move(core)), cache_(std::make_unique<Cache>()) {}
Tokenizer::Tokenizer(const Tokenizer& other) : Tokenizer(other.core_) {}
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer other) noexcept {
  std::swap(core_, other.core_);
  std::swap(cache_, other.cache_);
  return *this;
}
Tokenizer::~Tokenizer() = default;

void Tokenizer::append_plain(std::string_view text, bool at_start, std::vector<int32_t>& ids) const {
  Pieces pieces{std::string(text), {{0, text.size()}}};
  core_->pre_tokenizer(pieces, at_start);
  const auto tokenize = [this](std::string_view word, std::vector<int32_t>& to) {
    std::visit([&](const auto& model) { model.tokenize(word, to); }, *core_->model);
  };
  for (size_t i = 0; i < pieces.spans.size(); ++i) {
    if (i % 1024 == 0) check_interrupt();
    const std::string_view word = pieces[i];
    if (word.empty()) continue;
    if (word.size() > Cache::kLongestWord) {
      tokenize(word, ids);
      continue;
    }
    Cache::Slot& slot = cache_->slot(word);
    if (slot.word != word) {
      slot.ids.clear();
      tokenize(word, slot.ids);
      slot.word = word;
    }
    ids.insert(ids.end(), slot.ids.begin(), slot.ids.end());
  }
}

/// SentencePiece's tokens of the text between added ones. Each stretch begins as a text does, with a blank,
/// unless "legacy" is false.
void Tokenizer::append_pieces(std::string_view text, std::vector<int32_t>& ids) const {
  if (core_->raw_added.empty()) {
    core_->sentencepiece->encode(text, ids);
    return;
  }
  for (const Segment& segment : core_->raw_added.split(text)) {
    const std::string_view part = text.substr(segment.begin, segment.end - segment.begin);
    if (segment.token >= 0)
      ids.push_back(segment.token);
    else if (segment.begin > 0 && core_->sentencepiece_inside)
      core_->sentencepiece_inside->encode(part, ids);
    else
      core_->sentencepiece->encode(part, ids);
  }
}

std::string Tokenizer::decode_pieces(std::span<const int32_t> ids, bool skip_special) const {
  std::string text;
  std::vector<int32_t> pieces;
  const auto add_pieces = [&] {
    if (pieces.empty()) return;
    const bool is_inside = !text.empty() && core_->sentencepiece_inside;
    text += (is_inside ? core_->sentencepiece_inside : core_->sentencepiece)->decode(pieces);
    pieces.clear();
  };
  for (const int32_t id : ids) {
    const auto added = core_->added_by_id.find(id);
    if (added == core_->added_by_id.end()) {
      pieces.push_back(id);
    } else if (!skip_special || !added->second->special) {
      add_pieces();
      text += added->second->text;
    }
  }
  add_pieces();
  return text;
}

void Tokenizer::append(std::string_view text, std::vector<int32_t>& ids) const {
  std::string repaired;
  if (unicode::valid_prefix(text) < text.size()) {
    repaired = unicode::repaired(text);
    text = repaired;
  }
  if (core_->sentencepiece) {
    append_pieces(text, ids);
    return;
  }
  for (const Segment& segment : core_->raw_added.split(text)) {
    if (segment.token >= 0) {
      ids.push_back(segment.token);
      continue;
    }
    std::string_view part = text.substr(segment.begin, segment.end - segment.begin);
    std::string normalized;
    if (!core_->normalizer.empty()) {
      normalized = core_->normalizer(std::string(part));
      part = normalized;
      if (part.empty()) continue;  // no blank before it either: nothing is left that could have one
    }
    if (core_->normalized_added.empty()) {
      append_plain(part, segment.begin == 0, ids);
      continue;
    }
    for (const Segment& inner : core_->normalized_added.split(part))
      if (inner.token >= 0)
        ids.push_back(inner.token);
      else
        append_plain(part.substr(inner.begin, inner.end - inner.begin),
                     segment.begin == 0 && inner.begin == 0, ids);
  }
}

namespace {

/// How many tokens of a text, or of both of a pair, there may be besides the special ones.
size_t room_for(bool pair, const PostProcessor& post_processor, const EncodeOptions& options) {
  check(options.max_length >= 0, "tokenizer: a length of at most ", options.max_length, " tokens");
  if (options.max_length == 0) return SIZE_MAX;
  const size_t added = options.special ? post_processor.added(pair) : 0;
  check(uint64_t(options.max_length) >= added, "tokenizer: at most ", options.max_length, " tokens, but ",
        added, " special ones stand around a ", pair ? "pair" : "text");
  return size_t(options.max_length) - added;
}

}  // namespace

Encoding Tokenizer::encode(std::string_view text, const EncodeOptions& options) const {
  std::vector<int32_t> ids;
  append(text, ids);
  ids.resize(std::min(ids.size(), room_for(false, core_->post_processor, options)));
  return core_->post_processor(ids, nullptr, options.special);
}

Encoding Tokenizer::encode_pair(std::string_view first, std::string_view second,
                                const EncodeOptions& options) const {
  std::vector<int32_t> a, b;
  append(first, a);
  append(second, b);
  const size_t room = room_for(true, core_->post_processor, options);
  if (a.size() + b.size() > room) {
    // Truncate the longer text until both are equally long, then both; an odd token stays with the longer
    // one.
    std::vector<int32_t>& shorter = a.size() > b.size() ? b : a;
    std::vector<int32_t>& longer = a.size() > b.size() ? a : b;
    const size_t keep = std::max(room - std::min(room, shorter.size()), room - room / 2);
    shorter.resize(std::min(shorter.size(), room - keep));
    longer.resize(keep);
  }
  return core_->post_processor(a, &b, options.special);
}

std::string Tokenizer::decode(std::span<const int32_t> ids, bool skip_special) const {
  for (const int32_t id : ids)
    check(has(id), "tokenizer: ", path(), ": there is no token ", id, "; there are ", token_count(),
          " tokens, whose ids are below ", vocab_size());
  if (core_->sentencepiece) return decode_pieces(ids, skip_special);
  std::vector<std::string> tokens;
  for (const int32_t id : ids)
    if (!skip_special || !is_special(id)) tokens.push_back(token(id));
  return core_->decoder(std::move(tokens));
}

int64_t Tokenizer::vocab_size() const {
  return core_->end;
}

int64_t Tokenizer::token_count() const {
  return core_->count;
}

bool Tokenizer::has(int32_t id) const {
  if (core_->added_by_id.contains(id)) return true;
  if (core_->sentencepiece) return id >= 0 && id < core_->sentencepiece->size();
  return core_->file.vocabulary.has(id);
}

std::string Tokenizer::token(int32_t id) const {
  check(has(id), "tokenizer: ", path(), ": there is no token ", id);
  const auto added = core_->added_by_id.find(id);
  if (added != core_->added_by_id.end()) return added->second->text;
  if (core_->sentencepiece) return core_->sentencepiece->piece(id);
  return std::string(core_->file.vocabulary.token(id));
}

std::optional<int32_t> Tokenizer::id_of(std::string_view token) const {
  const auto added = core_->added_by_text.find(token);
  if (added != core_->added_by_text.end()) return added->second;
  const int32_t id =
      core_->sentencepiece ? core_->sentencepiece->id_of(token) : core_->file.vocabulary.find(token);
  return id < 0 ? std::nullopt : std::optional(id);
}

bool Tokenizer::is_special(int32_t id) const {
  const auto added = core_->added_by_id.find(id);
  if (added != core_->added_by_id.end() && added->second->special) return true;
  return core_->sentencepiece && id >= 0 && id < core_->sentencepiece->size() &&
         core_->sentencepiece->is_control(id);
}

const SpecialTokens& Tokenizer::special() const {
  return core_->special;
}

std::string Tokenizer::kind() const {
  return core_->kind;
}

const std::string& Tokenizer::path() const {
  return core_->file.path;
}

const std::string& Tokenizer::fingerprint() const {
  return core_->fingerprint;
}

TokenizerLibraries tokenizer_libraries() {
  return {Regex::available(), unicode::available(), SentencePiece::available()};
}

std::string Tokenizer::decode_open(std::span<const int32_t> ids, bool& open) const {
  std::string text;
  size_t missing = 0;
  if (core_->sentencepiece) {
    // Its library knows whole texts only: bytes at the end that are no character yet are left out before.
    std::string bytes;
    for (size_t end = ids.size(); end > 0 && byte_of_token(token(ids[end - 1])) >= 0; --end)
      bytes.insert(0, 1, char(byte_of_token(token(ids[end - 1]))));
    missing = unicode::open_end(bytes);
    text = decode(ids.first(ids.size() - missing), false);
  } else {
    std::vector<std::string> tokens;
    for (const int32_t id : ids) tokens.push_back(token(id));
    text = core_->decoder(std::move(tokens), Decoder::End::open);
    missing = unicode::open_end(text);
    text.resize(text.size() - missing);
  }
  open = missing > 0;
  return text;
}

std::string TokenStream::next(int32_t id) {
  constexpr size_t kMostBytes = 4;  // of a character, and so tokens that it may take
  if (skip_special_ && tokenizer_.is_special(id)) return "";
  ids_.push_back(id);
  bool open = false;
  const std::string text = tokenizer_.decode_open(ids_, open);
  std::string more;
  if (text.size() > given_) {
    more = unicode::repaired(std::string_view(text).substr(given_));
    given_ = text.size();
  }
  // A token's text may depend on whether there is text before it, and on no more: the last ones with whole
  // characters stay.
  for (size_t count = 1; !open && count < ids_.size() && count <= kMostBytes; ++count) {
    const auto last = std::span(ids_).last(count);
    if ((byte_of_token(tokenizer_.token(last[0])) & 0xC0) == 0x80) continue;
    bool last_open = false;
    const std::string kept = tokenizer_.decode_open(last, last_open);
    if (kept.empty() || last_open || unicode::valid_prefix(kept) < kept.size()) continue;
    ids_.erase(ids_.begin(), ids_.end() - ptrdiff_t(count));
    given_ = kept.size();
  }
  return more;
}

std::string TokenStream::finish() {
  bool open = false;
  tokenizer_.decode_open(ids_, open);
  ids_.clear();
  given_ = 0;
  return open ? "\xEF\xBF\xBD" : "";
}

}  // namespace tessera::io
