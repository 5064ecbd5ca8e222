#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "autograd/tape.h"
#include "ops/attention/attention.h"
#include "ops/attention/attention_variants.h"
#include "runtime/capture.h"
#include "runtime/philox.h"
#include "tests/errors.h"
#include "tests/ops/tensors.h"

/// Attention within sequences, beyond the generic cases: each sequence is what the operator makes of it
/// alone, rows of no sequence, lengths that change under a captured graph, problems of many tiles, and
/// messages.

namespace tessera::ops {
namespace {

using Starts = std::vector<int64_t>;

Tensor cu_seqlens_tensor(const Starts& starts, DType dtype = DType::i64) {
  return Tensor::from(starts, {int64_t(starts.size())}).to(dtype);
}

struct AttentionOutcome {
  Tensor o, lse, dq, dk, dv;
};

/// Forward and backward; leaves of the call's own.
AttentionOutcome run_attention(Tensor q, Tensor k, Tensor v, const Tensor& dout,
                               const AttentionSequences& sequences, const AttentionOptions& options) {
  for (Tensor* leaf : {&q, &k, &v}) require_grad(*leaf);
  Tape tape;
  AttentionResult result = attention_with_lse(q, k, v, sequences, options);
  tape.backward(std::vector{result.o}, std::vector{dout});
  return {result.o.detach(), result.lse, grad(q), grad(k), grad(v)};
}

void expect_near_or_equal(const Tensor& got, const Tensor& wanted, double tolerance, const char* what) {
  ASSERT_EQ(got.shape(), wanted.shape()) << what;
  const auto a = got.to_vector<double>(), b = wanted.to_vector<double>();
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i] == b[i]) continue;  // infinities
    ASSERT_NEAR(a[i], b[i], tolerance) << what << " " << i;
  }
}

TEST(AttentionSequences, AreEachAlone) {
  const Starts cu_seqlens_q{0, 4, 4, 9, 10}, cu_seqlens_k{0, 6, 9, 9, 16};
  for (const DType index : {DType::i32, DType::i64})
    for (const bool causal : {false, true}) {
      const Tensor q = uniform({10, 4, 6}, DType::f64, 1), k = uniform({16, 2, 6}, DType::f64, 2),
                   v = uniform({16, 2, 6}, DType::f64, 3), dout = uniform({10, 4, 6}, DType::f64, 4);
      const AttentionOptions options{.causal = causal, .scale = 0.7};
      const AttentionOutcome all = run_attention(
          q, k, v, dout, {cu_seqlens_tensor(cu_seqlens_q, index), cu_seqlens_tensor(cu_seqlens_k, index)},
          options);
      for (size_t s = 0; s + 1 < cu_seqlens_q.size(); ++s) {
        const auto rows = [&](const Tensor& x) { return x.slice(0, cu_seqlens_q[s], cu_seqlens_q[s + 1]); };
        const auto keys = [&](const Tensor& x) { return x.slice(0, cu_seqlens_k[s], cu_seqlens_k[s + 1]); };
        const auto batch = [](const Tensor& x) {
          return x.clone().reshape({1, x.size(0), x.size(1), x.size(2)});
        };
        Tensor own_q = batch(rows(q)), own_k = batch(keys(k)), own_v = batch(keys(v));
        for (Tensor* leaf : {&own_q, &own_k, &own_v}) require_grad(*leaf);
        Tape tape;
        AttentionResult own = attention_with_lse(own_q, own_k, own_v, options);
        tape.backward(std::vector{own.o}, std::vector{batch(rows(dout))});
        // The same arithmetic in the same order.
        expect_near_or_equal(rows(all.o), own.o.detach().select(0, 0), 0, "o");
        expect_near_or_equal(all.lse.slice(1, cu_seqlens_q[s], cu_seqlens_q[s + 1]), own.lse.select(0, 0), 0,
                             "lse");
        expect_near_or_equal(rows(all.dq), grad(own_q).select(0, 0), 0, "dq");
        expect_near_or_equal(keys(all.dk), grad(own_k).select(0, 0), 0, "dk");
        expect_near_or_equal(keys(all.dv), grad(own_v).select(0, 0), 0, "dv");
      }
    }
}

