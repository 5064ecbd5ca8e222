#include "runtime/allocator.h"

#include <algorithm>
#include <array>
#include <bit>
#include <deque>
#include <map>
#include <set>
#include <thread>
#include <unordered_map>
#include <unordered_set>

#include "runtime/error.h"
#include "runtime/integers.h"
#include "runtime/text.h"
#include "runtime/wait.h"

namespace tessera {
namespace {

constexpr size_t kAlign = 512;             // granularity of large blocks
constexpr size_t kSmallest = 256;          // the least size class
constexpr size_t kLargestClass = 1 << 20;  // above it: best fit
constexpr size_t kSegmentBytes =
    2 << 20;  // what small blocks are carved from, and the rounding of large segments
constexpr size_t kClasses = 4 * 12 + 1;  // 256 B ... 1 MiB, four to a doubling

/// Bytes of a size class c: 256 * 2^floor(c / 4) * (1 + (c mod 4) / 4); take_small() rounds up to 256.
size_t class_bytes(int size_class) {
  const size_t base = kSmallest << (size_class / 4);
  return base + base / 4 * size_t(size_class % 4);
}

int class_of(size_t bytes) {
  if (bytes <= kSmallest) return 0;
  const int doubling = std::bit_width((bytes - 1) / kSmallest) - 1;
  const size_t base = kSmallest << doubling;
  const size_t quarter = base / 4;
  return doubling * 4 + int(ceil_div(bytes - base, quarter));
}

}  // namespace

/// A region of memory obtained from the driver.
struct Segment {
  MemoryPool* pool = nullptr;
  char* base = nullptr;
  size_t bytes = 0;
  size_t carved = 0;  // small segments: bytes handed out so far
  int64_t live = 0;   // blocks in use
};

/// Large free blocks, smallest first; ties by address, so that the choice does not depend on history.
struct BySize {
  bool operator()(const MemoryBlock* a, const MemoryBlock* b) const {
    return a->bytes != b->bytes ? a->bytes < b->bytes : a->data < b->data;
  }
};

class MemoryPool {
 public:
  std::array<std::vector<MemoryBlock*>, kClasses> free_small;
  std::set<MemoryBlock*, BySize> free_large;
  std::vector<std::unique_ptr<Segment>> segments;
  Segment* carving = nullptr;
  int64_t live = 0;        // blocks in use
  bool of_graph = false;   // else of a stream
  bool abandoned = false;  // the graphs it served are gone
  // Pools of graphs only: numbers of the blocks in use, in order of allocation; blocks that keep() has
  // returned, and those of them that were freed since.
  std::unordered_map<const MemoryBlock*, uint64_t> numbers;
  uint64_t next_number = 0;
  std::unordered_set<const MemoryBlock*> kept;
  std::vector<MemoryBlock*> retired;
};

struct Allocator::State {
  MemorySource source;
  mutable std::mutex mutex;
  MemoryPool common;                                                       // of stream 0
  std::unordered_map<uint64_t, std::unique_ptr<MemoryPool>> stream_pools;  // of the others
  std::unordered_map<MemoryPool*, std::unique_ptr<MemoryPool>> private_pools;
  std::shared_ptr<MemoryPool> active;  // of active_thread alone; null: no graph is being captured
  std::thread::id active_thread;
  using Fences = std::vector<std::pair<const void*, std::shared_ptr<const Fence>>>;  // by stream
  std::unordered_map<const MemoryBlock*, Fences> fences;
  // Freed blocks that are still in use on the device: by the first stream of their fences, in order of
  // freeing.
  std::map<const void*, std::deque<std::pair<MemoryBlock*, Fences>>> waiting;
  AllocatorStats stats;
  std::unordered_map<const char*, size_t> tags;  // by literal's address; merged by text when reported
  size_t guard = 0;
  std::unordered_set<MemoryBlock*> guarded;
  std::string damage;  // first damaged guard band, for check_guards()

  uint64_t stream_of_this_thread() const { return source.mark ? StreamOfThread::current() : 0; }

