#include "nn/tensor_parallel.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <vector>

#include "autograd/tape.h"
#include "comm/threads.h"
#include "ops/all_reduce_rmsnorm/peer_channels.h"
#include "ops/embedding/embedding.h"
#include "ops/norm/norm.h"
#include "ops/pointwise/pointwise.h"
#include "tests/errors.h"
#include "tests/nn/random.h"

// What ranks that share a model out do together, on threads; and the messages between kernels, whose
// addresses and counts are the same code on both sides.

namespace tessera::nn {
namespace {

using comm::Communicator;
using ops::RankGroup;

/// main(ranks) on each of them.
void on_ranks(int size, const std::function<void(const TensorParallel&)>& main) {
  comm::run_threads(size, [&](Communicator& c) { main(TensorParallel(RankGroup(c, c))); });
}

Tensor share_of_rank(int rank, const Shape& shape, DType dtype) {
  return random(shape, uint64_t(100 + rank)).to(dtype);
}

/// ((0 + 1) + (2 + 3)), rounded after each addition, as comm::Communicator promises.
Tensor sum_of_shares(int size, const Shape& shape, DType dtype) {
  std::vector<Tensor> sums;
  for (int r = 0; r < size; ++r) sums.push_back(share_of_rank(r, shape, dtype));
  for (; sums.size() > 1; sums.resize(sums.size() / 2))
    for (size_t i = 0; i < sums.size() / 2; ++i) sums[i] = ops::add(sums[2 * i], sums[2 * i + 1]);
  return sums[0];
}

TEST(TensorParallel, TheSumOverRanksIsAddedAndNormalised) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16})
    for (const int size : {1, 2, 4})
      for (const Shape& shape : {Shape{1, 19}, Shape{3, 24}, Shape{0, 5}}) {
        const Tensor x = random(shape, 1).to(dtype), weight = random({shape[1]}, 2).to(dtype);
        RmsNorm norm(shape[1], kCpu, {.eps = 1e-3, .dtype = dtype});
        norm.weight.detach().copy_from(weight);
        const Tensor sum = sum_of_shares(size, shape, dtype);
        const ops::AddNorm expected = ops::add_rmsnorm(x, sum, weight, 1e-3);
        const Tensor alone = ops::rmsnorm(sum, weight, 1e-3);
        on_ranks(size, [&](const TensorParallel& ranks) {
          const ops::AddNorm made = ranks.add(norm, x, share_of_rank(ranks.rank(), shape, dtype));
          EXPECT_TRUE(same_bits(made.sum, expected.sum)) << size << shape << dtype;
          EXPECT_TRUE(same_bits(made.y, expected.y)) << size << shape << dtype;
          const ops::AddNorm first = ranks.add(norm, {}, share_of_rank(ranks.rank(), shape, dtype));
          EXPECT_TRUE(same_bits(first.sum, sum)) << size << shape << dtype;
          EXPECT_TRUE(same_bits(first.y, alone)) << size << shape << dtype;
        });
      }
}

/// The rows of `table` that a rank has, with rows of padding.
Embedding part_of(const Tensor& table, int rank, int ranks) {
  Rng rng(1);
  const int64_t vocabulary = table.size(0), rows = TensorParallel::vocabulary_rows(vocabulary, ranks),
                begin = std::min(rank * rows, vocabulary), end = std::min(begin + rows, vocabulary);
  Embedding part(rows, table.size(1), rng, kCpu, {.deviation = 0, .dtype = table.dtype()});
  if (begin < end) part.weight.detach().slice(0, 0, end - begin).copy_from(table.slice(0, begin, end));
  return part;
}

TEST(TensorParallel, SharesOfAnEmbeddingAddUpToIt) {
  for (const int64_t vocabulary : {3, 19, 64})  // 3 on 4 ranks: two of them have padding alone
    for (const int size : {1, 2, 4}) {
      const Tensor table = random({vocabulary, 5}, 4);
      std::vector<int64_t> all;
      for (int64_t t = 0; t < vocabulary; ++t) all.push_back(vocabulary - 1 - t);
      const Tensor tokens = Tensor::from(all, {vocabulary});
      on_ranks(size, [&](const TensorParallel& ranks) {
        const Embedding part = part_of(table, ranks.rank(), size);
        Tensor sum = ranks.embed(part, tokens, vocabulary).packed();
        ranks.ranks().data().all_reduce(sum);
        EXPECT_TRUE(same_bits(sum, ops::embedding(table, tokens))) << vocabulary << " " << size;
        expect_error(
            [&] {
              ranks.embed(part, Tensor::from(std::vector<int64_t>{0, vocabulary}, {2}), vocabulary);
            },
            {"position 1", "outside [0, "});
      });
    }
}

