#include "comm/recorded.h"

#include <gtest/gtest.h>

#include <cmath>

#include "autograd/tape.h"
#include "comm/dry.h"
#include "comm/threads.h"
#include "tests/comm/ranks.h"
#include "tests/errors.h"

namespace tessera::comm {
namespace {

/// Values whose sums depend on their order and on where they are rounded.
Tensor values(const Shape& shape, DType dtype, uint64_t seed) {
  std::vector<double> all(size_t(shape.count()), 0);
  uint64_t state = seed * 7919 + 1;
  for (double& value : all) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    value = std::ldexp(double(int64_t(state >> 40)) / double(1 << 24) - 0.5, int(state >> 33 & 7));
  }
  return Tensor::from(all, shape).to(dtype);
}

Tensor leaf(const Tensor& x) {
  Tensor copy = x.clone();
  require_grad(copy);
  return copy;
}

/// Rows of `whole` that are a rank's part.
Tensor part_of(const Tensor& whole, const RowSplit& rows, int rank) {
  const Tensor part = Tensor::empty(whole.shape().with(0, rows.count(rank)), whole.dtype(), whole.device());
  for (size_t i = 0; i < rows.segments(); ++i) {
    const RowSplit::Range from = rows.in_whole(i, rank), to = rows.in_part(i, rank);
    part.slice(0, to.begin, to.end).copy_from(whole.slice(0, from.begin, from.end));
  }
  return part;
}

TEST(RowSplit, SharesDifferByAtMostOneRow) {
  const RowSplit rows(4, {7, 5, 4});
  EXPECT_EQ(rows.total(), 16);
  int64_t sum = 0;
  for (size_t i = 0; i < rows.segments(); ++i) {
    int64_t at = i == 0 ? 0 : i == 1 ? 7 : 12;
    for (int rank = 0; rank < 4; ++rank) {
      const RowSplit::Range range = rows.in_whole(i, rank);
      EXPECT_EQ(range.begin, at);
      EXPECT_LE(range.count(), rows.largest(i));
      EXPECT_GE(range.count(), rows.largest(i) - 1);
      EXPECT_EQ(rows.in_part(i, rank).count(), range.count());
      at = range.end;
      sum += range.count();
    }
  }
  EXPECT_EQ(sum, rows.total());
  for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(rows.in_part(2, rank).end, rows.count(rank));
  EXPECT_EQ(rows.count(0) + rows.count(1) + rows.count(2) + rows.count(3), 16);
}

TEST(RowSplit, RefusesFewerRowsThanRanks) {
  expect_parts(message_of([] {
                 RowSplit(4, {8, 3});
               }),
               {"3 rows on 4 ranks", "at least one row for each rank"});
  expect_parts(message_of([] { RowSplit(0, {8}); }), {"0 ranks"});
}

/// The sum by the tree over the ranks, in the compute type, with one rounding.
std::vector<double> sum_of(const std::vector<Tensor>& terms) {
  std::vector<Tensor> wide;
  const DType dtype = terms[0].dtype();
  for (const Tensor& term : terms)
    wide.push_back(term.to(dtype == DType::f64 ? DType::f64 : DType::f32).clone());
  for (size_t step = 1; step < wide.size(); step *= 2)
    for (size_t i = 0; i + step < wide.size(); i += 2 * step) {
      std::vector<double> a = wide[i].to_vector<double>();
      const std::vector<double> b = wide[i + step].to_vector<double>();
      for (size_t k = 0; k < a.size(); ++k) a[k] += b[k];  // exact in f64 for f32 terms
      wide[i].copy_from(Tensor::from(a, wide[i].shape()));
    }
  return wide[0].to(dtype).to_vector<double>();
}

struct RowCase {
  int ranks;
  std::vector<int64_t> segments;
  DType dtype;
};

class GatherRows : public ::testing::TestWithParam<RowCase> {};

TEST_P(GatherRows, GivesTheWholeAndSumsGradientsOnce) {
  const auto& [ranks, segments, dtype] = GetParam();
  const RowSplit rows(ranks, segments);
  const Tensor whole = values({rows.total(), 2, 5}, dtype, 1);
  std::vector<Tensor> gradients;
  for (int rank = 0; rank < ranks; ++rank)
    gradients.push_back(values(whole.shape(), dtype, uint64_t(rank) + 2));
  run_threads(ranks, [&, segments = segments, dtype = dtype](Communicator& group) {
    const Tensor x = leaf(part_of(whole, rows, group.rank()));
    Tape tape;
    const Tensor y = gather_rows(group, x, rows);
    EXPECT_EQ(y.to_vector<double>(), whole.to_vector<double>());
    const Tensor dy = gradients[size_t(group.rank())].clone();
    tape.backward(std::span(&y, 1), std::span(&dy, 1));
    std::vector<Tensor> own;
    for (const Tensor& gradient : gradients) own.push_back(part_of(gradient, rows, group.rank()));
    EXPECT_EQ(grad(x).to(dtype).to_vector<double>(), sum_of(own)) << group.rank();
  });
}

INSTANTIATE_TEST_SUITE_P(Of, GatherRows,
                         ::testing::Values(RowCase{1, {3}, DType::f32}, RowCase{2, {4}, DType::f32},
                                           RowCase{2, {5}, DType::bf16}, RowCase{4, {8}, DType::bf16},
                                           RowCase{4, {7, 5}, DType::bf16}, RowCase{3, {4, 3}, DType::f16},
                                           RowCase{4, {6}, DType::f64}, RowCase{3, {9}, DType::f32}));

TEST(GatherRows, AddsUpInF32WhateverTheDtype) {
  // (256 + 1) + (1 + 1) is 256 + 2 = 258 if it is rounded to bf16 after each addition, and 259 in f32.
  run_threads(4, [](Communicator& group) {
    const RowSplit rows(4, {4});
    const Tensor x = leaf(Tensor::zeros({1, 3}, DType::bf16, Device::cpu()));
    Tape tape;
    const Tensor y = gather_rows(group, x, rows);
    const Tensor dy = Tensor::full({4, 3}, group.rank() == 0 ? 256 : 1, DType::bf16, Device::cpu());
    tape.backward(std::span(&y, 1), std::span(&dy, 1));
    EXPECT_EQ(grad(x).to_vector<double>(),
              std::vector<double>(3, 260));  // 259, halfway between 258 and 260, to even
  });
}

class Heads : public ::testing::TestWithParam<RowCase> {};

TEST_P(Heads, MoveToAllRowsAndBackWithoutChangingAValue) {
  const auto& [ranks, segments, dtype] = GetParam();
  const RowSplit tokens(ranks, segments), memory(ranks, {segments[0]});
  const int64_t heads = 2 * ranks;
  const Tensor q = values({tokens.total(), 3, heads, 5}, dtype, 1),
               k = values({memory.total(), 3, heads, 5}, dtype, 2);
  const Tensor dq = values(q.shape(), dtype, 3), dk = values(k.shape(), dtype, 4);
  run_threads(ranks, [&, segments = segments, dtype = dtype, ranks = ranks](Communicator& group) {
    const int rank = group.rank();
    const Tensor own_q = leaf(part_of(q, tokens, rank)), own_k = leaf(part_of(k, memory, rank));
    Tape tape;
    const std::vector<Tensor> all = rows_to_heads(group, {own_q, own_k}, {tokens, memory});
    const auto own_heads = [&](const Tensor& x) { return x.slice(2, 2 * rank, 2 * rank + 2); };
    EXPECT_EQ(all[0].to_vector<double>(), own_heads(q).to_vector<double>());
    EXPECT_EQ(all[1].to_vector<double>(), own_heads(k).to_vector<double>());
    const Tensor back = heads_to_rows(group, all[0], tokens);
    EXPECT_EQ(back.to_vector<double>(), own_q.to_vector<double>());
    // The gradient of `back` comes to q by way of both, that of the second result to k.
    const Tensor results[] = {back, all[1]}, grads[] = {part_of(dq, tokens, rank), own_heads(dk).clone()};
    tape.backward(results, grads);
    EXPECT_EQ(grad(own_q).to(dtype).to_vector<double>(), grads[0].to_vector<double>());
    EXPECT_EQ(grad(own_k).to(dtype).to_vector<double>(), part_of(dk, memory, rank).to_vector<double>());
  });
}

INSTANTIATE_TEST_SUITE_P(Of, Heads,
                         ::testing::Values(RowCase{1, {3, 2}, DType::f32}, RowCase{2, {4, 2}, DType::bf16},
                                           RowCase{2, {5, 3}, DType::f32}, RowCase{4, {7, 5}, DType::f64},
                                           RowCase{3, {4, 3}, DType::bf16}));

TEST(Heads, OfWhichNoGradientCameAreZero) {
  run_threads(2, [](Communicator& group) {
    const RowSplit rows(2, {4});
    const Tensor a = leaf(values({2, 1, 2, 2}, DType::f32, 1)), b = leaf(values({2, 1, 2, 2}, DType::f32, 2));
    Tape tape;
    const std::vector<Tensor> all = rows_to_heads(group, {a, b}, {rows, rows});
    const Tensor dy = Tensor::full(all[1].shape(), 3, DType::f32, Device::cpu());
    tape.backward(std::span(&all[1], 1), std::span(&dy, 1));
    EXPECT_EQ(grad(a).to_vector<double>(), std::vector<double>(8, 0));
    EXPECT_EQ(grad(b).to_vector<double>(), std::vector<double>(8, 3));
  });
}

TEST(Recorded, RunsBetweenProcesses) {
  test::Ranks ranks(3, [](Communicator& group, const test::Rank&) {
    const RowSplit rows(3, {5});
    const Tensor whole = values({5, 2}, DType::f32, 1);
    const Tensor x = leaf(part_of(whole, rows, group.rank()));
    Tape tape;
    const Tensor y = gather_rows(group, x, rows);
    EXPECT_EQ(y.to_vector<double>(), whole.to_vector<double>());
    const Tensor dy = Tensor::full({5, 2}, 1 + group.rank(), DType::f32, Device::cpu());
    tape.backward(std::span(&y, 1), std::span(&dy, 1));
    EXPECT_EQ(grad(x).to_vector<double>(), std::vector<double>(size_t(x.count()), 6));
  });
  for (const test::Ended& end : ranks.wait_all()) EXPECT_EQ(end.code, 0) << end.signal << " " << end.said;
}

TEST(Recorded, ADryRunCountsWhatARankSends) {
  const DryRun run(1, 4);
  const RowSplit rows(4, {8});
  const Tensor x = leaf(values({2, 6}, DType::bf16, 1));
  Tape tape;
  const Tensor y = gather_rows(run.communicator(), x, rows);
  const Tensor dy = values({8, 6}, DType::bf16, 2);
  tape.backward(std::span(&y, 1), std::span(&dy, 1));
  EXPECT_EQ(run.counts().at("share").bytes, 3 * 2 * 6 * 2);       // its rows to three others
  EXPECT_EQ(run.counts().at("all_to_all").bytes, 3 * 2 * 6 * 2);  // gradients of theirs
}

TEST(Recorded, RefusesWhatDoesNotFit) {
  const DryRun run(0, 2);
  const Communicator& group = run.communicator();
  const RowSplit rows(2, {5});
  const Tensor x = values({2, 1, 3, 2}, DType::f32, 1);
  expect_parts(message_of([&] {
                 gather_rows(group, values({3, 2}, DType::f32, 1), rows);
               }),
               {"f32[3, 2]", "rank 0 of 2", "expected 2 rows, of 5 in all"});
  expect_parts(message_of([&] { gather_rows(group, x, RowSplit(3, {5})); }),
               {"over 3 ranks", "the group has 2"});
  expect_parts(message_of([&] { rows_to_heads(group, {x}, {rows}); }),
               {"[2, 1, 3, 2]", "heads that 2 ranks divide"});
  expect_parts(message_of([&] { rows_to_heads(group, {x, x}, {rows}); }), {"2 tensors", "rows of 1"});
  expect_parts(message_of([&] { heads_to_rows(group, x, rows); }), {"expected 5 rows"});
}

}  // namespace
}  // namespace tessera::comm
