#include "datasets/tokens.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>

#include "runtime/error.h"

namespace tessera::datasets {

TokenWindows::TokenWindows(const std::vector<std::string>& paths, const TokenWindowsOptions& options)
    : options_(options) {
  check(!paths.empty(), "tokens: no shards");
  check(options.length >= 1, "tokens: windows of ", options.length, " tokens; expected at least 1");
  check(options.stride >= 0 && options.stride <= options.length, "tokens: a stride of ", options.stride,
        " for windows of ", options.length, "; expected 1 to that, or 0");
  for (const std::string& path : paths) {
    shards_.emplace_back(path);
    const ShardInfo& info = shards_.back().info();
    const ShardInfo& first = shards_.front().info();
    check(options.fingerprint.empty() || info.fingerprint == options.fingerprint, "tokens: ", path,
          " comes from the tokenizer with the fingerprint ", info.fingerprint, ", not from ",
          options.fingerprint, "; tokenize the text again");
    check(info.fingerprint == first.fingerprint && info.vocab_size == first.vocab_size, "tokens: ", path,
          " (", info.fingerprint, ", vocabulary ", info.vocab_size, ") and ", shards_.front().path(), " (",
          first.fingerprint, ", vocabulary ", first.vocab_size, ") come from different tokenizers");
    begins_.push_back(tokens_);
    tokens_ += info.tokens;
  }
  check(tokens_ > uint64_t(options.length), "tokens: ", tokens_, " tokens in ", paths.size(),
        paths.size() == 1 ? " shard" : " shards", " give no window of ", options.length, " and 1");
}

TokenBatch TokenWindows::batch(std::span<const int64_t> indices) const {
  const int64_t count = int64_t(indices.size()), length = options_.length;
  TokenBatch batch{Tensor::empty_packed({count, length}, DType::i64, Device::cpu()),
                   Tensor::empty_packed({count, length}, DType::i64, Device::cpu()),
                   Tensor::empty_packed({0}, DType::i32, Device::cpu()),
                   Tensor::empty_packed({0}, DType::i64, Device::cpu())};
  std::vector<int32_t> lengths{0};
  if (options_.documents) {
    check(count * length <= INT32_MAX, "tokens: a batch of ", count, " times ", length,
          " tokens; their cumulative lengths have 32 bits");
    batch.positions = Tensor::empty_packed({count, length}, DType::i64, Device::cpu());
  }
  std::vector<int64_t> window(size_t(length) + 1);
  for (int64_t row = 0; row < count; ++row) {
    const int64_t index = indices[size_t(row)];
    check(index >= 0 && index < size(), "tokens: there is no window ", index, " of ", size());
    const uint64_t begin = uint64_t(index) * stride(), end = begin + window.size();
    std::vector<uint64_t> borders;  // within (begin, end)
    size_t shard = size_t(std::upper_bound(begins_.begin(), begins_.end(), begin) - begins_.begin()) - 1;
    for (uint64_t at = begin; at < end; ++shard) {
      const uint64_t first = at - begins_[shard];
      const uint64_t tokens = std::min(end - at, shards_[shard].info().tokens - first);
      shards_[shard].read(first, std::span(window).subspan(size_t(at - begin), size_t(tokens)));
      if (options_.documents) {
        if (first == 0 && at > begin && (borders.empty() || borders.back() != at)) borders.push_back(at);
        for (const uint64_t border : shards_[shard].borders(first, first + tokens))
          borders.push_back(border + begins_[shard]);
      }
      at += tokens;
    }
    int64_t* const inputs = batch.inputs.data<int64_t>() + row * length;
    int64_t* const targets = batch.targets.data<int64_t>() + row * length;
    std::copy(window.begin(), window.end() - 1, inputs);
    std::copy(window.begin() + 1, window.end(), targets);
    if (!options_.documents) continue;
    int64_t* const positions = batch.positions.data<int64_t>() + row * length;
    int64_t first = 0;
    const auto segment = [&](int64_t last) {
      for (int64_t i = first; i < last; ++i) positions[i] = i - first;
      first = last;
    };
    for (const uint64_t border : borders) {
      const int64_t at = int64_t(border - begin);
      targets[at - 1] = -100;
      if (at < length) lengths.push_back(int32_t(row * length + at));
      segment(at);
    }
    segment(length);
    lengths.push_back(int32_t((row + 1) * length));
  }
  if (options_.documents) batch.lengths = Tensor::from(lengths, {int64_t(lengths.size())});
  return batch;
}

std::string shard_name(const std::string& part, int64_t number) {
  char digits[32];
  std::snprintf(digits, sizeof digits, "-%05lld.tokens", static_cast<long long>(number));
  return part + digits;
}

std::vector<std::string> shard_paths(const std::string& folder, const std::string& part) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  std::vector<std::string> paths;
  size_t there = 0;
  for (fs::directory_iterator entry(folder, ignored), end; !ignored && entry != end;
       entry.increment(ignored)) {
    const std::string name = entry->path().filename().string();
    there += name.starts_with(part + "-") && name.ends_with(".tokens") ? 1 : 0;
  }
  check(there > 0, "tokens: ", folder, " has no shards of the part ", part, " (", shard_name(part, 0),
        "); tessera data tokenize writes them");
  for (size_t number = 0; number < there; ++number) {
    paths.push_back((fs::path(folder) / shard_name(part, int64_t(number))).string());
    check(fs::exists(paths.back(), ignored), "tokens: ", folder, " has ", there, " shards of the part ", part,
          ", but not ", shard_name(part, int64_t(number)));
  }
  return paths;
}

bool is_one_line(std::string_view text) {
  const size_t line_break = text.find('\n');
  return line_break == std::string_view::npos || line_break + 1 == text.size();
}

TextSplit split_text(std::string_view text, double share) {
  check(share >= 0 && share < 1, "tokens: a validation share of ", share, "; expected 0 to less than 1");
  const size_t wanted = text.size() - size_t(std::llround(double(text.size()) * share));
  const char between = is_one_line(text) ? ' ' : '\n';
  const size_t end = wanted == 0 ? std::string_view::npos : text.find(between, wanted - 1);
  const size_t cut = share == 0 || end == std::string_view::npos ? text.size() : end + 1;
  return {text.substr(0, cut), text.substr(cut)};
}

std::vector<std::string_view> split_pieces(std::string_view text, uint64_t bytes) {
  std::vector<std::string_view> pieces;
  const char between = is_one_line(text) ? ' ' : '\n';
  while (bytes > 0 && text.size() > bytes + bytes / 2) {
    const size_t end = text.find(between, size_t(bytes) - 1);
    if (end == std::string_view::npos) break;
    pieces.push_back(text.substr(0, end + 1));
    text.remove_prefix(end + 1);
  }
  if (!text.empty()) pieces.push_back(text);
  return pieces;
}

}  // namespace tessera::datasets
