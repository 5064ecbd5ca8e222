#include "bench/op_bench.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "bench/default_sizes.h"
#include "bench/sweep.h"
#include "tests/bench/once.h"
#include "tests/ops/example_op.h"

namespace tessera::bench {
namespace {

TEST(RandomInputs, HaveTheirDTypesAndMakeOthersFromThem) {
  const ops::OpSpec op = ops::example_op();
  const ops::Attrs attrs = ops::complete(op, {});
  ops::Problem problem = op.problem({{"R", 500}, {"C", 8}}, attrs);
  problem.inputs[0].density = 0.25;
  for (const DType dtype : {DType::bf16, DType::f32}) {
    const auto inputs = random_inputs(op, problem, attrs, dtype, Device::best());
    ops::check_inputs(op, inputs);
    EXPECT_EQ(inputs[0].dtype(), dtype);
    // 4000 elements, within 6 standard deviations.
    EXPECT_NEAR(double(std::ranges::count(inputs[0].to_vector<double>(), 0.0)), 3000, 165);
    for (const double value : inputs[0].to_vector<double>())
      EXPECT_FALSE(value == 0 && std::signbit(value)) << "formats of sparse weights store -0";
    const auto weights = inputs[1].to_vector<uint8_t>();
    EXPECT_EQ(std::ranges::max(weights), 3);
    EXPECT_EQ(inputs[2].to_vector<int32_t>(), ops::rows_of_weights(inputs[1])[0].to_vector<int32_t>());
  }
}

TEST(RandomInputs, SuitEveryOperator) {
  for (const ops::OpSpec& op : ops::all_ops())
    for (const ops::Case& c : op.cases) {
      const ops::Attrs attrs = ops::complete(op, c.attrs);
      const ops::Problem problem = op.problem(c.dims, attrs);
      const bool empty = std::ranges::any_of(
          problem.inputs, [](const ops::InputCase& input) { return input.shape.count() == 0; });
      if (empty || !c.gradcheck) continue;
      SCOPED_TRACE(op.name);
      const auto inputs = random_inputs(op, problem, attrs, op.cpu_dtypes.back(), Device::cpu());
      ops::check_inputs(op, inputs);
      EXPECT_NO_THROW(op.run(inputs, attrs));
    }
}

TEST(OpBench, TimesAndSweepsBytesDerivedInputsAndRandomNumbers) {
  const ops::OpSpec op = ops::example_op();
  OpBenchOptions options;
  options.device = Device::cpu();
  options.timer = kOnce;
  const auto records = bench_op(op, options);
  ASSERT_EQ(records.size(), 2u);
  for (const Record& record : records) EXPECT_GT(record.ms.p50, 0) << record.mode;
  for (const Record& record : sweep_op(op, {.device = Device::best(), .count = 8, .timer = kOnce}))
    EXPECT_EQ(record.sweep.verdict, "ok");
}

TEST(SlowDefaultCases, OfEveryOperatorSuitACpu) {
  for (const ops::OpSpec& op : ops::all_ops()) {
    SCOPED_TRACE(op.name);
    const std::vector<ops::Case> cases = default_cases(op, Device::cpu());
    EXPECT_EQ(cases.empty(), op.benches.empty());
    for (const ops::Case& c : cases) {
      const ops::Attrs attrs = ops::complete(op, c.attrs);
      const ops::Problem problem = op.problem(c.dims, attrs);
      SCOPED_TRACE(work_text(describe_work(op, c, DType::f32, Device::cpu(), "fwd")));
      EXPECT_LT(problem.forward_flops, 1e10);
      EXPECT_LT(4 * problem.forward_elements + problem.forward_bytes, 2e8);
    }
    if (cases.empty()) continue;
    OpBenchOptions options;
    options.cases = {cases.front()};
    options.modes = {"fwd"};
    options.timer = kOnce;
    EXPECT_NO_THROW(bench_op(op, options));
  }
}

TEST(DefaultCases, KeepSquaresAndTheOrderOfSizesAndOfAttributes) {
  ops::OpSpec op = ops::find_op("keep_largest");
  op.cpu_benches = {};
  op.benches = {{.dims = {{"R", 4096}, {"C", 4096}},
                 .attrs = {{"within", std::string("row")}, {"zeros", int64_t{2048}}}},
                {.dims = {{"R", 8192}, {"C", 8192}},
                 .attrs = {{"within", std::string("row")}, {"zeros", int64_t{4096}}}}};
  const std::vector<ops::Case> cases = default_cases(op, Device::cpu());
  ASSERT_EQ(cases.size(), 1u) << "both become the same problem";
  EXPECT_EQ(cases[0].dims, (ops::Dims{{"R", 2048}, {"C", 2048}}));
  EXPECT_EQ(cases[0].attrs.integer("zeros"), 1024);
  op.cpu_benches = {{.dims = {{"R", 3}, {"C", 4}}}};
  EXPECT_EQ(default_cases(op, Device::cpu())[0].dims, op.cpu_benches[0].dims);
}

TEST(OpBench, TellsEachRecordBeforeTheNextIsMeasured) {
  std::vector<std::string> told;
  OpBenchOptions options;
  options.cases = {{.dims = {{"R", 2}, {"C", 3}}}, {.dims = {{"R", 4}, {"C", 3}}}};
  options.timer = kOnce;
  options.listener = {.on_begin = [&](const std::string& what) { told.push_back("begin " + what); },
                      .on_record = [&](const Record& record) { told.push_back(work_text(record)); }};
  const ops::OpSpec& op = ops::find_op("softmax");
  const std::vector<Record> planned = planned_records(op, options), records = bench_op(op, options);
  ASSERT_EQ(planned.size(), 4u);
  ASSERT_EQ(told.size(), 8u);
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(told[2 * i], "begin " + work_text(planned[i]));
    EXPECT_EQ(told[2 * i + 1], work_text(planned[i]));
  }
}

TEST(RecordTable, KeepsTheColumnsOfWhatIsExpected) {
  Record wide, narrow;
  wide.op = narrow.op = "softmax";
  wide.shape = {{"C", 123456789}}, narrow.shape = {{"C", 1}};
  RecordTable table({narrow, wide});
  const std::string first = table.row(narrow), second = table.row(wide);
  EXPECT_EQ(std::ranges::count(first, '\n'), 2) << "header and row";
  EXPECT_EQ(std::ranges::count(second, '\n'), 1);
  EXPECT_EQ(first.size() - first.find('\n') - 1, second.size());
}

TEST(OpBench, SaysThatTheCacheWasWarm) {
  const ops::OpSpec op = ops::example_op();
  OpBenchOptions options;
  options.device = Device::cpu();
  options.timer = kOnce;
  for (const bool cold : {false, true}) {
    options.timer.cold = cold;
    for (const Record& record : bench_op(op, options)) EXPECT_EQ(record.attrs.contains("L2"), !cold);
  }
}

TEST(OpBench, AnOperatorWithoutFloatingInputsIsTimedInItsDType) {
  const ops::OpSpec op{.name = "widened_words",
                       .summary = "y = x as i64",
                       .inputs = {{.name = "x", .shape = "[W]", .dtypes = {DType::i32}}},
                       .outputs = {{"y", "[W]", false, {DType::i64}}},
                       .cpu_dtypes = {DType::i32},
                       .cuda_dtypes = {DType::i32},
                       .run = [](const std::vector<Tensor>& in,
                                 const ops::Attrs&) { return std::vector{in[0].to(DType::i64)}; },
                       .problem =
                           [](const ops::Dims& d, const ops::Attrs&) {
                             return ops::Problem{.inputs = {{.shape = {d.at("W")},
                                                             .fill = ops::Fill::bits,
                                                             .high = 32 * d.at("W"),
                                                             .density = 0.5}},
                                                 .forward_elements = double(d.at("W")),
                                                 .forward_bytes = 8 * double(d.at("W"))};
                           },
                       .benches = {{.dims = {{"W", 16}}}}};
  OpBenchOptions options;
  options.device = Device::cpu();
  options.modes = {"fwd"};
  options.precisions = {DType::bf16, DType::f16};  // as asked of operators in general
  options.timer = kOnce;
  const auto records = bench_op(op, options);
  ASSERT_EQ(records.size(), 1u);
  EXPECT_EQ(records[0].dtype, "i32");
  EXPECT_EQ(records[0].bytes, 16 * (4 + 8));
  EXPECT_EQ(precisions_of(op, {}, Device::cpu()), std::vector{Precision(DType::i32)});
  EXPECT_EQ(precisions_of(ops::example_op(), options.precisions, Device::cpu()), options.precisions);
  EXPECT_EQ(precisions_of(ops::example_op(), {}, Device::cpu()), std::vector{Precision(DType::f32)});
}

}  // namespace
}  // namespace tessera::bench
