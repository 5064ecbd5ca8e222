#pragma once

#include <cstdint>

#include "runtime/config.h"

/// Messages between the kernels of several GPUs, as both sides see them.
///
/// A block of a kernel and the block of the same index on the other ranks share a *channel*: memory on each
/// rank that the others write to (comm::PeerMemory). A message is one 64-bit word per 32 bits of data, whose
/// upper half is the number of the call. A 64-bit store is one access (PTX ISA, "Memory Consistency Model"),
/// so that who reads the number of his call there has the data as well: there is no flag to wait for after
/// the data, and no fence before a flag, which would cost the sender a way to the other GPU and back.
///
/// The number is counted by each rank for each channel, in its own memory, so that replays of a graph count
/// on and nothing is ever reset. Calls use two halves of the memory in turn. That is enough: a rank writes
/// call n + 2 after it has received call n + 1 from all others, which they sent after they had read call n.
/// What lies in a half is of the call two before, or 0 in a channel's first two calls, so that the count may
/// wrap round.

namespace tessera::ops {

inline constexpr int kMostRanks = 8;
inline constexpr int kPeerRows = 8;                         // most rows of a call
inline constexpr int kPeerThreads = 512;                    // of a block
inline constexpr int kPeerSteps = 4;                        // 16-byte words per thread, at most
inline constexpr int kPeerColumnBytes = kPeerThreads * 16;  // of a channel of all_gather_columns
inline constexpr int kPeerColumnBlocks = 24;                // channels of a row, at most

inline constexpr int kColumnBlocksPerSm = 2;

struct PeerChannels {
  uint64_t* memory[kMostRanks] = {};  // of each rank, as this process sees it
  uint32_t* counts = nullptr;         // by channel: calls so far, of this rank
  uint32_t* lost = nullptr;           // on the device: 1 once a wait has ended without its message
  uint32_t* report = nullptr;         // for the host: 1 + the rank that was waited for
  uint64_t patience_ns = 0;           // of a wait; 0: no limit
  int64_t words = 0;                  // 32-bit words that a channel carries
  int32_t rank = 0, ranks = 1, channels = 0;

  /// Where, in a rank's memory, the words of rank `from` lie in call number `count` of a channel.
  TESSERA_HD int64_t at(uint32_t count, int from, int64_t channel) const {
    return ((int64_t(count & 1u) * ranks + from) * channels + channel) * words;
  }
  /// 64-bit words of each rank's memory.
  TESSERA_HD int64_t memory_words() const { return 2 * int64_t(ranks) * channels * words; }
};

/// The same for rows that are too many for words with a number each, which would double what the links carry:
/// the rows as they are, and one flag per row, written after it with release and read with acquire
/// (fence.acq_rel.sys and what follows in the PTX ISA's memory model). Rows take the part of channels; flags,
/// too, have two halves, so that none is overwritten before it was seen.
inline constexpr int kPeerManyRows = 2048;  // of a launch

struct PeerRows {
  uint8_t* memory[kMostRanks] = {};
  uint32_t* flags[kMostRanks] = {};
  uint32_t* counts = nullptr;  // by row
  uint32_t *lost = nullptr, *report = nullptr;
  uint64_t patience_ns = 0;
  int64_t row_bytes = 0;  // whole 16-byte words
  int32_t rank = 0, ranks = 1, rows = 0;

  TESSERA_HD int64_t flag_at(uint32_t count, int from, int64_t row) const {
    return (int64_t(count & 1u) * ranks + from) * rows + row;
  }
  TESSERA_HD int64_t at(uint32_t count, int from, int64_t row) const {
    return flag_at(count, from, row) * row_bytes;
  }
  TESSERA_HD int64_t flag_count() const { return 2 * int64_t(ranks) * rows; }
  TESSERA_HD int64_t memory_bytes() const { return flag_count() * row_bytes; }
};

}  // namespace tessera::ops
