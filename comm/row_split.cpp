#include "comm/row_split.h"

#include <utility>

#include "runtime/error.h"

namespace tessera::comm {

RowSplit::RowSplit(int ranks, std::vector<int64_t> segments) : ranks_(ranks), segments_(std::move(segments)) {
  check(ranks >= 1, "row split: ", ranks, " ranks; expected at least 1");
  for (const int64_t rows : segments_) {
    check(rows >= ranks, "row split: ", rows, " rows on ", ranks,
          " ranks; expected at least one row for each rank");
    total_ += rows;
  }
}

RowSplit::Range RowSplit::in_whole(size_t segment, int rank) const {
  int64_t first = 0;
  for (size_t i = 0; i < segment; ++i) first += segments_[i];
  const int64_t rows = segments_[segment];
  return {first + rows * rank / ranks_, first + rows * (rank + 1) / ranks_};
}

RowSplit::Range RowSplit::in_part(size_t segment, int rank) const {
  int64_t first = 0;
  for (size_t i = 0; i < segment; ++i) first += in_whole(i, rank).count();
  return {first, first + in_whole(segment, rank).count()};
}

int64_t RowSplit::count(int rank) const {
  int64_t rows = 0;
  for (size_t i = 0; i < segments_.size(); ++i) rows += in_whole(i, rank).count();
  return rows;
}

}  // namespace tessera::comm
