#pragma once

#include <cassert>
#include <cstddef>
#include <cstdint>
#include <list>
#include <unordered_map>
#include <utility>

namespace tessera::ops {

/// Of keys that are arrays of numbers.
struct NumbersHash {
  template <class Numbers>
  size_t operator()(const Numbers& numbers) const {
    uint64_t hash = 0x9E3779B97F4A7C15u;
    for (const int64_t number : numbers) {
      hash = (hash ^ uint64_t(number)) * 0xBF58476D1CE4E5B9u;
      hash ^= hash >> 31;
    }
    return size_t(hash);
  }
};

/// Values by key, at most `capacity` of them: a new one takes the place of the least recently used. Not
/// thread-safe.
template <class Key, class Value, class Hash = std::hash<Key>>
class LruCache {
 public:
  /// `capacity`: at least 1.
  explicit LruCache(size_t capacity) : capacity_(capacity) { assert(capacity > 0); }

  /// The value of `key`, from `make()` if there is none. The reference is valid until the next call. If
  /// make() throws, the cache stays as it was.
  template <class Make>
  Value& get(const Key& key, Make&& make) {
    if (const auto found = by_key_.find(key); found != by_key_.end()) {
      entries_.splice(entries_.begin(), entries_, found->second);
      return found->second->second;
    }
    entries_.emplace_front(key, make());
    try {
      by_key_.emplace(key, entries_.begin());
    } catch (...) {
      entries_.pop_front();
      throw;
    }
    if (entries_.size() > capacity_) {
      by_key_.erase(entries_.back().first);
      entries_.pop_back();
    }
    return entries_.front().second;
  }
  size_t size() const { return entries_.size(); }
  bool contains(const Key& key) const { return by_key_.contains(key); }

 private:
  using Entries = std::list<std::pair<Key, Value>>;  // the most recently used first
  size_t capacity_;
  Entries entries_;
  std::unordered_map<Key, typename Entries::iterator, Hash> by_key_;
};

}  // namespace tessera::ops
