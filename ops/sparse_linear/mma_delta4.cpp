#include <algorithm>
#include <array>
#include <functional>
#include <limits>
#include <numeric>
#include <vector>

#include "ops/sparse_linear/mma_delta4_internal.h"
#include "ops/sparse_linear/sparse_walk_internal.h"
#include "runtime/integers.h"
#include "runtime/parallel.h"

namespace tessera::ops {

using namespace mma_delta4;
using namespace sparse_internal;

namespace {

constexpr int64_t kStreamsOfGroup = kStrips * kStreams, kPairsOfStrip = 8;

/// How the rows of a group are arranged. A stream is as long as its longest lane, and a lane has two rows:
/// pairs of rows are made such that the longest of the 8 lanes that a pair has in both streams is short, and
/// strips of pairs that are about equally long. At 50 % random zeros streams of 512 columns are 10 % longer
/// than their mean lane, half of which is rounding to 8 entries.
template <class Bits>
class Arrangement {
 public:
  Arrangement(const SparseWeight& made, const Bits* dense, int64_t stride, int64_t group) {
    const int64_t part = group % made.group_columns(), first = group / made.group_columns() * kGroupRows;
    for (int64_t half = 0; half < kStreams; ++half) {
      const MmaStream order(made.in, part, half);
      const int64_t columns = std::min(order.tiles * 8, made.in - order.first_column);
      for (int64_t r = 0; r < std::min(kGroupRows, made.out - first); ++r)
        for (int64_t c = 0; c < columns; ++c)
          stored_[size_t(r)][size_t(half * 4 + c % 8 / 2)] +=
              dense[(first + r) * stride + order.first_column + c] != 0;
    }
    pair_rows();
  }
  /// The row of the window at a place among those of the strips.
  int64_t row(int64_t place) const {
    const Pair& pair = pairs_[size_t(place / kStripRows * kPairsOfStrip + place % kPairsOfStrip)];
    return place % kStripRows < kPairsOfStrip ? pair.first : pair.second;
  }

 private:
  using Counts = std::array<int32_t, 8>;  // elements of a row, by stream and by which of its lanes has them
  struct Pair {
    int64_t first = 0, second = 0;
    std::array<int32_t, size_t(kStreams)> lengths{};  // of the longest lane in each stream
    int64_t chunks() const { return ceil_div(lengths[0], 8) + ceil_div(lengths[1], 8); }
    /// Chunks, and of as many chunks entries.
    int64_t cost() const { return chunks() * 64 + lengths[0] + lengths[1]; }
  };

  Pair pair_of(int64_t first, int64_t second) const {
    Pair pair{first, second};
    const Counts &a = stored_[size_t(first)], &b = stored_[size_t(second)];
    for (size_t lane = 0; lane < a.size(); ++lane)
      pair.lengths[lane / 4] = std::max(pair.lengths[lane / 4], a[lane] + b[lane]);
    return pair;
  }

  /// Row by row, the one with the longest lane first, gets the partner that makes the cheapest pair.
  void pair_rows() {
    MmaRows order;
    std::iota(order.begin(), order.end(), 0);
    std::ranges::stable_sort(order, std::greater<>(),
                             [&](int64_t r) { return std::ranges::max(stored_[size_t(r)]); });
    std::array<bool, size_t(kGroupRows)> taken{};
    for (const int64_t first : order) {
      if (taken[size_t(first)]) continue;
      taken[size_t(first)] = true;
      Pair best;
      int64_t least = std::numeric_limits<int64_t>::max();
      for (int64_t second = 0; second < kGroupRows; ++second) {
        if (taken[size_t(second)]) continue;
        const Pair pair = pair_of(first, second);
        if (pair.cost() < least) best = pair, least = pair.cost();
      }
      taken[size_t(best.second)] = true;
      pairs_.push_back(best);
    }
    std::ranges::stable_sort(pairs_, std::greater<>(),
                             [](const Pair& pair) { return std::pair(pair.chunks(), pair.lengths[0]); });
  }

  std::array<Counts, size_t(kGroupRows)> stored_{};
  std::vector<Pair> pairs_;
};

template <class Bits>
class Encoder {
 public:
  Encoder(SparseWeight& made, const Tensor& dense)
      : made_(made),
        dense_(dense),
        from_(static_cast<const Bits*>(dense.raw())),
        stride_(dense.rows() > 1 ? dense.row_stride() : 0) {}