TEST(TensorParallel, VocabularyRowsAreWholeWordsThatHoldAll) {
  for (const int64_t vocabulary : {1, 8, 19, 32000, 128257})
    for (int ranks = 1; ranks <= 8; ++ranks) {
      const int64_t rows = TensorParallel::vocabulary_rows(vocabulary, ranks);
      EXPECT_EQ(rows % 8, 0);
      EXPECT_GE(rows * ranks, vocabulary);
      EXPECT_LT(rows * ranks, vocabulary + 8 * ranks);  // at most 7 rows of padding on each, and one row more
    }
}

TEST(TensorParallel, GathersTheColumnsWithoutPadding) {
  for (const DType dtype : {DType::f64, DType::bf16})
    for (const int size : {1, 2, 4})
      for (const int64_t columns : {1, 8, 19, 32})
        for (const int64_t rows : {1, 3}) {
          const int64_t each = TensorParallel::vocabulary_rows(columns, size);
          const Tensor whole = random({rows, each * size}, 6).to(dtype);
          on_ranks(size, [&](const TensorParallel& ranks) {
            const int64_t begin = ranks.rank() * each;
            const Tensor made = ranks.gather(whole.slice(1, begin, begin + each), columns);
            EXPECT_TRUE(same_bits(made, whole.slice(1, 0, columns))) << size << " " << columns << " " << rows;
          });
        }
}

TEST(TensorParallel, SaysWhatItCannotDo) {
  const RmsNorm norm(4, kCpu, {.dtype = DType::f64});
  const RankGroup one;
  const Tensor x = random({2, 4}, 1), share = random({2, 4}, 2);
  expect_error(
      [&] {
        ops::all_reduce_rmsnorm(one, random({2, 3}, 1), share, norm.weight, 1e-6);
      },
      {"x is", "must agree"});
  expect_error([&] { ops::all_reduce_rmsnorm(one, x, share, random({3}, 1), 1e-6); },
               {"weight is", "expected f64 [4]"});
  expect_error([&] { ops::all_reduce_rmsnorm(one, x, {}, norm.weight, 1e-6); }, {"share is"});
  expect_error([&] { ops::all_gather_columns(one, share, 5); }, {"5 columns", "1 ... 4"});
  expect_error([&] { ops::all_gather_columns(one, share, 0); }, {"0 columns"});
  expect_error([&] { ops::parse_rank_exchange("nccl"); }, {"nccl", "communicator", "peer"});
  expect_error([&] { RankGroup(comm::thread_communicators(9)[0], comm::thread_communicators(9)[0]); },
               {"9 ranks", "at most 8"});
  const Tape tape;  // the norm's weight is a parameter
  expect_error([&] { ops::all_reduce_rmsnorm(one, x, share, norm.weight, 1e-6); },
               {"no gradient", "inference"});
  Rng rng(1);
  const Embedding token(3, 4, rng);
  expect_error([&] { ops::embedding_share(token.weight, Tensor::from(std::vector<int64_t>{1}, {1}), 0, 3); },
               {"no gradient", "inference"});
}

TEST(TensorParallel, PeerMemoryOnTheCpuIsRefusedOnAllRanks) {
  comm::run_threads(2, [&](Communicator& c) {
    const RankGroup ranks(c, c, ops::RankExchange::peer);
    expect_error([&] { ranks.reserve(kCpu, DType::f32, 64, 64); },
                 {"peer memory needs GPUs", "communicator"});
    ranks.check_waits();  // nothing was waited for
    c.barrier();
  });
  const RankGroup alone;  // one rank needs no memory of others
  alone.reserve(kCpu, DType::f32, 64, 64);
  EXPECT_EQ(alone.sum_channels(), nullptr);
}

// ---- messages between kernels ----

ops::PeerChannels channels_of(int rank, int ranks, int channels, int64_t words) {
  ops::PeerChannels made;
  made.rank = rank, made.ranks = ranks, made.channels = channels, made.words = words;
  return made;
}

TEST(PeerChannels, EachMessageHasWordsOfItsOwnInBothHalves) {
  const ops::PeerChannels c = channels_of(0, 3, 4, 5);
  std::set<int64_t> seen;
  for (const uint32_t count : {6u, 7u})
    for (int from = 0; from < 3; ++from)
      for (int64_t channel = 0; channel < 4; ++channel)
        for (int64_t w = 0; w < c.words; ++w) seen.insert(c.at(count, from, channel) + w);
  EXPECT_EQ(int64_t(seen.size()), c.memory_words());
  EXPECT_EQ(*seen.begin(), 0);
  EXPECT_EQ(*seen.rbegin(), c.memory_words() - 1);
  EXPECT_EQ(c.at(6, 1, 2), c.at(8, 1, 2));  // the half of the call two before
}