  MemoryPool* pool_of_this_thread() {
    if (active && active_thread == std::this_thread::get_id()) return active.get();
    const uint64_t stream = stream_of_this_thread();
    if (stream == 0) return &common;
    auto& pool = stream_pools[stream];
    if (!pool) pool = std::make_unique<MemoryPool>();
    return pool.get();
  }

  /// Whether the work of a freed block has ended. A fence that could not be made when the block was freed is
  /// made now.
  bool has_ended(Fences& held, bool wait) {
    for (auto& [stream, fence] : held) {
      if (!fence) fence = source.mark();
      if (!fence) return false;
      if (wait)
        wait_until([&] { return fence->done(); }, source.name + ": freed memory that work still uses");
      if (!fence->done()) return false;
    }
    return true;
  }

  /// Gives back freed blocks whose work has ended, of each stream the oldest first.
  void collect(bool wait) {
    for (auto queue = waiting.begin(); queue != waiting.end();) {
      auto& blocks = queue->second;
      while (!blocks.empty() && has_ended(blocks.front().second, wait)) {
        MemoryBlock* const block = blocks.front().first;
        MemoryPool* const pool = block->segment->pool;
        blocks.pop_front();
        give_back(block);
        drop_pool_if_done(pool);
      }
      queue = blocks.empty() ? waiting.erase(queue) : std::next(queue);
    }
  }

  std::string find_damage(const MemoryBlock* block) const noexcept try {
    std::vector<unsigned char> band(block->guard);
    // The trailing band starts at the byte after the requested size.
    const char* const data = static_cast<const char*>(block->data);
    const std::pair<const char*, const char*> bands[] = {{data - block->guard, "before"},
                                                         {data + block->asked, "after"}};
    for (const auto& [start, where] : bands) {
      source.read(band.data(), start, band.size());
      const auto bad =
          std::find_if(band.begin(), band.end(), [](unsigned char byte) { return byte != 0xFF; });
      if (bad == band.end()) continue;
      return "guard band " + std::string(where) + " a block of " + std::to_string(block->asked) +
             " bytes (tag " + block->tag + ") was overwritten at offset " +
             std::to_string(bad - band.begin());
    }
    return "";
  } catch (const std::exception& error) {
    return std::string("a guard band could not be read: ") + error.what();
  }

  /// Memory from the driver, in no pool's list; null if there is none.
  std::unique_ptr<Segment> obtain(MemoryPool* pool, size_t bytes) {
    void* const base = source.allocate(bytes);
    if (!base) return nullptr;
    stats.driver_calls += 1;
    stats.reserved += bytes;
    stats.reserved_peak = std::max(stats.reserved_peak, stats.reserved);
    return std::make_unique<Segment>(Segment{.pool = pool, .base = static_cast<char*>(base), .bytes = bytes});
  }

  Segment* new_segment(MemoryPool* pool, size_t bytes) {
    std::unique_ptr<Segment> segment = obtain(pool, bytes);
    return segment ? pool->segments.emplace_back(std::move(segment)).get() : nullptr;
  }

  MemoryBlock* take_small(MemoryPool* pool, int size_class) {
    auto& list = pool->free_small[size_t(size_class)];
    if (!list.empty()) {
      MemoryBlock* const block = list.back();
      list.pop_back();
      return block;
    }
    const size_t bytes = round_up(class_bytes(size_class), 256);
    if (!pool->carving || pool->carving->carved + bytes > pool->carving->bytes) {
      Segment* const segment = new_segment(pool, kSegmentBytes);
      if (!segment) return nullptr;
      pool->carving = segment;
    }
    char* const data = pool->carving->base + pool->carving->carved;
    pool->carving->carved += bytes;
    return new MemoryBlock{.data = data, .bytes = bytes, .segment = pool->carving, .size_class = size_class};
  }