  void run() {
    const Device cpu = Device::cpu();
    const int64_t groups = made_.groups(), streams = groups * kStreamsOfGroup;
    made_.offsets = Tensor::zeros({streams + 1}, DType::i32, cpu);
    made_.info = Tensor::zeros({groups * kGroupRows / 4}, DType::i32, cpu);
    std::vector<int64_t> stored(size_t(groups), 0);
    parallel_for(groups, 1, [&](int64_t begin, int64_t end) {
      for (int64_t group = begin; group < end; ++group) stored[size_t(group)] = arrange(group);
    });
    made_.stored = std::accumulate(stored.begin(), stored.end(), int64_t{0});
    int32_t* const offsets = made_.offsets.template data<int32_t>();
    for (int64_t stream = 0; stream < streams; ++stream) {
      const int64_t end = int64_t(offsets[stream]) + offsets[stream + 1];
      check(
          end <= std::numeric_limits<int32_t>::max(), "compress: weight ", describe(dense_),
          " has 2^31 chunks of 256 values or more, which offsets of 32 bits cannot address; split its rows");
      offsets[stream + 1] = int32_t(end);
    }
    made_.values = Tensor::zeros({offsets[streams] * kChunk}, dense_.dtype(), cpu);
    made_.gaps = Tensor::zeros({offsets[streams] * kLanes}, DType::i32, cpu);
    parallel_for(groups, 1, [&](int64_t begin, int64_t end) {
      for (int64_t group = begin; group < end; ++group) write_group(group);
    });
  }

 private:
  /// A lane of a stream by position: the bits of its elements, 0 outside the matrix, and which have an entry:
  /// those that are not 0, and zeros where the distance from the entry before is too large.
  struct Lane {
    std::array<Bits, size_t(kMostTiles* kTilePositions)> elements;
    std::array<bool, size_t(kMostTiles* kTilePositions)> chosen;
    int64_t positions, entries, stored;
  };
  Lane lane_of(const MmaRows& rows, int64_t group, int64_t stream, int64_t lane) const {
    const MmaStream order(made_.in, group % made_.group_columns(), stream % kStreams);
    Lane made{.elements = {}, .chosen = {}, .positions = order.positions(), .entries = 0, .stored = 0};
    for (const int64_t half : {0, 1}) {
      const int64_t position = 2 * half,
                    place = stream / kStreams * kStripRows + MmaStream::row_of(lane, position),
                    row = group / made_.group_columns() * kGroupRows + rows[size_t(place)];
      if (row >= made_.out) continue;
      const int64_t first = order.column_of(lane, position);
      const Bits* const from = from_ + row * stride_;
      for (int64_t tile = 0; tile < order.tiles; ++tile)
        for (int64_t c = 0; c < 2; ++c)
          if (const int64_t column = first + tile * 8 + c; column < made_.in)
            made.elements[size_t(tile * kTilePositions + position + c)] = from[column];
    }
    int64_t last = -1;
    const auto choose = [&](int64_t position) {
      made.chosen[size_t(position)] = true;
      ++made.entries;
      last = position;
    };
    for (int64_t position = 0; position < made.positions; ++position) {
      if (made.elements[size_t(position)] == 0) continue;
      while (position - last > kMostGap + 1) choose(last + kMostGap + 1);
      choose(position);
      ++made.stored;
    }
    return made;
  }

  /// The places of a group's rows, and the chunks of its streams at offsets[stream + 1]. Returns its
  /// elements.
  int64_t arrange(int64_t group) {
    const Arrangement<Bits> arrangement(made_, from_, stride_, group);
    auto* const places = reinterpret_cast<uint8_t*>(made_.info.template data<int32_t>()) + group * kGroupRows;
    MmaRows rows;
    for (int64_t place = 0; place < kGroupRows; ++place) {
      rows[size_t(place)] = arrangement.row(place);
      places[rows[size_t(place)]] = uint8_t(place);
    }
    int64_t stored = 0;
    int32_t* const chunks = made_.offsets.template data<int32_t>() + group * kStreamsOfGroup + 1;
    for (int64_t stream = 0; stream < kStreamsOfGroup; ++stream) {
      int64_t most = 0;
      for (int64_t l = 0; l < kLanes; ++l) {
        const Lane lane = lane_of(rows, group, stream, l);
        most = std::max(most, lane.entries);
        stored += lane.stored;
      }
      chunks[stream] = int32_t(ceil_div(most, kEntries));
    }
    return stored;
  }

