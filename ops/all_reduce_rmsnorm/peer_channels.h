#pragma once

#include <cstdint>

#include "runtime/config.h"

/// Messages between the kernels of several GPUs, as both sides see them.
///
/// Block i of the kernel on every rank shares a *channel*: memory on each rank that the others write to
/// (comm::PeerMemory). A message is one 64-bit word per 32 bits of data; its upper half is the number of the
/// call. A 64-bit store is a single access (PTX ISA, "Memory Consistency Model"), so a reader that sees the
/// number of its own call also has the data: no flag to wait for after the data, and no fence before a flag,
/// which would cost the sender a round trip to the other GPU.
///
/// Each rank counts the calls of each channel in its own memory, so graph replays keep counting and
/// nothing needs a reset. Calls alternate between two halves of the memory. That is enough: a rank
/// writes call n + 2 after it has received call n + 1 from all others, which they sent after reading
/// call n. A half holds values of the call two before, or 0 in the first two calls, so the counter may
/// wrap around.

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
  uint32_t* lost = nullptr;           // on the device: 1 if a wait has timed out
  uint32_t* report = nullptr;         // for the host: 1 + the rank that a timed-out wait was for
  uint64_t patience_ns = 0;           // timeout of a wait; 0: none
  int64_t words = 0;                  // 32-bit words that a channel carries
  int32_t rank = 0, ranks = 1, channels = 0;

  /// Index, in a rank's memory, of the words from rank `from` in call number `count` of a channel.
  TESSERA_HD int64_t at(uint32_t count, int from, int64_t channel) const {
    return ((int64_t(count & 1u) * ranks + from) * channels + channel) * words;
  }
  /// 64-bit words of each rank's memory.
  TESSERA_HD int64_t memory_words() const { return 2 * int64_t(ranks) * channels * words; }
};

/// For more rows, where a number per 32-bit word would double the traffic: plain rows and one flag per row,
/// written after the row with release and read with acquire (fence.acq_rel.sys; see the memory model in the
/// PTX ISA). Rows are distributed to blocks instead of channels. Flags also alternate between two halves, so
/// that none is overwritten before it was read.
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