  MemoryBlock* take_large(MemoryPool* pool, size_t bytes) {
    MemoryBlock wanted;
    wanted.bytes = bytes;
    auto found = pool->free_large.lower_bound(&wanted);
    MemoryBlock* block = nullptr;
    if (found != pool->free_large.end()) {
      block = *found;
      pool->free_large.erase(found);
    } else {
      Segment* const segment = new_segment(pool, round_up(bytes, kSegmentBytes));
      if (!segment) return nullptr;
      block = new MemoryBlock{.data = segment->base, .bytes = segment->bytes, .segment = segment};
    }
    if (block->bytes - bytes >= kLargestClass) {
      auto* const rest = new MemoryBlock{.data = static_cast<char*>(block->data) + bytes,
                                         .bytes = block->bytes - bytes,
                                         .segment = block->segment,
                                         .previous = block,
                                         .next = block->next,
                                         .is_free = true};
      if (block->next) block->next->previous = rest;
      block->next = rest;
      block->bytes = bytes;
      pool->free_large.insert(rest);
    }
    return block;
  }

  /// Allocates a block as a segment of its own, which is in no pool's list.
  MemoryBlock* take_alone(MemoryPool* pool, size_t bytes) {
    std::unique_ptr<Segment> segment = obtain(pool, bytes);
    if (!segment) return nullptr;
    return new MemoryBlock{.data = segment->base, .bytes = bytes, .segment = segment.release()};
  }

  MemoryBlock* take(MemoryPool* pool, size_t bytes) {
    MemoryBlock* const block = !source.caches           ? take_alone(pool, bytes)
                               : bytes <= kLargestClass ? take_small(pool, class_of(bytes))
                                                        : take_large(pool, round_up(bytes, kAlign));
    if (!block) return nullptr;
    block->is_free = false;
    block->crosses = false;
    block->stream = stream_of_this_thread();
    block->segment->live += 1;
    pool->live += 1;
    if (pool->of_graph) pool->numbers[block] = pool->next_number++;
    return block;
  }

  void give_back(MemoryBlock* block) {
    MemoryPool* const pool = block->segment->pool;
    block->segment->live -= 1;
    pool->live -= 1;
    if (!source.caches) {
      source.release(block->segment->base);
      stats.reserved -= block->segment->bytes;
      delete block->segment;
      delete block;
      return;
    }
    if (pool->of_graph) {
      pool->numbers.erase(block);
      if (pool->kept.contains(block)) return pool->retired.push_back(block);
    }
    block->is_free = true;
    if (block->size_class >= 0) {
      pool->free_small[size_t(block->size_class)].push_back(block);
      return;
    }
    if (MemoryBlock* const before = block->previous; before && before->is_free) {
      pool->free_large.erase(before);
      before->bytes += block->bytes;
      before->next = block->next;
      if (block->next) block->next->previous = before;
      delete block;
      block = before;
    }
    if (MemoryBlock* const after = block->next; after && after->is_free) {
      pool->free_large.erase(after);
      block->bytes += after->bytes;
      block->next = after->next;
      if (after->next) after->next->previous = block;
      delete after;
    }
    pool->free_large.insert(block);
  }

  void release_segments(MemoryPool* pool) {
    std::unordered_set<Segment*> unused;
    for (const auto& segment : pool->segments)
      if (segment->live == 0) unused.insert(segment.get());
    if (unused.empty()) return;
    const auto deletes = [&](MemoryBlock* block) {
      if (!unused.contains(block->segment)) return false;
      delete block;
      return true;
    };
    for (auto& list : pool->free_small) std::erase_if(list, deletes);
    std::erase_if(pool->free_large, deletes);
    std::erase_if(pool->retired, deletes);
    if (unused.contains(pool->carving)) pool->carving = nullptr;
    std::erase_if(pool->segments, [&](const auto& segment) {
      if (!unused.contains(segment.get())) return false;
      source.release(segment->base);
      stats.reserved -= segment->bytes;
      return true;
    });
  }

  void release_all_segments() {
    release_segments(&common);
    for (const auto& [stream, pool] : stream_pools) release_segments(pool.get());
    std::erase_if(stream_pools, [](const auto& one) { return one.second->segments.empty(); });
  }

  void drop_pool_if_done(MemoryPool* pool) {
    if (!pool->abandoned || pool->live != 0) return;
    release_segments(pool);
    private_pools.erase(pool);
  }

