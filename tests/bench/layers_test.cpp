#include "bench/layers_bench.h"

#include "bench/compare.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "nn/linear.h"
#include "ops/reduce/reduce.h"
#include "tests/bench/once.h"

namespace tessera::bench {
namespace {

/// A pass of a model of two layers, by hand: forward, then backward of the same entries.
PassTimes pass_of(const std::vector<std::pair<const char*, const char*>>& ops, double ms) {
  PassTimes pass;
  double now = 0;
  for (size_t i = 0; i < ops.size(); ++i) {
    pass.forward.push_back({ops[i].first, ops[i].second, i, now, ms});
    now += ms;
  }
  for (size_t i = ops.size(); i-- > 0;) {
    pass.backward.push_back({ops[i].first, ops[i].second, i, now, 2 * ms});
    now += 2 * ms;
  }
  return pass;
}

const std::vector<std::pair<const char*, const char*>> kFused = {
    {"embedding", "token"},
    {"add", ""},
    {"add_layernorm", "norm"},
    {"linear", "blocks.0.attention.qkv"},
    {"attention", "blocks.0.attention"},
    {"linear", "blocks.0.attention.out"},
    {"add_layernorm", "blocks.0.norm1"},
    {"mlp", "blocks.0.mlp"},
    {"add_layernorm", "blocks.0.norm2"},
    {"gather_rows", "blocks.1"},
    {"linear", "blocks.1.mlp.up"},
    {"gelu", "blocks.1.mlp"},
    {"linear", "blocks.1.mlp.down"},
    {"linear", "classifier.dense"},
    {"cross_entropy", ""},
};

TEST(LayersBench, EveryOperatorCountsForItsLayerAndItsKindOnce) {
  const std::vector<PassTimes> repeats{pass_of(kFused, 1), pass_of(kFused, 5), pass_of(kFused, 2)};
  const auto times = part_times(repeats);
  const auto median = [&](const char* layer, const char* kind) {
    const auto found = times.find({layer, kind});
    EXPECT_NE(found, times.end()) << layer << ", " << kind;
    if (found == times.end()) return -1.0;
    EXPECT_EQ(found->second.backward.p50, 2 * found->second.forward.p50) << layer << ", " << kind;
    EXPECT_EQ(found->second.forward.repeats, 3);
    return found->second.forward.p50;
  };
  EXPECT_EQ(median("all", "all"), 2 * 15);
  EXPECT_EQ(median("embeddings", "all"), 2 * 3) << "what no layer is named for before the blocks, too";
  EXPECT_EQ(median("0", "all"), 2 * 6);
  EXPECT_EQ(median("1", "all"), 2 * 4);
  EXPECT_EQ(median("head", "all"), 2 * 2) << "and after them";
  EXPECT_EQ(median("all", "query/key/value"), 2 * 1);
  EXPECT_EQ(median("all", "attention"), 2 * 2);
  EXPECT_EQ(median("all", "attention output"), 2 * 1);
  EXPECT_EQ(median("all", "norms"), 2 * 2);
  EXPECT_EQ(median("all", "feed-forward"), 2 * 4) << "fused or not";
  EXPECT_EQ(median("0", "feed-forward"), 2 * 1);
  EXPECT_EQ(median("1", "feed-forward"), 2 * 3);
  EXPECT_EQ(median("1", "intermediate"), 2 * 1);
  EXPECT_EQ(median("1", "activation"), 2 * 1);
  EXPECT_EQ(median("1", "output"), 2 * 1);
  EXPECT_FALSE(times.contains({"0", "intermediate"}));
}

TEST(LayersBench, PartsComeInTheOrderOfTheModel) {
  PassTimes pass;
  pass.forward.push_back({"embedding", "token", 0, 0, 1});
  for (size_t i = 0; i < 11; ++i) {
    static const std::string names[] = {"blocks.0.norm1", "blocks.1.norm1", "blocks.2.norm1",
                                        "blocks.3.norm1", "blocks.4.norm1", "blocks.5.norm1",
                                        "blocks.6.norm1", "blocks.7.norm1", "blocks.8.norm1",
                                        "blocks.9.norm1", "blocks.10.norm1"};
    pass.forward.push_back({"add_layernorm", names[i].c_str(), i + 1, double(i) + 1, 1});
  }
  pass.forward.push_back({"linear", "classifier.out", 12, 12, 1});
  std::vector<std::string> layers, kinds;
  for (const Part& part : in_order(part_times({pass}))) {
    if (part.kind == kAllParts) layers.push_back(part.layer);
    if (part.layer == kAllParts) kinds.push_back(part.kind);
  }
  EXPECT_EQ(layers, (std::vector<std::string>{"all", "embeddings", "0", "1", "2", "3", "4", "5", "6", "7",
                                              "8", "9", "10", "head"}));
  EXPECT_EQ(kinds, (std::vector<std::string>{"all", "embeddings", "norms", "head"}));
}

TEST(PassTimer, TimesOfAllOperatorsFollowEachOther) {
  Rng rng(1);
  const nn::Linear up(8, 16, rng), down(16, 8, rng);
  const Tensor x = Tensor::full({4, 8}, 0.5, DType::f32, Device::cpu());
  PassTimer timer(Device::cpu());
  for (int pass = 0; pass < 2; ++pass) {
    const PassTimes times = timer([&] { return ops::sum(down(up(x))); });
    ASSERT_EQ(times.forward.size(), 3u);
    ASSERT_EQ(times.backward.size(), 3u);
    double now = 0;
    size_t entry = 0;
    for (const TimedOp& op : times.forward) {
      EXPECT_EQ(op.entry, entry++);
      EXPECT_DOUBLE_EQ(op.begin_ms, now);
      EXPECT_GE(op.ms, 0);
      now = op.begin_ms + op.ms;
    }
    for (const TimedOp& op : times.backward) {
      EXPECT_EQ(op.entry, --entry);
      EXPECT_STREQ(op.op, times.forward[op.entry].op);
      EXPECT_DOUBLE_EQ(op.begin_ms, now);
      now = op.begin_ms + op.ms;
    }
    EXPECT_GT(now, 0);
  }
  EXPECT_THROW(timer([&] { return ops::sum(x); }), Error) << "nothing is recorded";
}

LayersBenchOptions small_options() {
  LayersBenchOptions options;
  options.device = Device::cpu();
  options.timer = kOnce;
  options.timer.least = options.timer.most = 3;
  options.model = {.vocabulary = 30,
                   .positions = 16,
                   .d_model = 8,
                   .d_ff = 16,
                   .heads = 2,
                   .layers = 2,
                   .hidden_dropout = 0.1,
                   .attention_dropout = 0.1,
                   .classifier_dropout = 0.1};
  options.batch = 3, options.max_length = 8;
  options.slice.mode = "importance", options.slice.rows = "25%";
  return options;
}

std::vector<std::string> layers_of(const PassTimes& pass) {
  std::vector<std::string> layers;
  for (const TimedOp& op : pass.forward)
    if (std::string_view(op.layer).find(".mlp") != std::string_view::npos) layers.emplace_back(op.layer);
  return layers;
}

/// A layer that is sliced by itself is called by itself, so what ran tells which model is which.
TEST(LayersBench, TheOriginalIsDenseAndTheModifiedModelSliced) {
  LayersBenchOptions options = small_options();
  options.slice.layers = "encoder.layer.1.output.dense";
  const auto all = bench_layers(options);
  ASSERT_EQ(all.size(), 1u);
  const LayersComparison& one = all[0];
  ASSERT_TRUE(one.modified.has_value());
  EXPECT_EQ(one.original.repeats.size(), 3u);
  EXPECT_EQ(one.modified->repeats.size(), 3u);
  EXPECT_EQ(one.original.tokens, 24);
  for (const PassTimes& pass : one.original.repeats)
    EXPECT_EQ(layers_of(pass), (std::vector<std::string>{"blocks.0.mlp", "blocks.1.mlp"}));
  for (const PassTimes& pass : one.modified->repeats)
    EXPECT_EQ(layers_of(pass), (std::vector<std::string>{"blocks.0.mlp", "blocks.1.mlp.up", "blocks.1.mlp",
                                                         "blocks.1.mlp.down"}));
}

TEST(LayersBench, UnfusedLayersOfAFeedForwardNetworkHaveTimesOfTheirOwn) {
  LayersBenchOptions options = small_options();
  const auto fused = bench_layers(options);
  options.unfused = true;
  const auto all = bench_layers(options);
  for (const LayersRun* const run : {&all[0].original, &*all[0].modified}) {
    const auto times = part_times(run->repeats);
    for (const char* kind : {"intermediate", "activation", "output", "feed-forward"})
      EXPECT_TRUE(times.contains({"1", kind})) << kind;
  }
  EXPECT_FALSE(part_times(fused[0].original.repeats).contains({"1", "intermediate"}));
  EXPECT_TRUE(part_times(fused[0].modified->repeats).contains({"1", "feed-forward"}));
}

TEST(LayersBench, ARobertaHasTheSameParts) {
  LayersBenchOptions options = small_options();
  options.model.family = models::BertFamily::roberta;
  options.model.types = 1, options.model.pad_token = 1;
  options.slice.mode = "none", options.slice.rows = "";
  const auto all = bench_layers(options);
  EXPECT_FALSE(all[0].modified.has_value());
  const auto times = part_times(all[0].original.repeats);
  for (const char* layer : {"all", "embeddings", "0", "1", "head"})
    EXPECT_TRUE(times.contains({layer, kAllParts})) << layer;
  const report::Table table = layers_table(all);
  EXPECT_EQ(std::get<std::string>(table.rows.at(0).at(1)), kAllParts);
  EXPECT_TRUE(std::holds_alternative<std::monostate>(table.rows.at(0).at(4))) << "there is no modified model";
  EXPECT_EQ(layers_records(options, all).at(0).op, "layers roberta");
}

TEST(LayersBench, AnotherModelIsOtherWork) {
  LayersBenchOptions options = small_options();
  options.slice.mode = "none", options.slice.rows = "";
  const auto record = [&] { return layers_records(options, bench_layers(options)).at(0); };
  const Record small = record();
  EXPECT_EQ(small.shape.at("d"), 8);
  EXPECT_EQ(small.shape.at("heads"), 2);
  EXPECT_EQ(small.attrs.at("dropout"), "0.1");
  const auto is_other = [&] { return compare({small}, {record()}).empty(); };
  EXPECT_FALSE(is_other());
  options.model.layers = 1;
  EXPECT_TRUE(is_other());
  options.model.layers = 2, options.model.hidden_dropout = 0;
  EXPECT_TRUE(is_other());
  // A record without sizes is of the published model.
  LayersComparison usual;
  usual.original = {.task = "sst2", .slice = "", .repeats = {pass_of(kFused, 1)}, .tokens = 9, .batch = 3};
  for (const models::BertFamily family : {models::BertFamily::bert, models::BertFamily::roberta}) {
    options.model.family = family, usual.original.config = base_model(family);
    EXPECT_EQ(layers_records(options, {usual}).at(0).shape,
              (std::map<std::string, int64_t>{{"B", 3}, {"tokens", 9}}));
  }
}

TEST(LayersBench, TheTableHasTheColumnsOfPublishedComparisons) {
  LayersComparison one;
  one.original = {.task = "sst2", .slice = "", .repeats = {pass_of(kFused, 1)}, .tokens = 9, .batch = 3};
  one.modified = one.original;
  one.modified->slice = "random 10%";
  one.modified->repeats = {pass_of(kFused, 1)};
  for (TimedOp& op : one.modified->repeats[0].backward) op.ms /= 4;
  const report::Table table = layers_table({one});
  EXPECT_EQ(table.columns,
            (std::vector<std::string>{"Task", "Layer", "Kind", "Original Forward (ms)",
                                      "Modified Forward (ms)", "Forward Speedup", "Original Backward (ms)",
                                      "Modified Backward (ms)", "Backward Speedup"}));
  const std::vector<report::TableCell> whole{"sst2", "all", "all", 15.0, 15.0, 1.0, 30.0, 7.5, 4.0};
  EXPECT_EQ(table.rows.at(0), whole);
  const auto records = layers_records(small_options(), {one});
  ASSERT_EQ(records.size(), 4 * table.rows.size()) << "forward and backward of both models";
  EXPECT_EQ(records[1].mode, "bwd");
  EXPECT_EQ(records[1].ms.p50, 30);
  EXPECT_FALSE(records[1].attrs.contains("slice"));
  EXPECT_EQ(records.back().attrs.at("slice"), "random 10%");
}

TEST(LayersBench, TheTextNamesTheOperatorsThatTakeLongest) {
  LayersComparison one;
  one.original = {.task = "rte", .slice = "", .repeats = {pass_of(kFused, 1)}, .tokens = 9, .batch = 3};
  const std::string text = layers_text(one, 2);
  // 5 calls of linear in a pass: 10 of 45 ms backward, 5 forward; so do 3 of add_layernorm take 6.
  const size_t linear = text.find("linear"), norm = text.find("add_layernorm");
  EXPECT_LT(linear, norm) << text;
  EXPECT_NE(text.find("10.000"), std::string::npos) << text;
  EXPECT_NE(text.find("22.2 %"), std::string::npos) << text;
  EXPECT_EQ(text.find("cross_entropy"), std::string::npos) << "two operators only: " << text;
}

TEST(LayersBench, TheTraceIsOfTheMedianPassAndNestsOperatorsInLayers) {
  LayersComparison one;
  one.original = {.task = "sst2", .slice = "", .tokens = 9, .batch = 3};
  for (const double ms : {4.0, 1.0, 2.0}) one.original.repeats.push_back(pass_of(kFused, ms));
  one.modified = one.original;
  one.modified->slice = "random 10%";
  const nlohmann::json trace = nlohmann::json::parse(layers_trace({one}).dump());
  EXPECT_EQ(trace.at("displayTimeUnit"), "ms");
  std::map<int, std::string> processes;
  std::map<int, double> ends;
  double layer_begin = 0, layer_end = 0, now = 0;
  int operators = 0;
  std::vector<std::string> layers;
  for (const auto& event : trace.at("traceEvents")) {
    const int process = event.at("pid");
    if (event.at("ph") == "M") {
      processes[process] = event.at("args").at("name");
      layer_end = now = 0;
      continue;
    }
    ASSERT_EQ(event.at("ph"), "X");
    const double begin = event.at("ts"), end = begin + event.at("dur").get<double>();
    if (!event.contains("args")) {  // a layer
      EXPECT_DOUBLE_EQ(begin, layer_end) << "layers follow each other";
      layer_begin = begin, layer_end = end;
      if (process == 0 && event.at("cat") == "forward") layers.push_back(event.at("name"));
      continue;
    }
    operators += 1;
    EXPECT_GE(begin, layer_begin);
    EXPECT_LE(end, layer_end + 1e-6);
    EXPECT_DOUBLE_EQ(begin, now) << "operators do";
    now = end;
    ends[process] = end;
    EXPECT_FALSE(event.at("args").at("kind").get<std::string>().empty());
  }
  EXPECT_EQ(layers, (std::vector<std::string>{"embeddings", "layer 0", "layer 1", "head"}));
  EXPECT_EQ(operators, 2 * 30);
  EXPECT_EQ(ends[0], 45 * 2 * 1e3) << "microseconds of the pass of 2 ms per operator";
  EXPECT_EQ(processes,
            (std::map<int, std::string>{{0, "sst2: original"}, {1, "sst2: modified, random 10%"}}));
}

TEST(LayersBench, RefusesWhatMakesNoSense) {
  const auto message = [](auto&& change) {
    LayersBenchOptions options = small_options();
    change(options);
    try {
      bench_layers(options);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_NE(message([](auto& o) { o.tasks = {"sst2"}; }).find("--data"), std::string::npos);
  EXPECT_NE(message([](auto& o) { o.data = "glue"; }).find("--task"), std::string::npos);
  EXPECT_NE(message([](auto& o) { o.tasks = {"sst2"}, o.data = "glue"; }).find("--model"), std::string::npos);
  EXPECT_NE(message([](auto& o) { o.max_length = 17; }).find("--max-length"), std::string::npos);
  EXPECT_NE(message([](auto& o) { o.slice.layers = "h.*"; }).find("h.*"), std::string::npos);
  EXPECT_NE(message([](auto& o) { o.slice.rows = "150%"; }), "");
  EXPECT_THROW(part_times({}), Error);
}

}  // namespace
}  // namespace tessera::bench
