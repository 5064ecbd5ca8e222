#include <algorithm>
#include <cstdio>

#include "io/safetensors_internal.h"
#include "io/tokenizer/model_internal.h"
#include "io/tokenizer/pre_tokenizer_internal.h"
#include "runtime/error.h"

namespace tessera::io {
namespace {

/// Up to here a scan for the lowest rank is quicker than a heap.
constexpr size_t kFew = 48;
constexpr int32_t kNoRank = INT32_MAX;

std::string byte_token(uint8_t byte) {
  char text[8];
  std::snprintf(text, sizeof text, "<0x%02X>", byte);
  return text;
}

}  // namespace

int byte_of_token(std::string_view token) {
  const auto digit = [](char c) {
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
                                  : -1;
  };
  if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return -1;
  const int high = digit(token[3]), low = digit(token[4]);
  return high < 0 || low < 0 ? -1 : high * 16 + low;
}

size_t PairTable::slot(uint64_t pair) const {
  const size_t mask = slots_.size() - 1;
  uint64_t hash = pair * 0x9E3779B97F4A7C15;
  hash ^= hash >> 29;
  for (size_t at = size_t(hash) & mask;; at = (at + 1) & mask)
    if (slots_[at].pair == kFree || slots_[at].pair == pair) return at;
}

void PairTable::set(int32_t left, int32_t right, int32_t rank, int32_t token) {
  if (3 * (count_ + 1) > 2 * slots_.size()) {
    std::vector<Entry> old(std::max<size_t>(64, 2 * slots_.size()), Entry{kFree, 0, 0});
    old.swap(slots_);
    for (const Entry& entry : old)
      if (entry.pair != kFree) slots_[slot(entry.pair)] = entry;
  }
  Entry& entry = slots_[slot(key(left, right))];
  count_ += entry.pair == kFree ? 1 : 0;
  entry = {key(left, right), rank, token};
}

const PairTable::Entry* PairTable::find(int32_t left, int32_t right) const {
  if (slots_.empty()) return nullptr;
  const Entry& entry = slots_[slot(key(left, right))];
  return entry.pair == kFree ? nullptr : &entry;
}

Bpe::Bpe(const Settings& settings, const Vocabulary& vocabulary, const MergeList& merges, bool byte_level)
    : vocabulary_(&vocabulary),
      byte_level_(byte_level),
      byte_fallback_(settings.flag("byte_fallback", false)),
      fuse_unknown_(settings.flag("fuse_unk", false)),
      ignore_merges_(settings.flag("ignore_merges", false)),
      prefix_(settings.text("continuing_subword_prefix", "")),
      suffix_(settings.text("end_of_word_suffix", "")) {
  starts_bytes_ = byte_level && !byte_fallback_ && prefix_.empty() && suffix_.empty();
  check(!settings.has("dropout") ||
            (settings.at("dropout").json().is_number() && settings.at("dropout").json().get<double>() == 0),
        "tokenizer: ", settings.where(), ".dropout is set; the same text would give other tokens each time");
  if (const auto unknown = settings.maybe_text("unk_token")) {
    unknown_ = vocabulary.find(*unknown);
    check(unknown_ >= 0, "tokenizer: ", settings.where(), ".unk_token \"", shown(*unknown),
          "\" is not in the vocabulary");
  }
  for (int byte = 0; byte < 256; ++byte)
    byte_tokens_[size_t(byte)] = vocabulary.find(starts_bytes_ ? to_byte_alphabet(std::string(1, char(byte)))
                                                               : byte_token(uint8_t(byte)));
  std::string joined;
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const std::string_view left = merges.left(rank), right = merges.right(rank);
    const int32_t left_id = vocabulary.find(left), right_id = vocabulary.find(right);
    const auto refuse = [&](const char* what, std::string_view token, const char* why) {
      fail_at(Site::here(), "tokenizer: ", settings.where(), ".merges[", rank, "] ", what, " \"",
              shown(std::string(token)), "\", ", why);
    };
    if (left_id < 0 || right_id < 0)
      refuse("joins", left_id < 0 ? left : right, "which is not in the vocabulary");
    if (right.size() < prefix_.size())
      refuse("joins", right, "shorter than the prefix of continuing subwords");
    joined.assign(left).append(right.substr(prefix_.size()));
    const int32_t id = vocabulary.find(joined);
    if (id < 0) refuse("makes", joined, "which is not in the vocabulary");
    pairs_.set(left_id, right_id, int32_t(rank), id);
  }
}

void Bpe::start_bytes(std::string_view piece, std::vector<int32_t>& symbols) const {
  for (const char byte : piece) {
    const int32_t id = byte_tokens_[uint8_t(byte)];
    if (id >= 0)
      symbols.push_back(id);
    else if (unknown_ >= 0 && !(fuse_unknown_ && !symbols.empty() && symbols.back() == unknown_))
      symbols.push_back(unknown_);
  }
}