TEST(AttentionSequences, RowsOfNoneGiveZero) {
  const Tensor q = uniform({7, 2, 4}, DType::f32, 1), k = uniform({9, 2, 4}, DType::f32, 2);
  const AttentionOutcome all =
      run_attention(q, k, k.clone(), uniform(q.shape(), DType::f32, 3),
                    {cu_seqlens_tensor({0, 2, 5}), cu_seqlens_tensor({0, 4, 6})}, {});
  for (const Tensor& x :
       {all.o.slice(0, 5, 7), all.dq.slice(0, 5, 7), all.dk.slice(0, 6, 9), all.dv.slice(0, 6, 9)})
    for (const double value : x.to_vector<double>()) EXPECT_EQ(value, 0);
  for (const double value : all.lse.slice(1, 5, 7).to_vector<double>())
    EXPECT_EQ(value, -std::numeric_limits<double>::infinity());
}

TEST(AttentionSequences, Messages) {
  const Tensor q = uniform({6, 2, 4}, DType::f32, 1), k = uniform({8, 2, 4}, DType::f32, 2);
  const Tensor good = cu_seqlens_tensor({0, 6});
  const auto expect_message = [&](const AttentionSequences& sequences, const char* part) {
    const std::string text = message_of([&] { attention(q, k, k, sequences); });
    EXPECT_NE(text.find(part), std::string::npos) << "\"" << text << "\" lacks \"" << part << "\"";
  };
  expect_message({Tensor()}, "cu_seqlens_q is undefined");
  expect_message({good}, "without cu_seqlens_k they have as many rows");
  expect_message({good, cu_seqlens_tensor({0, 2, 8})}, "expected as many sequences");
  expect_message({good, cu_seqlens_tensor({0, 8}, DType::i32)}, "in one dtype");
  expect_message({uniform({2}, DType::f32, 3), good}, "expected i32 or i64");
  expect_message({cu_seqlens_tensor({1, 6}), good}, "cu_seqlens_q[0] is 1; expected 0");
  expect_message({cu_seqlens_tensor({0, 4, 3}), cu_seqlens_tensor({0, 4, 8})},
                 "cu_seqlens_q[2] is 3; expected at least 4");
  expect_message({good, cu_seqlens_tensor({0, 9})}, "cu_seqlens_k ends at 9; expected at most the 8 rows");
  EXPECT_NE(message_of([&] {
              attention(q.reshape({1, 6, 2, 4}), k, k, AttentionSequences{good});
            }).find("expected [N, H, D]"),
            std::string::npos);
}

/// Every variant that runs on this GPU.
std::vector<int> runnable_variants(Device gpu) {
  return gpu.info().major == 9 ? std::vector<int>{0, 1} : std::vector<int>{0};
}

TEST(AttentionSequences, LengthsChangeUnderAGraph) {
  // A captured step reads the lengths where they are: other lengths, one long sequence, empty ones, padding
  // rows. Judged next to f32, whose kernels round less: 16 bits leave an error of a few units of the largest.
  if (Device::cuda_count() == 0) GTEST_SKIP() << "skipped: no GPU";
  const Device gpu = Device::cuda(0);
  constexpr int64_t kKeys = 1100;
  struct Problem {
    int64_t rows, dim;  // 30 rows of two heads: few queries
    bool causal;
  };
  std::vector<Problem> problems;
  for (const int64_t rows : {900, 30})
    for (const int64_t dim : {64, 128})
      for (const bool causal : {false, true}) problems.push_back({rows, dim, causal});
  for (const int row : runnable_variants(gpu))
    for (const Problem& problem : problems) {
      const int64_t rows = problem.rows, dim = problem.dim;
      const bool causal = problem.causal;
      SCOPED_TRACE(testing::Message()
                   << "row " << row << " of " << rows << " D " << dim << " causal " << causal);
      const auto scaled = [&](Starts starts) {
        for (int64_t& start : starts) start = start * rows / 900;
        return starts;
      };
      const Tensor q = uniform({rows, 4, dim}, DType::bf16, 1).to(gpu),
                   k = uniform({kKeys, 2, dim}, DType::bf16, 2).to(gpu),
                   v = uniform({kKeys, 2, dim}, DType::bf16, 3).to(gpu),
                   dout = uniform({rows, 4, dim}, DType::bf16, 4).to(gpu);
      const AttentionSequences sequences{cu_seqlens_tensor(scaled({0, 300, 600, 900})).to(gpu),
                                         cu_seqlens_tensor({0, 400, 700, 1100}).to(gpu)};
      AttentionOutcome captured;
      const ForceVariant force("attention", attention_variants()[size_t(row)]);
      Captured step(gpu, [&] { captured = run_attention(q, k, v, dout, sequences, {.causal = causal}); });
      for (int call = 0; call < 3; ++call) step();
      ASSERT_TRUE(step.is_graph());
      const std::vector<std::pair<Starts, Starts>> changes{{{0, 300, 600, 900}, {0, 400, 700, 1100}},
                                                           {{0, 0, 900, 900}, {0, 1, 1100, 1100}},
                                                           {{0, 1, 193, 700}, {0, 500, 501, 640}},
                                                           {{0, 0, 0, 0}, {0, 0, 0, 0}}};
      for (const auto& [cu_seqlens_q, cu_seqlens_k] : changes) {
        sequences.cu_seqlens_q.copy_from(cu_seqlens_tensor(scaled(cu_seqlens_q)));
        sequences.cu_seqlens_k.copy_from(cu_seqlens_tensor(cu_seqlens_k));
        for (const Tensor& x : {captured.o, captured.lse, captured.dq, captured.dk, captured.dv})
          x.fill(std::nan(""));
        step();
        gpu.synchronize();
        const ForceVariant plain("attention", "mma");
        const AttentionOutcome wanted = run_attention(q.to(DType::f32), k.to(DType::f32), v.to(DType::f32),
                                                      dout.to(DType::f32), sequences, {.causal = causal});
        const auto largest = [](const Tensor& x) {
          double most = 1e-3;
          for (const double value : x.to_vector<double>())
            if (std::isfinite(value)) most = std::max(most, std::abs(value));
          return most;
        };
        const auto near = [&](const Tensor& got, const Tensor& want, const char* what) {
          expect_near_or_equal(got, want, 4 * epsilon(DType::bf16) * largest(want), what);
        };
        near(captured.o, wanted.o, "o");
        near(captured.lse, wanted.lse, "lse");
        near(captured.dq, wanted.dq, "dq");
        near(captured.dk, wanted.dk, "dk");
        near(captured.dv, wanted.dv, "dv");
      }
    }
}

