#include "bench/sweep.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>

#include "bench/compare.h"

namespace tessera::bench {
namespace {

/// relu, whose last element is 1 too large on that kind of device; not in f64 and, on a GPU, not in f32.
ops::OpSpec planted(bool on_gpu) {
  ops::OpSpec op = ops::find_op("relu");
  op.run = [run = op.run, on_gpu](const std::vector<Tensor>& in, const ops::Attrs& attrs) {
    std::vector<Tensor> out = run(in, attrs);
    const DType dtype = in[0].dtype();
    const bool exact = in[0].device().is_cuda() != on_gpu || dtype == (on_gpu ? DType::f32 : DType::f64);
    if (exact || in[0].count() == 0) return out;
    const Tensor y = out[0].detach();
    const Tensor last = y.slice(0, -1, y.size(0)).slice(1, -1, y.size(1));
    last.copy_from(Tensor::full({1, 1}, last.to_vector<double>()[0] + 1, DType::f32, Device::cpu()));
    return out;
  };
  return op;
}

TEST(Draw, StaysInRangeAndMeetsEveryKind) {
  int odd = 0, eights = 0, tiny = 0, huge = 0;
  std::set<int64_t> seen;
  for (uint64_t i = 0; i < 1000; ++i) {
    const int64_t n = ops::Draw(1, i).size(3, 70000);
    ASSERT_TRUE(3 <= n && n <= 70000) << n;
    odd += n % 2, eights += n % 8 == 0, tiny += n<20, huge += n> 20000;
    seen.insert(n);
    EXPECT_EQ(ops::Draw(1, i).size(3, 70000), n);
  }
  EXPECT_GT(odd, 300);
  EXPECT_GT(eights, 100);
  EXPECT_GT(tiny, 100);
  EXPECT_GT(huge, 80);
  EXPECT_GT(seen.size(), 500u);
  EXPECT_THROW(ops::Draw(1, 1).size(5, 4), Error);
}

TEST(Sweep, EveryDeclaredSweepDrawsProblemsWithinTheBudget) {
  for (const ops::OpSpec& op : ops::all_ops()) {
    if (!op.sweep) continue;
    const auto cases = sweep_cases(op, {.device = Device::cpu(), .count = 30});
    EXPECT_EQ(cases.size(), 30u) << op.name;
    const auto again = sweep_cases(op, {.device = Device::cpu(), .count = 30});
    for (size_t i = 0; i < cases.size(); ++i) EXPECT_EQ(cases[i].dims, again[i].dims) << op.name;
    const auto others = sweep_cases(op, {.device = Device::cpu(), .count = 30, .seed = 2});
    EXPECT_FALSE(std::equal(cases.begin(), cases.end(), others.begin(), [](const auto& a, const auto& b) {
      return a.dims == b.dims;
    })) << op.name;
  }
}

TEST(Sweep, FindsAPlantedError) {
  const SweepOptions options{.device = Device::cpu(), .count = 5};
  for (const Record& record : sweep_op(ops::find_op("relu"), options)) {
    EXPECT_EQ(record.sweep.verdict, "ok");
    EXPECT_GT(record.ms.p50, 0);
  }
  int wrong = 0;
  const auto records = sweep_op(planted(false), options);
  for (const Record& record : records)
    wrong += record.mode == "fwd" && record.sweep.verdict.starts_with("y: error 1");
  EXPECT_EQ(wrong, 5);
  EXPECT_NE(format_wrong(records).find("WRONG relu"), std::string::npos);
}

TEST(Sweep, FindsAPlantedErrorOnAGpuBesideTheF32Kernels) {
  if (Device::cuda_count() == 0) GTEST_SKIP() << "skipped: no GPU";
  const SweepOptions options{.device = Device::cuda(0), .count = 40};
  for (const Record& record : sweep_op(ops::find_op("relu"), options)) EXPECT_EQ(record.sweep.verdict, "ok");
  int large = 0;
  for (const Record& record : sweep_op(planted(true), options)) {
    if (record.mode == "fwd") EXPECT_NE(record.sweep.verdict, "ok") << record.sweep.checked;
    large += record.sweep.checked == "f32 kernels";
  }
  EXPECT_GT(large, 10);
}

TEST(Sweep, WhatThrowsIsAWrongResultWithoutTimes) {
  ops::OpSpec op = ops::find_op("relu");
  op.run = [run = op.run](const std::vector<Tensor>& in, const ops::Attrs& attrs) {
    check(in[0].size(0) % 2 == 0, "relu: planted");
    return run(in, attrs);
  };
  int threw = 0, ran = 0;
  for (const Record& record : sweep_op(op, {.device = Device::cpu(), .count = 20})) {
    const Record read = from_json(to_json(record));  // it survives a file
    (read.sweep.verdict == "ok" ? ran : threw) += 1;
    EXPECT_EQ(read.ms.p50 > 0, read.sweep.verdict == "ok");
  }
  EXPECT_GT(threw, 0);
  EXPECT_GT(ran, 0);
}

TEST(Sweep, AnOperatorThatRefusesATapeIsMeasuredForward) {
  const std::vector<Record> records =
      sweep_op(ops::find_op("sparse_linear"), {.device = Device::cpu(), .count = 2});
  EXPECT_EQ(records.size(), 2);
  for (const Record& record : records) {
    EXPECT_EQ(record.sweep.verdict, "ok");
    EXPECT_EQ(record.mode, "fwd");
  }
}

Record timed(double ms, int64_t number, const char* implementation = "tessera") {
  Record record;
  record.op = "relu", record.dtype = "bf16", record.mode = "fwd", record.device = "cuda:0";
  record.implementation = implementation;
  record.shape = {{"R", 7 + number}};
  record.ms = {ms, ms, ms, 5};
  record.sweep = {number, "f64 oracle", 0.5, "ok"};
  return record;
}

TEST(Compare, CountsSlowShapesAndNamesTheWorst) {
  std::vector<Record> ours, theirs;
  for (int64_t i = 0; i < 20; ++i) {
    ours.push_back(timed(i < 3 ? 2.0 + double(i) : 1.0, i));
    theirs.push_back(timed(1.0, i, "torch eager"));
    theirs.push_back(timed(0.8, i, "torch padded"));
    theirs.back().sweep = {};  // peers have no verdicts
  }
  const std::string text = format_sweep(compare(ours, theirs));
  EXPECT_NE(text.find("relu   fwd         20                 3       0.80x      0.20x"), std::string::npos)
      << text;
  EXPECT_NE(text.find("the slowest next to their peers, 3 of 3"), std::string::npos) << text;
  EXPECT_LT(text.find("R=9"), text.find("R=8")) << text;
  EXPECT_EQ(format_comparison(compare(ours, theirs)), "");
  const std::string eager = format_sweep(compare(ours, theirs, {.peer = "eager$"}));
  EXPECT_NE(eager.find("1.00x      0.25x"), std::string::npos) << eager;
}

}  // namespace
}  // namespace tessera::bench
