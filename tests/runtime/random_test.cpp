#include <gtest/gtest.h>

#include <array>
#include <set>
#include <utility>

#include "runtime/error.h"
#include "runtime/philox.h"
#include "runtime/rng.h"
#include "tests/errors.h"

namespace tessera {
namespace {

std::array<uint32_t, 4> words(const Uint4& value) {
  return {value.word[0], value.word[1], value.word[2], value.word[3]};
}

TEST(Philox, EqualsThePublishedKnownAnswers) {
  // Random123, kat_vectors, "philox4x32 10": counter words 0 and 1 are our index, 2 and 3 our offset.
  using Words = std::array<uint32_t, 4>;
  EXPECT_EQ(words(philox(0, 0, 0)), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(words(philox(~uint64_t{0}, ~uint64_t{0}, ~uint64_t{0})),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(words(philox(0x299f31d0a4093822, 0x0370734413198a2e, 0x85a308d3243f6a88)),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, UniformsStayInsideTheirIntervals) {
  EXPECT_GT(uniform_open(0), 0.0f);
  EXPECT_EQ(uniform_open(~0u), 1.0f);
  EXPECT_EQ(uniform_half_open(0), 0.0f);
  EXPECT_LT(uniform_half_open(~0u), 1.0f);
}

TEST(Rng, EveryReservationIsAStreamOfItsOwn) {
  Rng rng(5);
  std::set<uint64_t> offsets;
  for (int i = 0; i < 100; ++i) {
    const RandomStream stream = rng.reserve(Device::cpu());
    EXPECT_EQ(stream.seed, 5u);
    EXPECT_EQ(stream.base, nullptr);
    offsets.insert(stream.offset());
  }
  EXPECT_EQ(offsets.size(), 100u);
}

TEST(Rng, StateSavesAndResumes) {
  Rng rng(42);
  for (int i = 0; i < 3; ++i) rng.reserve(Device::cpu());
  const Rng::State saved = rng.state();
  const RandomStream next = rng.reserve(Device::cpu());
  EXPECT_NE(rng.state(), saved);
  Rng other(0);
  other.set_state(saved);
  EXPECT_EQ(other.state(), saved);
  const RandomStream again = other.reserve(Device::cpu());
  EXPECT_EQ(again.seed, next.seed);
  EXPECT_EQ(again.offset(), next.offset());
}

TEST(Rng, CopiesDrawFromTheSameSource) {
  Rng rng(42);
  const Rng copy = rng;
  EXPECT_EQ(copy, rng);
  EXPECT_NE(Rng(42), rng) << "another source, though of the same seed";
  EXPECT_EQ(rng.reserve(Device::cpu()).offset(), 0u);
  EXPECT_EQ(copy.reserve(Device::cpu()).offset(), 1u);
  Rng moved = std::move(rng);
  EXPECT_EQ(moved.reserve(Device::cpu()).offset(), 2u);
  EXPECT_EQ(rng.reserve(Device::cpu()).offset(), 3u) << "nothing is taken from it";
  EXPECT_EQ(copy.state(), moved.state());
  copy.set_state({7, 0});
  EXPECT_EQ(moved.reserve(Device::cpu()).seed, 7u);
}

TEST(DrawnSources, AreThoseThatStillExist) {
  Rng first(1), second(2), unused(3);
  const DrawnSources drawn;
  second.reserve(Device::cpu());
  Rng(4).reserve(Device::cpu());  // gone
  first.reserve(Device::cpu()), second.reserve(Device::cpu());
  {
    const DrawnSources apart;
    unused.reserve(Device::cpu());
    EXPECT_EQ(apart.all(), std::vector{unused});
  }
  EXPECT_EQ(drawn.all(), (std::vector{second, first}));
}

TEST(RandomReplay, RepeatsWhatWasRecordedAndMovesNoRng) {
  Rng first(1), second(2);
  std::vector<RandomStream> log;
  std::vector<uint64_t> drawn;
  {
    const RandomReplay record(RandomReplay::Mode::record, log);
    drawn.push_back(first.reserve(Device::cpu()).offset());
    drawn.push_back(second.reserve(Device::cpu()).offset());
    drawn.push_back(first.reserve(Device::cpu()).offset());
  }
  ASSERT_EQ(log.size(), 3u);
  const auto before = std::pair(first.state().offset, second.state().offset);
  {
    const RandomReplay replay(RandomReplay::Mode::replay, log);
    EXPECT_EQ(first.reserve(Device::cpu()).offset(), drawn[0]);
    const RandomStream from_second = second.reserve(Device::cpu());
    EXPECT_EQ(from_second.seed, 2u);
    EXPECT_EQ(from_second.offset(), drawn[1]);
    EXPECT_EQ(first.reserve(Device::cpu()).offset(), drawn[2]);
    EXPECT_THROW(first.reserve(Device::cpu()), Error);  // more than the forward pass drew
  }
  EXPECT_EQ(std::pair(first.state().offset, second.state().offset), before);
}

TEST(RandomReplay, NestsRecordingInsideReplayAndRecording) {
  // A checkpoint inside a checkpoint: forward records twice, recomputation replays the outer and records
  // again.
  Rng rng(1);
  std::vector<RandomStream> outer, inner, inner_again;
  {
    const RandomReplay record_outer(RandomReplay::Mode::record, outer);
    rng.reserve(Device::cpu());
    const RandomReplay record_inner(RandomReplay::Mode::record, inner);
    rng.reserve(Device::cpu());
  }
  EXPECT_EQ(outer.size(), 2u);
  EXPECT_EQ(inner.size(), 1u);
  {
    const RandomReplay replay(RandomReplay::Mode::replay, outer);
    rng.reserve(Device::cpu());
    const RandomReplay record_inner(RandomReplay::Mode::record, inner_again);
    rng.reserve(Device::cpu());
  }
  EXPECT_EQ(outer.size(), 2u);
  ASSERT_EQ(inner_again.size(), 1u);
  EXPECT_EQ(inner_again[0].offset(), inner[0].offset());
}

}  // namespace
}  // namespace tessera