  /// Live bytes of each tag that holds some, largest first.
  std::vector<std::pair<std::string, size_t>> held_by_tag() const {
    std::map<std::string, size_t> merged;
    for (const auto& [tag, held] : tags)
      if (held) merged[tag] += held;
    std::vector<std::pair<std::string, size_t>> sorted(merged.begin(), merged.end());
    std::ranges::sort(sorted, std::greater<>{}, [](const auto& one) { return one.second; });
    return sorted;
  }

  [[noreturn]] void fail_out_of_memory(size_t bytes) {
    MessageStream text;
    const auto [free, total] = source.usage();
    const MemoryPool* const pool = pool_of_this_thread();
    const size_t largest = pool->free_large.empty() ? 0 : (*pool->free_large.rbegin())->bytes;
    text << "out of memory on " << source.name << ": asked for " << format_bytes(bytes) << "; the device has "
         << format_bytes(free) << " free of " << format_bytes(total) << ", this process holds "
         << format_bytes(stats.allocated) << " in tensors (reserved " << format_bytes(stats.reserved)
         << ", largest free block " << format_bytes(largest) << ")";
    const auto holders = held_by_tag();
    for (size_t i = 0; i < std::min<size_t>(5, holders.size()); ++i)
      text << (i ? ", " : ". Held by: ") << holders[i].first << " " << format_bytes(holders[i].second);
    text << ". Try a smaller batch, activation checkpointing, or `tessera plan` for the largest batch that "
            "fits";
    throw OutOfMemory(text.str(), __FILE__, __LINE__);
  }
};

Allocator::Allocator(MemorySource source) : state_(std::make_unique<State>()) {
  state_->source = std::move(source);
}

Allocator::~Allocator() {
  try {
    state_->collect(true);
  } catch (const Error&) {  // the device does not respond: its memory is leaked
  }
  release_cached();
}

MemoryBlock* Allocator::allocate(size_t bytes) {
  State& state = *state_;
  const std::lock_guard lock(state.mutex);
  state.stats.requests += 1;
  MemoryPool* const pool = state.pool_of_this_thread();
  // Guard bands are filled on the device's own stream. A block of another stream is not ordered after that,
  // and while another thread captures there, the fill would become part of its graph: no guards then.
  const bool guards =
      state.guard > 0 && state.stream_of_this_thread() == 0 && (!state.active || pool == state.active.get());
  const size_t guard = guards ? round_up(state.guard, 256) : 0;
  const size_t asked = bytes;
  if (bytes > SIZE_MAX / 2) state.fail_out_of_memory(bytes);
  const size_t needed = std::max<size_t>(bytes + 2 * guard, 1);
  state.collect(false);
  MemoryBlock* block = state.take(pool, needed);
  if (!block && !pool->of_graph) {
    state.collect(true);
    state.release_all_segments();
    block = state.take(state.pool_of_this_thread(), needed);
  }
  if (!block) state.fail_out_of_memory(bytes);
  block->asked = asked;
  block->tag = MemoryTag::current();
  block->guard = guard;
  if (guard) {
    try {
      state.source.fill(block->data, 0xFF, needed);
    } catch (...) {
      block->guard = 0;
      state.give_back(block);
      throw;
    }
    block->data = static_cast<char*>(block->data) + guard;
    state.guarded.insert(block);
  }
  state.stats.allocated += block->bytes;
  state.stats.allocated_peak = std::max(state.stats.allocated_peak, state.stats.allocated);
  state.tags[block->tag] += block->bytes;
  return block;
}

void Allocator::free(MemoryBlock* block) noexcept {
  if (!block) return;
  State& state = *state_;
  const std::lock_guard lock(state.mutex);
  state.stats.allocated -= block->bytes;
  state.tags[block->tag] -= block->bytes;
  if (block->guard) {
    if (state.damage.empty() && !state.active) state.damage = state.find_damage(block);
    state.guarded.erase(block);
    block->data = static_cast<char*>(block->data) - block->guard;
    block->guard = 0;
  }
  State::Fences held;
  if (!state.fences.empty())
    if (auto found = state.fences.extract(block)) held = std::move(found.mapped());
  if (block->crosses) {
    std::shared_ptr<const Fence> fence;
    try {
      fence = state.source.mark();
    } catch (const Error&) {  // collect() asks again, and says what is wrong
    }
    held.emplace_back(&state, std::move(fence));  // a key that is no stream handle
  }
  if (!held.empty()) {
    const void* const stream = held.front().first;
    state.waiting[stream].emplace_back(block, std::move(held));
    return;
  }
  MemoryPool* const pool = block->segment->pool;
  state.give_back(block);
  state.drop_pool_if_done(pool);
}

void Allocator::hold(MemoryBlock* block, const void* stream, std::shared_ptr<const Fence> fence) {
  const std::lock_guard lock(state_->mutex);
  State::Fences& held = state_->fences[block];
  const auto known =
      std::find_if(held.begin(), held.end(), [&](const auto& one) { return one.first == stream; });
  if (known == held.end()) {
    held.emplace_back(stream, std::move(fence));
  } else {
    known->second = std::move(fence);
  }
}

void Allocator::crosses(MemoryBlock* block) {
  const std::lock_guard lock(state_->mutex);
  block->crosses = true;
}

AllocatorStats Allocator::stats() const {
  const std::lock_guard lock(state_->mutex);
  AllocatorStats stats = state_->stats;
  stats.by_tag = state_->held_by_tag();
  return stats;
}

std::pair<size_t, size_t> Allocator::usage() const {
  return state_->source.usage();
}

void Allocator::reset_peaks() {
  const std::lock_guard lock(state_->mutex);
  state_->stats.allocated_peak = state_->stats.allocated;
  state_->stats.reserved_peak = state_->stats.reserved;
}

void Allocator::release_cached() {
  const std::lock_guard lock(state_->mutex);
  state_->collect(false);
  state_->release_all_segments();
}

std::shared_ptr<MemoryPool> Allocator::make_pool() {
  const std::lock_guard lock(state_->mutex);
  check(state_->source.caches, "allocator on ", state_->source.name,
        ": memory of another program has no pools for graphs; let that program capture the graph");
  auto pool = std::make_unique<MemoryPool>();
  pool->of_graph = true;
  MemoryPool* const raw = pool.get();
  state_->private_pools.emplace(raw, std::move(pool));
  return {raw, [state = state_.get()](MemoryPool* gone) {
            const std::lock_guard guard(state->mutex);
            gone->abandoned = true;
            state->drop_pool_if_done(gone);
          }};
}

void Allocator::activate_pool(std::shared_ptr<MemoryPool> pool) {
  std::shared_ptr<MemoryPool> previous;  // released outside the lock
  const std::lock_guard lock(state_->mutex);
  const auto thread = std::this_thread::get_id();
  check(!state_->active || state_->active_thread == thread, "allocator on ", state_->source.name,
        ": another thread is capturing a graph there; capture one graph after the other");
  previous = std::exchange(state_->active, std::move(pool));
  state_->active_thread = thread;
}

std::vector<KeptBlock> Allocator::keep(const std::shared_ptr<MemoryPool>& pool) {
  const std::lock_guard lock(state_->mutex);
  std::vector<std::pair<uint64_t, KeptBlock>> found;
  for (const auto& [block, number] : pool->numbers)
    if (pool->kept.insert(block).second) found.push_back({number, {block, block->data, block->asked}});
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<KeptBlock> blocks;
  for (const auto& [number, block] : found) blocks.push_back(block);
  return blocks;
}

bool Allocator::in_use(const KeptBlock& kept) const {
  const std::lock_guard lock(state_->mutex);
  return kept.block->segment->pool->numbers.contains(kept.block);
}

void Allocator::set_guard(size_t bytes) {
  const std::lock_guard lock(state_->mutex);
  state_->guard = bytes;
}

void Allocator::check_guards() {
  std::string damage;
  {
    const std::lock_guard lock(state_->mutex);
    damage = std::exchange(state_->damage, "");
    for (const MemoryBlock* block : state_->guarded)
      if (damage.empty()) damage = state_->find_damage(block);
  }
  check(damage.empty(), "allocator on ", state_->source.name, ": ", damage);
}

}  // namespace tessera