TEST(AttentionSequences, OfOneLengthAreABatch) {
  // Many tiles: the sequences as batches, on the same row. Both round at the same places; orders of summation
  // differ where a tile is cut.
  if (Device::cuda_count() == 0) GTEST_SKIP() << "skipped: no GPU";
  const Device gpu = Device::cuda(0);
  for (const int row : runnable_variants(gpu))
    for (const int64_t dim : {64, 128})
      for (const bool causal : {false, true}) {
        SCOPED_TRACE(testing::Message() << "row " << row << " D " << dim << " causal " << causal);
        constexpr int64_t kCount = 7, kLength = 1030, kHeads = 8, kKeyHeads = 2;
        const auto flat = [&](int64_t heads, uint64_t stream) {
          return uniform({kCount * kLength, heads, dim}, DType::bf16, stream).to(gpu);
        };
        const Tensor q = flat(kHeads, 1), k = flat(kKeyHeads, 2), v = flat(kKeyHeads, 3),
                     dout = flat(kHeads, 4);
        Starts starts;
        for (int64_t s = 0; s <= kCount; ++s) starts.push_back(s * kLength);
        const ForceVariant force("attention", attention_variants()[size_t(row)]);
        const AttentionOutcome packed =
            run_attention(q, k, v, dout, {cu_seqlens_tensor(starts, DType::i32).to(gpu)}, {.causal = causal});
        const auto batch = [&](const Tensor& x) { return x.reshape({kCount, kLength, x.size(1), dim}); };
        Tensor own[3] = {batch(q), batch(k), batch(v)};
        for (Tensor& leaf : own) require_grad(leaf);
        Tape tape;
        AttentionResult fixed = attention_with_lse(own[0], own[1], own[2], {.causal = causal});
        tape.backward(std::vector{fixed.o}, std::vector{batch(dout)});
        const auto near = [&](const Tensor& got, const Tensor& want, const char* what) {
          double most = 0;
          for (const double value : want.to_vector<double>()) most = std::max(most, std::abs(value));
          expect_near_or_equal(got.reshape(want.shape()), want, 2 * epsilon(DType::bf16) * most, what);
        };
        near(packed.o, fixed.o.detach(), "o");
        near(packed.lse.reshape({kHeads, kCount, kLength}).transpose(0, 1).clone(), fixed.lse, "lse");
        near(packed.dq, grad(own[0]), "dq");
        near(packed.dk, grad(own[1]), "dk");
        near(packed.dv, grad(own[2]), "dv");
      }
}

}  // namespace
}  // namespace tessera::ops