TEST(PeerRows, EachRowHasMemoryAndAFlagOfItsOwnInBothHalves) {
  ops::PeerRows rows;
  rows.rank = 1, rows.ranks = 3, rows.rows = 5, rows.row_bytes = 48;
  std::set<int64_t> flags, bytes;
  for (const uint32_t count : {6u, 7u})
    for (int from = 0; from < 3; ++from)
      for (int64_t row = 0; row < 5; ++row) {
        flags.insert(rows.flag_at(count, from, row));
        bytes.insert(rows.at(count, from, row));
        EXPECT_EQ(rows.at(count, from, row), 48 * rows.flag_at(count, from, row));
      }
  EXPECT_EQ(int64_t(flags.size()), rows.flag_count());
  EXPECT_EQ(*flags.rbegin(), rows.flag_count() - 1);
  EXPECT_EQ(*bytes.rbegin() + 48, rows.memory_bytes());
}

/// A block of a kernel that runs again and again, one word at a time: in each call it sends words that only
/// this call has to the same block of all other ranks, then reads theirs.
struct BlockInTurns {
  /// False if the word that it waits for has not come.
  bool step() {
    const ops::PeerChannels& c = channels;
    const int64_t sent = (c.ranks - 1) * c.words;
    const uint32_t count = c.counts[channel] + 1;
    const int other = int(c.rank + 1 + at % sent / c.words) % c.ranks;
    const int64_t word = at % c.words;
    const auto data = [&](int from) { return calls * 1000u + uint32_t(from * 100 + channel * 10 + word); };
    if (at < sent) {
      c.memory[other][c.at(count, c.rank, channel) + word] = uint64_t(count) << 32 | data(c.rank);
    } else {
      const uint64_t got = c.memory[c.rank][c.at(count, other, channel) + word];
      if (uint32_t(got >> 32) != count) return false;
      EXPECT_EQ(uint32_t(got), data(other));
    }
    if (++at < 2 * sent) return true;
    at = 0;
    c.counts[channel] = count;
    calls += 1;
    return true;
  }

  ops::PeerChannels channels;
  int64_t channel;
  uint32_t calls = 0;
  int64_t at = 0;  // the word of the call, first those to send
};

/// In many orders of turns, some as long as the messages allow; the count wraps round.
TEST(PeerChannels, TwoHalvesAreEnoughHoweverFarARankRunsAhead) {
  constexpr int kRanks = 3;
  constexpr int64_t kChannels = 2;
  constexpr uint32_t kCalls = 5000, kFirst = 0u - 5u;
  std::vector<std::vector<uint64_t>> memory;
  std::vector<std::vector<uint32_t>> counts(kRanks, std::vector<uint32_t>(kChannels, kFirst));
  for (int r = 0; r < kRanks; ++r)
    memory.emplace_back(size_t(channels_of(r, kRanks, kChannels, 2).memory_words()), 0);
  std::vector<BlockInTurns> blocks;
  for (int r = 0; r < kRanks; ++r)
    for (int64_t channel = 0; channel < kChannels; ++channel) {
      ops::PeerChannels c = channels_of(r, kRanks, kChannels, 2);
      for (int other = 0; other < kRanks; ++other) c.memory[other] = memory[size_t(other)].data();
      c.counts = counts[size_t(r)].data();
      blocks.push_back({.channels = c, .channel = channel});
    }
  std::mt19937 random{1};
  uint32_t ahead = 0;
  const auto done = [](const BlockInTurns& block) { return block.calls == kCalls; };
  for (int in_vain = 0; !std::ranges::all_of(blocks, done);) {
    BlockInTurns& block = blocks[random() % blocks.size()];
    int steps = 0;
    for (const int most = 1 + int(random() % 32); steps < most && !done(block) && block.step();) ++steps;
    in_vain = steps > 0 ? 0 : in_vain + 1;
    ASSERT_LT(in_vain, 1000) << "no block goes on: a word was overwritten before it was read";
    for (const BlockInTurns& other : blocks)
      if (other.channel == block.channel)
        ahead = std::max(ahead, block.calls - std::min(block.calls, other.calls));
  }
  EXPECT_EQ(ahead, 1u);
  for (const auto& of_rank : counts)
    for (const uint32_t count : of_rank) EXPECT_EQ(count, kFirst + kCalls);
}

}  // namespace
}  // namespace tessera::nn
