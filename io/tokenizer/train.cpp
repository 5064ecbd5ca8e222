#include "io/tokenizer/train.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <queue>
#include <set>
#include <unordered_map>

#include "io/safetensors_internal.h"
#include "io/tokenizer/file_internal.h"
#include "io/tokenizer/pre_tokenizer_internal.h"
#include "io/tokenizer/unicode_internal.h"
#include "runtime/error.h"
#include "runtime/interrupt.h"

namespace tessera::io {
namespace {

// Keys stay in the order in which they are written: vocabularies by number, as people read them.
using nlohmann::ordered_json;

ordered_json added_tokens(const std::vector<std::string>& special) {
  ordered_json added = ordered_json::array();
  std::set<std::string> seen;
  for (const std::string& token : special) {
    check(!token.empty() && token.size() <= kLongestAdded && unicode::valid_prefix(token) == token.size(),
          "tokenizer: a special token has ", token.size(), " bytes or is no UTF-8; expected 1 to ",
          kLongestAdded);
    check(seen.insert(token).second, "tokenizer: the special token \"", shown(token), "\" is given twice");
    added.push_back({{"id", added.size()},
                     {"content", token},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false},
                     {"special", true}});
  }
  return added;
}

/// Adds a token that the vocabulary lacks, with the next id. operator[] would compare it with all before.
void append(ordered_json::object_t& vocabulary, const std::string& token) {
  const size_t id = vocabulary.size();
  vocabulary.std::vector<std::pair<const std::string, ordered_json>>::emplace_back(token, id);
}

/// A tokenizer.json around a BPE model.
std::string whole_file(const ordered_json& added, const ordered_json& pre_tokenizer,
                       const ordered_json& decoder, bool byte_fallback, const ordered_json& vocabulary,
                       const ordered_json& merges) {
  const ordered_json model = {{"type", "BPE"},
                              {"dropout", nullptr},
                              {"unk_token", nullptr},
                              {"continuing_subword_prefix", nullptr},
                              {"end_of_word_suffix", nullptr},
                              {"fuse_unk", false},
                              {"byte_fallback", byte_fallback},
                              {"ignore_merges", false},
                              {"vocab", vocabulary},
                              {"merges", merges}};
  const ordered_json file = {
      {"version", "1.0"},          {"truncation", nullptr}, {"padding", nullptr},
      {"added_tokens", added},     {"normalizer", nullptr}, {"pre_tokenizer", pre_tokenizer},
      {"post_processor", nullptr}, {"decoder", decoder},    {"model", model}};
  return file.dump(1) + "\n";
}

const ordered_json kByteLevelDecoder = {
    {"type", "ByteLevel"}, {"add_prefix_space", true}, {"trim_offsets", true}, {"use_regex", true}};

ordered_json byte_level(bool use_regex) {
  return {
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", use_regex}};
}

ordered_json bpe_pre_tokenizer(const std::string& pattern) {
  if (pattern.empty()) return byte_level(true);
  const ordered_json split = {
      {"type", "Split"}, {"pattern", {{"Regex", pattern}}}, {"behavior", "Isolated"}, {"invert", false}};
  return {{"type", "Sequence"}, {"pretokenizers", ordered_json::array({split, byte_level(false)})}};
}

/// The bytes in the order of their characters, as the library numbers its alphabet.
std::vector<uint8_t> bytes_in_order() {
  std::vector<uint8_t> bytes(256);
  for (size_t i = 0; i < 256; ++i) bytes[i] = uint8_t(i);
  std::sort(bytes.begin(), bytes.end(),
            [](uint8_t a, uint8_t b) { return byte_character(a) < byte_character(b); });
  return bytes;
}

struct Word {
  std::vector<int32_t> symbols;
  int64_t count = 0;
};

/// Words of the texts with their counts, in the order of their bytes.
std::map<std::string, int64_t> count_words(const std::vector<std::string>& texts,
                                           const std::string& pattern) {
  const nlohmann::json settings = nlohmann::json::parse(bpe_pre_tokenizer(pattern).dump());
  const PreTokenizer pre_tokenizer(Settings(settings, "training"));
  std::unordered_map<std::string, int64_t> counts;
  for (const std::string& text : texts) {
    Pieces pieces;
    pieces.text = unicode::repaired(text);
    pieces.spans = {{0, pieces.text.size()}};
    pre_tokenizer(pieces, true);
    for (size_t i = 0; i < pieces.spans.size(); ++i) counts[std::string(pieces[i])] += 1;
  }
  return {counts.begin(), counts.end()};
}

using Pair = std::pair<int32_t, int32_t>;

/// The pairs of all words: how often, and in which words.
class PairCounts {
 public:
  explicit PairCounts(std::vector<Word>& words) : words_(words) {
    for (size_t w = 0; w < words.size(); ++w)
      for (size_t i = 0; i + 1 < words[w].symbols.size(); ++i)
        change({words[w].symbols[i], words[w].symbols[i + 1]}, words[w].count, w);
    for (const auto& [pair, info] : pairs_) queue_.push({info.count, pair});
  }

  /// The most frequent pair; false if there is none.
  bool best(Pair& pair, int64_t& count) {
    while (!queue_.empty()) {
      const Candidate top = queue_.top();
      queue_.pop();
      const int64_t now = pairs_[top.pair].count;
      if (now == top.count) {
        pair = top.pair, count = now;
        return now > 0;
      }
      if (now > 0) queue_.push({now, top.pair});
    }
    return false;
  }

  void join(Pair pair, int32_t token) {
    std::vector<size_t> where;
    where.swap(pairs_[pair].words);
    std::sort(where.begin(), where.end());
    where.erase(std::unique(where.begin(), where.end()), where.end());
    std::set<Pair> grown;
    for (const size_t w : where) {
      Word& word = words_[w];
      std::vector<int32_t>& symbols = word.symbols;
      // In one pass, since a word may be a whole text: the symbols up to `kept` are joined already.
      size_t kept = 0;
      for (size_t i = 0; i < symbols.size(); ++i) {
        const bool joins =
            i + 1 < symbols.size() && symbols[i] == pair.first && symbols[i + 1] == pair.second;
        if (!joins) {
          symbols[kept++] = symbols[i];
          continue;
        }
        if (kept > 0) {
          change({symbols[kept - 1], pair.first}, -word.count, w);
          change({symbols[kept - 1], token}, word.count, w);
          grown.insert({symbols[kept - 1], token});
        }
        if (i + 2 < symbols.size()) {
          change({pair.second, symbols[i + 2]}, -word.count, w);
          change({token, symbols[i + 2]}, word.count, w);
          grown.insert({token, symbols[i + 2]});
        }
        symbols[kept++] = token;
        ++i;
      }
      symbols.resize(kept);
    }
    pairs_[pair].count = 0;
    for (const Pair& one : grown) queue_.push({pairs_[one].count, one});
  }

 private:
  struct Info {
    int64_t count = 0;
    std::vector<size_t> words;
  };
  struct Candidate {
    int64_t count;
    Pair pair;
    bool operator<(const Candidate& other) const {
      return count != other.count ? count < other.count : pair > other.pair;
    }
  };
  struct Hash {
    size_t operator()(const Pair& pair) const {
      return size_t(uint64_t(uint32_t(pair.first)) * 0x9E3779B97F4A7C15 ^
                    uint64_t(uint32_t(pair.second)) * 0xC2B2AE3D27D4EB4F);
    }
  };
  void change(const Pair& pair, int64_t by, size_t word) {
    Info& info = pairs_[pair];
    info.count += by;
    if (by > 0 && (info.words.empty() || info.words.back() != word)) info.words.push_back(word);
  }

  std::vector<Word>& words_;
  std::unordered_map<Pair, Info, Hash> pairs_;
  std::priority_queue<Candidate> queue_;
};

}  // namespace

std::string train_bpe(const std::vector<std::string>& texts, const BpeTraining& options) {
  const int64_t least = int64_t(options.special.size()) + 256;
  check(options.vocab_size >= least && options.vocab_size < kMostTokens, "tokenizer: a vocabulary of ",
        options.vocab_size, "; expected ", least, " (special tokens and bytes) to ", kMostTokens - 1);
  check(options.least_count >= 1, "tokenizer: pairs that occur ", options.least_count,
        " times; expected at least 1");
  const ordered_json added = added_tokens(options.special);
  ordered_json vocabulary = ordered_json::object(), merges = ordered_json::array();
  std::vector<std::string> tokens;
  std::map<std::string, int32_t> known;
  const auto add = [&](const std::string& token) {
    known.emplace(token, int32_t(tokens.size()));
    tokens.push_back(token);
  };
  for (const std::string& token : options.special) add(token);
  std::array<int32_t, 256> of_byte{};
  for (const uint8_t byte : bytes_in_order()) {
    of_byte[byte] = int32_t(tokens.size());
    const std::string character = to_byte_alphabet(std::string(1, char(byte)));
    check(!known.contains(character), "tokenizer: the special token \"", character, "\" is a byte's");
    add(character);
  }
  std::vector<Word> words;
  for (const auto& [text, count] : count_words(texts, options.pattern)) {
    Word word{{}, count};
    for (const char byte : text) word.symbols.push_back(of_byte[uint8_t(byte)]);
    words.push_back(std::move(word));
  }
  PairCounts pairs(words);
  Pair pair;
  int64_t count = 0;
  while (int64_t(tokens.size()) < options.vocab_size && pairs.best(pair, count) &&
         count >= options.least_count) {
    check_interrupt();
    const std::string& left = tokens[size_t(pair.first)];
    const std::string& right = tokens[size_t(pair.second)];
    merges.push_back({left, right});
    // Two pairs may make one text ("a"+"bc", "ab"+"c"): it is one token.
    const std::string joined = left + right;
    const auto found = known.find(joined);
    const int32_t token = found != known.end() ? found->second : int32_t(tokens.size());
    if (found == known.end()) add(joined);
    pairs.join(pair, token);
  }
  auto& object = vocabulary.get_ref<ordered_json::object_t&>();
  for (const std::string& token : tokens) append(object, token);
  return whole_file(added, bpe_pre_tokenizer(options.pattern), kByteLevelDecoder, false, vocabulary, merges);
}

std::string byte_tokenizer(const std::vector<std::string>& special) {
  ordered_json vocabulary = ordered_json::object();
  const ordered_json added = added_tokens(special);
  for (const std::string& token : special) vocabulary[token] = vocabulary.size();
  // Their order is that of the bytes, so a byte's number is the byte and the count of special tokens.
  for (int byte = 0; byte < 256; ++byte) {
    const std::string character = to_byte_alphabet(std::string(1, char(byte)));
    check(!vocabulary.contains(character), "tokenizer: the special token \"", character, "\" is a byte's");
    vocabulary[character] = vocabulary.size();
  }
  return whole_file(added, byte_level(false), kByteLevelDecoder, false, vocabulary, ordered_json::array());
}

std::string character_tokenizer(const std::vector<std::string>& texts,
                                const std::vector<std::string>& special) {
  ordered_json vocabulary = ordered_json::object();
  const ordered_json added = added_tokens(special);
  for (const std::string& token : special) vocabulary[token] = vocabulary.size();
  for (int byte = 0; byte < 256; ++byte) {
    char token[8];
    std::snprintf(token, sizeof token, "<0x%02X>", byte);
    check(!vocabulary.contains(token), "tokenizer: the special token \"", token, "\" is a byte's");
    vocabulary[token] = vocabulary.size();
  }
  std::set<uint32_t> characters;
  for (const std::string& text : texts) {
    const std::string valid = unicode::repaired(text);
    for (size_t at = 0; at < valid.size();) characters.insert(unicode::next(valid, at));
  }
  std::set<std::string> known;
  for (const auto& [token, id] : vocabulary.items()) known.insert(token);
  auto& object = vocabulary.get_ref<ordered_json::object_t&>();
  for (const uint32_t c : characters) {
    std::string token;
    unicode::append(token, c);
    if (known.insert(token).second) append(object, token);
  }
  const ordered_json decoder = {
      {"type", "Sequence"},
      {"decoders", ordered_json::array({{{"type", "ByteFallback"}}, {{"type", "Fuse"}}})}};
  return whole_file(added, nullptr, decoder, true, vocabulary, ordered_json::array());
}

}  // namespace tessera::io