void Bpe::start(std::string_view piece, std::vector<int32_t>& symbols) const {
  std::string text;
  int pending = 0;  // unknown tokens not yet written: 0 or 1, as the library `tokenizers` holds one back
  for (size_t at = 0; at < piece.size();) {
    const size_t begin = at;
    at += unicode::length(piece[at]);
    const std::string_view character = piece.substr(begin, at - begin);
    std::string_view token = character;
    if ((begin > 0 && !prefix_.empty()) || (at == piece.size() && !suffix_.empty())) {
      text.assign(begin > 0 ? prefix_ : "").append(character).append(at == piece.size() ? suffix_ : "");
      token = text;
    }
    if (const int32_t id = vocabulary_->find(token); id >= 0) {
      if (pending) symbols.push_back(unknown_);
      pending = 0;
      symbols.push_back(id);
      continue;
    }
    if (byte_fallback_ && std::all_of(token.begin(), token.end(),
                                      [&](char byte) { return byte_tokens_[uint8_t(byte)] >= 0; })) {
      for (const char byte : token) symbols.push_back(byte_tokens_[uint8_t(byte)]);
      continue;
    }
    if (unknown_ < 0) continue;
    if (pending && !fuse_unknown_) symbols.push_back(unknown_);
    pending = 1;
  }
  if (pending) symbols.push_back(unknown_);
}

void Bpe::join_few(std::vector<int32_t>& symbols) const {
  std::array<int32_t, kFew> ranks{}, tokens{};
  size_t count = symbols.size();
  const auto rank_of = [&](size_t i) {
    const PairTable::Entry* const entry = i + 1 < count ? pairs_.find(symbols[i], symbols[i + 1]) : nullptr;
    ranks[i] = entry ? entry->rank : kNoRank;
    tokens[i] = entry ? entry->token : -1;
  };
  for (size_t i = 0; i < count; ++i) rank_of(i);
  for (;;) {
    const size_t best =
        size_t(std::min_element(ranks.begin(), ranks.begin() + ptrdiff_t(count)) - ranks.begin());
    if (ranks[best] == kNoRank) break;
    symbols[best] = tokens[best];
    for (size_t i = best + 1; i + 1 < count; ++i)
      symbols[i] = symbols[i + 1], ranks[i] = ranks[i + 1], tokens[i] = tokens[i + 1];
    count -= 1;
    rank_of(best);
    if (best > 0) rank_of(best - 1);
  }
  symbols.resize(count);
}

void Bpe::join_many(std::vector<int32_t>& symbols) const {
  struct Candidate {
    int32_t rank, place, token;
    bool operator<(const Candidate& other) const {  // the heap's top is the lowest rank, then the leftmost
      return rank != other.rank ? rank > other.rank : place > other.place;
    }
  };
  const auto count = int32_t(symbols.size());
  std::vector<Symbol> list(symbols.size());
  std::vector<Candidate> heap;
  const auto candidate = [&](int32_t left, int32_t right) -> const PairTable::Entry* {
    return pairs_.find(list[size_t(left)].id, list[size_t(right)].id);
  };
  for (int32_t i = 0; i < count; ++i)
    list[size_t(i)] = {symbols[size_t(i)], i - 1, i + 1 < count ? i + 1 : -1, false};
  for (int32_t i = 0; i + 1 < count; ++i)
    if (const auto* const entry = candidate(i, i + 1)) heap.push_back({entry->rank, i, entry->token});
  std::make_heap(heap.begin(), heap.end());
  const auto consider = [&](int32_t left, int32_t right) {
    if (left < 0 || right < 0) return;
    if (const auto* const entry = candidate(left, right)) {
      heap.push_back({entry->rank, left, entry->token});
      std::push_heap(heap.begin(), heap.end());
    }
  };
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end());
    const Candidate top = heap.back();
    heap.pop_back();
    Symbol& left = list[size_t(top.place)];
    if (left.gone || left.next < 0) continue;
    const PairTable::Entry* const entry = candidate(top.place, left.next);
    if (!entry || entry->token != top.token) continue;  // one of the two has been joined since
    Symbol& right = list[size_t(left.next)];
    left.id = top.token;
    right.gone = true;
    left.next = right.next;
    if (left.next >= 0) list[size_t(left.next)].previous = top.place;
    consider(left.previous, top.place);
    consider(top.place, left.next);
  }
  symbols.clear();
  for (const Symbol& symbol : list)
    if (!symbol.gone) symbols.push_back(symbol.id);
}

void Bpe::tokenize(std::string_view piece, std::vector<int32_t>& ids) const {
  if (ignore_merges_) {
    const int32_t whole = vocabulary_->find(byte_level_ ? to_byte_alphabet(piece) : std::string(piece));
    if (whole >= 0) {
      ids.push_back(whole);
      return;
    }
  }
  std::vector<int32_t> symbols;
  symbols.reserve(piece.size());
  if (starts_bytes_)
    start_bytes(piece, symbols);
  else
    start(byte_level_ ? to_byte_alphabet(piece) : std::string(piece), symbols);
  check(symbols.size() < size_t(kNoRank), "tokenizer: a word of ", symbols.size(), " symbols");
  if (symbols.size() > kFew)
    join_many(symbols);
  else if (symbols.size() > 1)
    join_few(symbols);
  ids.insert(ids.end(), symbols.begin(), symbols.end());
}

}  // namespace tessera::io