  void write_group(int64_t group) const {
    const MmaRows rows = rows_by_place(made_, group);
    const int32_t* const chunks = made_.offsets.template data<int32_t>() + group * kStreamsOfGroup;
    for (int64_t stream = 0; stream < kStreamsOfGroup; ++stream)
      for (int64_t l = 0; l < kLanes; ++l) {
        Lane lane = lane_of(rows, group, stream, l);
        // Every lane has as many entries: the first zeros that have none.
        int64_t missing = (chunks[stream + 1] - chunks[stream]) * kEntries - lane.entries;
        for (size_t position = 0; missing > 0; ++position)
          if (!lane.chosen[position]) lane.chosen[position] = true, --missing;
        write_lane(lane, l, chunks[stream]);
      }
  }

  void write_lane(const Lane& lane, int64_t index, int64_t chunk) const {
    Bits* const values = static_cast<Bits*>(made_.values.raw());
    uint32_t* const gaps = reinterpret_cast<uint32_t*>(made_.gaps.template data<int32_t>());
    int64_t entry = 0, last = -1;
    for (int64_t position = 0; position < lane.positions; ++position) {
      if (!lane.chosen[size_t(position)]) continue;
      const int64_t at = chunk + entry / kEntries, place = entry % kEntries;
      values[at * kChunk + index * kEntries + place] = lane.elements[size_t(position)];
      gaps[at * kLanes + index] |= uint32_t(position - last - 1) << 4 * place;
      last = position;
      ++entry;
    }
  }

  SparseWeight& made_;
  const Tensor& dense_;
  const Bits* const from_;
  const int64_t stride_;
};

}  // namespace

void compress_mma_delta4(SparseWeight& made, const Tensor& dense) {
  with_bits(dense.dtype(), [&]<class Bits>() { Encoder<Bits>(made, dense).run(); });
}

/// The streams are what the kernel may read and write: each row of a window in a place of its own, and
/// entries at positions that there are.
SparseCounts validate_mma_delta4(const SparseWeight& weight, const std::string& name) {
  const int64_t groups = weight.groups();
  check_chunks(weight, name, "stream", groups * kStreamsOfGroup);
  check_array(name, "info", weight.info, DType::i32, groups * kGroupRows / 4);
  int64_t stored = 0;
  for (int64_t group = 0; group < groups; ++group) {
    const auto* const places =
        reinterpret_cast<const uint8_t*>(weight.info.data<int32_t>()) + group * kGroupRows;
    std::array<bool, size_t(kGroupRows)> seen{};
    for (int64_t row = 0; row < kGroupRows; ++row) {
      check(!seen[places[row]], name, ": 'info' has two rows of group ", group, " in place ",
            int(places[row]));
      seen[places[row]] = true;
    }
    const MmaRows rows = rows_by_place(weight, group);
    const int64_t part = group % weight.group_columns(), first = group / weight.group_columns() * kGroupRows;
    for (int64_t stream = 0; stream < kStreamsOfGroup; ++stream) {
      const MmaStream order(weight.in, part, stream % kStreams);
      const auto visit = [&](int64_t lane, int64_t place, int64_t column, int64_t position, auto value) {
        check(position < order.positions() && (value == 0 || order.has(position)), name, ": stream ", stream,
              " of group ", group, " has an entry of lane ", lane, " at position ", position,
              "; expected less than ", order.tiles * kTilePositions);
        const int64_t row = first + rows[size_t(place)];
        check(value == 0 || (row < weight.out && column < weight.in), name, ": group ", group,
              " has an element in row ", row, ", column ", column, ", outside the matrix [", weight.out, ", ",
              weight.in, "]");
        stored += value != 0;
      };
      with_bits(weight.dtype(), [&]<class Bits>() { for_each_entry<Bits>(weight, group, stream, visit); });
    }
  }
  return {stored, 0};
}

}  // namespace tessera::ops
