#include <algorithm>
#include <limits>

#include "io/safetensors_internal.h"
#include "io/tokenizer/vocabulary_internal.h"
#include "runtime/error.h"

namespace tessera::io {

size_t Vocabulary::slot(std::string_view token) const {
  const size_t mask = slots_.size() - 1;
  for (size_t at = size_t(hash_of(token)) & mask;; at = (at + 1) & mask)
    if (slots_[at] == 0 || entry(slots_[at] - 1) == token) return at;
}

void Vocabulary::grow() {
  slots_.assign(std::max<size_t>(64, 2 * slots_.size()), 0);
  for (size_t i = 0; i < ids_.size(); ++i) slots_[slot(entry(i))] = uint32_t(i + 1);
}

void Vocabulary::add(const std::string& where, std::string_view token, int64_t id) {
  if (id < 0 || id >= kMostTokens)
    fail_at(Site::here(), "tokenizer: ", where, ": token \"", shown(std::string(token)), "\" has the number ",
            id, "; expected 0 to ", kMostTokens - 1);
  check(bytes_.size() + token.size() <= std::numeric_limits<uint32_t>::max(), "tokenizer: ", where,
        ": more than 4 GiB of tokens");
  if (4 * (ids_.size() + 1) > 3 * slots_.size()) grow();
  const size_t place = slot(token);
  if (slots_[place] != 0)
    fail_at(Site::here(), "tokenizer: ", where, ": the token \"", shown(std::string(token)),
            "\" occurs twice");
  bytes_ += token;
  ends_.push_back(uint32_t(bytes_.size()));
  ids_.push_back(int32_t(id));
  slots_[place] = uint32_t(ids_.size());
  end_ = std::max(end_, int32_t(id + 1));
  longest_ = std::max(longest_, token.size());
}

void Vocabulary::finish(const std::string& where) {
  by_id_.assign(size_t(end_), 0);
  for (size_t i = 0; i < ids_.size(); ++i) {
    uint32_t& entry_of = by_id_[size_t(ids_[i])];
    if (entry_of != 0)
      fail_at(Site::here(), "tokenizer: ", where, ": the tokens \"", shown(std::string(entry(entry_of - 1))),
              "\" and \"", shown(std::string(entry(i))), "\" both have the number ", ids_[i]);
    entry_of = uint32_t(i + 1);
  }
}

int32_t Vocabulary::find(std::string_view token) const {
  if (slots_.empty()) return -1;
  const uint32_t found = slots_[slot(token)];
  return found ? ids_[found - 1] : -1;
}

std::string_view Vocabulary::token(int32_t id) const {
  return has(id) ? entry(by_id_[size_t(id)] - 1) : std::string_view();
}

}  // namespace tessera::io
