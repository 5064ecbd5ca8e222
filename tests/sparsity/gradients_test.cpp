#include "sparsity/gradients.h"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "autograd/tape.h"
#include "datasets/glue_synthetic.h"
#include "eval/bert_batch.h"
#include "io/file.h"
#include "ops/gather/gather.h"
#include "pretrained/load.h"
#include "sparsity/gradient_tasks.h"
#include "tests/errors.h"
#include "tests/folder.h"
#include "tests/tensors.h"
#include "train/glue_job.h"
#include "train/tokenizer_files.h"

namespace tessera::sparsity {
namespace {

namespace fs = std::filesystem;
using datasets::GlueTask;

// ---- figures of one gradient ----

TEST(GradientFigures, CountsWhatItsDefinitionSays) {
  // Two modules of three and of one column; row 1 is zeros in the first, row 2 nearly so.
  const std::vector<float> dy = {
      3,     0,    4,      9,  //
      0,     0,    0,      9,  //
      1e-6f, 0,    0,      9,  //
      0,     0.5f, -0.25f, 0   //
  };
  GradientOptions options{.top = {TopRows::parse("1"), TopRows::parse("50%"), TopRows::parse("9")}};
  const GradientFigures all = gradient_figures("m", dy, 4, 0, 3, nullptr, 10, options);
  EXPECT_EQ(all.read_rows, 4);
  EXPECT_EQ(all.all_rows, 10);
  EXPECT_DOUBLE_EQ(all.zero_elements_read, 7.0 / 12);
  EXPECT_DOUBLE_EQ(all.zero_elements, (7.0 + 6 * 3) / 30);
  EXPECT_DOUBLE_EQ(all.zero_rows_read, 1.0 / 4);
  EXPECT_DOUBLE_EQ(all.zero_rows, 7.0 / 10);
  const double small = double(1e-6f) * double(1e-6f), rest = 0.25 + 0.0625;
  ASSERT_EQ(all.energy.size(), 3u);
  EXPECT_DOUBLE_EQ(all.energy[0], 25 / (25 + rest + small));
  EXPECT_DOUBLE_EQ(all.energy[1], (25 + rest) / (25 + rest + small));
  EXPECT_DOUBLE_EQ(all.energy[2], 1);
  EXPECT_EQ(all.magnitudes.zeros(), 7);
  EXPECT_EQ(all.magnitudes.count(1), 1);    // 3
  EXPECT_EQ(all.magnitudes.count(2), 1);    // 4
  EXPECT_EQ(all.magnitudes.count(-1), 1);   // 0.5
  EXPECT_EQ(all.magnitudes.count(-2), 1);   // 0.25
  EXPECT_EQ(all.magnitudes.count(-20), 1);  // 1e-6
  EXPECT_EQ(all.magnitudes.all(), 12);

  options.tolerance = 0.25;
  const GradientFigures loose = gradient_figures("m", dy, 4, 0, 3, nullptr, 4, options);
  EXPECT_DOUBLE_EQ(loose.zero_elements, 9.0 / 12);
  EXPECT_DOUBLE_EQ(loose.zero_rows, 2.0 / 4);
  EXPECT_EQ(loose.magnitudes.zeros(), 7);

  const std::vector<int64_t> read = {0, 3};
  const GradientFigures some = gradient_figures("m", dy, 4, 3, 1, &read, 4, {});
  EXPECT_EQ(some.read_rows, 2);
  EXPECT_EQ(some.squares, (std::vector<double>{81, 0}));
  EXPECT_DOUBLE_EQ(some.zero_elements_read, 0.5);
  EXPECT_DOUBLE_EQ(some.zero_elements, 0.25);
  EXPECT_EQ(some.magnitudes.all(), 2);
}

TEST(GradientFigures, ZerosAloneHaveNoShareOfEnergy) {
  const GradientFigures none =
      gradient_figures("m", std::vector<float>(6, 0.0f), 2, 0, 2, nullptr, 3, {.top = {TopRows::parse("1")}});
  EXPECT_TRUE(none.energy.empty());
  EXPECT_EQ(none.zero_rows, 1);
  ModuleGradient module{.name = "m"};
  module.energy.resize(1);
  module.add(none);
  EXPECT_EQ(module.energy[0].batches, 0);
  EXPECT_TRUE(std::isnan(module.energy[0].mean()));
  EXPECT_EQ(module.zero_rows.batches, 1);
}

TEST(GradientFigures, RefuseWhatIsNotFinite) {
  const std::string says = message_of([] {
    gradient_figures("layer.output", {1, 2, 3, NAN}, 2, 0, 2, nullptr, 2, GradientOptions{});
  });
  EXPECT_NE(says.find("layer.output: row 1"), std::string::npos) << says;
  EXPECT_NE(says.find("not finite"), std::string::npos) << says;
}

TEST(GradientFigures, TopRowsAreANumberOrAShare) {
  EXPECT_EQ(TopRows::parse("20").of(7), 7);
  EXPECT_EQ(TopRows::parse("20").of(70), 20);
  EXPECT_EQ(TopRows::parse("10%").of(39), 3);
  EXPECT_EQ(TopRows::parse("10%").of(3), 1);
  EXPECT_EQ(TopRows::parse("2.5%").text(), "2.5%");
  for (const char* bad : {"", "0", "-1", "0%", "101%", "1.5", "5 %", "many", "%", "10%%", "nan%"})
    EXPECT_NE(message_of([&] { TopRows::parse(bad); }).find("as 50, or a share, as 10%"), std::string::npos)
        << bad;
}

TEST(GradientFigures, OverBatches) {
  OverBatches a, b;
  EXPECT_TRUE(std::isnan(a.mean()));
  a.add(3), a.add(1), b.add(8);
  a.add(b), a.add(OverBatches());
  EXPECT_EQ(a.batches, 3);
  EXPECT_EQ(a.mean(), 4);
  EXPECT_EQ(a.least, 1);
  EXPECT_EQ(a.largest, 8);
}

TEST(GradientFigures, MagnitudesBeyondTheRangeAreInItsEnds) {
  Binades binades;
  for (const double value : {0x1p-100, 0x1p-64, 0x1.8p-64, 0x1p15, 0x1p40, 0.0}) binades.add(value);
  EXPECT_EQ(binades.count(-64), 3);
  EXPECT_EQ(binades.count(15), 2);
  EXPECT_EQ(binades.zeros(), 1);
  EXPECT_EQ(binades.all(), 6);
}

// ---- models ----

/// A model directory and the files of two tasks.
struct Made {
  explicit Made(models::BertFamily family = models::BertFamily::bert, double dropout = 0) {
    const std::string root = folder.path();
    for (const GlueTask task : {GlueTask::sst2, GlueTask::stsb})
      datasets::write_synthetic_glue(task, root, {.train = 24, .dev = 9, .test = 4});
    const std::string text = train::train_glue_tokenizer(GlueTask::sst2, root, 400);
    tokenizer.emplace(io::Tokenizer::parse("made", text));
    Rng rng(7);
    models::BertConfig config{.family = family,
                              .vocabulary = tokenizer->vocab_size(),
                              .positions = 48,
                              .types = family == models::BertFamily::roberta ? 1 : 2,
                              .d_model = 16,
                              .d_ff = 32,
                              .heads = 2,
                              .layers = 2,
                              .hidden_dropout = dropout,
                              .attention_dropout = dropout,
                              .head = models::BertHead::none,
                              .init_deviation = 0.2};
    pretrained::save(models::Bert(config, rng, kCpu), model());
    io::write_file(model() + "/tokenizer.json", text);
    io::write_file(model() + "/tokenizer_config.json", train::bert_tokenizer_config());
    std::string lines;
    for (int i = 0; i < 200; ++i) lines += "line " + std::to_string(i * i % 97) + " of the film\n";
    io::write_file(root + "/t.txt", lines);
  }
  std::string model() const { return folder / "model"; }
  GradientTasks tasks(std::vector<std::string> names) const {
    GradientTasks what;
    what.model = model(), what.tasks = std::move(names), what.data = folder.path();
    what.batch = 4, what.batches = 3, what.max_length = 24;
    what.options.top = {TopRows::parse("2"), TopRows::parse("10%")};
    return what;
  }
  TemporaryFolder folder;
  std::optional<io::Tokenizer> tokenizer;
};

const ModuleGradient& module_of(const TaskGradients& task, const std::string& name) {
  for (const ModuleGradient& module : task.modules)
    if (module.name.ends_with(name)) return module;
  throw std::runtime_error("no module " + name);
}

void ignore(const std::string&) {}

std::string bytes_of(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

/// Rows of zeros of each layer's gradient in a pass of a padded batch of which the last block computes all
/// rows, as another implementation runs it: what the meter says of rows that are never computed.
TEST(Gradients, RowsThatAreNotComputedAreZeroRowsOfAPaddedBatch) {
  const Made made;
  const datasets::GlueItems items(datasets::GlueData(GlueTask::sst2, made.folder.path(), "train"),
                                  *made.tokenizer, {.max_length = 24, .packed = true});
  Rng rng(1);
  models::Bert model = pretrained::load_bert(made.model(), rng, kCpu,
                                             {.config = {.head = models::BertHead::classify, .labels = 2}});
  const datasets::GlueBatch batch = items.batch(std::vector<int64_t>{0, 5, 2, 9});
  const models::BertBatch packed = eval::bert_batch(batch, model.config, 0, kCpu),
                          padded = eval::bert_batch(batch, model.config, 24, kCpu);
  struct Counted {
    double rows = 0, elements = 0;
  };
  std::map<std::string, Counted> counted;
  const pretrained::LinearModules modules = pretrained::linear_modules(model);
  {
    const nn::Observe scope(model, {.backward = [&](const nn::LinearCall& call, const Tensor& dy) {
                              for (const pretrained::LinearModule& module : modules.all) {
                                if (module.ours != call.name) continue;
                                const Tensor part = dy.slice(-1, module.first, module.first + module.rows);
                                const auto values = part.packed().to_vector<float>();
                                const auto columns = size_t(module.rows), rows = values.size() / columns;
                                Counted& to = counted[module.name];
                                for (size_t r = 0; r < rows; ++r) {
                                  size_t zeros = 0;
                                  for (size_t j = 0; j < columns; ++j) zeros += values[r * columns + j] == 0;
                                  to.elements += double(zeros) / double(values.size());
                                  to.rows += double(zeros == columns) / double(rows);
                                }
                              }
                            }});
    Tape tape;
    tape.backward(model.finish(ops::gather_rows(model.encode(padded), padded.first_rows), batch.labels));
  }
  for (const nn::NamedParameter& parameter : nn::parameters(model)) zero_grad(parameter.tensor);

  GradientMeter meter(model, "all", {});
  const auto first = packed.first_rows.to_vector<int64_t>();
  meter.begin({.tokens = packed.tokens.count(), .padded_rows = 4 * 24, .last_block = first});
  Tape tape;
  tape.backward(model.loss(packed, batch.labels));
  ASSERT_EQ(meter.modules().size(), 2u * 6 + 2);
  bool has_padding = false;
  for (const ModuleGradient& module : meter.modules()) {
    ASSERT_TRUE(counted.contains(module.name)) << module.name;
    EXPECT_NEAR(module.zero_rows.mean(), counted[module.name].rows, 1e-12) << module.name;
    // Products of another height round differently, but a zero stays one.
    EXPECT_NEAR(module.zero_elements.mean(), counted[module.name].elements, 2e-3) << module.name;
    EXPECT_EQ(module.zero_rows_read.mean(), 0) << module.name;
    has_padding = has_padding || module.zero_rows.mean() > 0.1;
  }
  EXPECT_TRUE(has_padding);
  const auto rows_of = [&](const std::string& name) {
    for (const ModuleGradient& module : meter.modules())
      if (module.name.ends_with(name)) return module.read_rows.mean();
    return -1.0;
  };
  EXPECT_EQ(rows_of("layer.0.output.dense"), double(packed.tokens.count()));
  EXPECT_EQ(rows_of("layer.1.attention.self.query"), 4);
  EXPECT_EQ(rows_of("layer.1.attention.self.key"), double(packed.tokens.count()));
  EXPECT_EQ(rows_of("layer.1.attention.output.dense"), 4);
  EXPECT_EQ(rows_of("layer.1.output.dense"), 4);
  EXPECT_EQ(rows_of("classifier"), 4);
}

/// The first batch, dropout and new head are those of a training run with the same seed.
TEST(Gradients, AreThoseOfTheFirstStepOfTraining) {
  const Made made(models::BertFamily::bert, 0.1);
  GradientTasks what = made.tasks({"sst2"});
  what.batches = 1, what.seed = 11;
  const auto measured = measure_gradients(what, kCpu, ignore);
  ASSERT_EQ(measured.size(), 1u);
  EXPECT_EQ(measured[0].fresh.size(), 4u);  // the classifier's weights and biases

  train::GlueSettings job;
  job.task = "sst2", job.data = what.data, job.model = what.model, job.seed = 11;
  job.bert = train::bert_config("c", io::read_file(what.model + "/config.json", 1 << 20), GlueTask::sst2);
  job.batch = 4, job.max_length = 24, job.steps = 5;
  const train::GlueSet set = train::read_glue(GlueTask::sst2, what.data, *made.tokenizer, 24, false);
  train::GlueJob training(job, kCpu, &set);
  training.batch(0);
  std::map<std::string, std::vector<float>> seen;
  const nn::Observe scope(training.model(), {.backward = [&](const nn::LinearCall& call, const Tensor& dy) {
                            seen[call.name] = dy.to_vector<float>();
                          }});
  Tape tape;
  const Tensor loss = training.loss();
  tape.backward(loss);
  EXPECT_EQ(loss.item<double>(), measured[0].loss);
  const ModuleGradient& down = module_of(measured[0], "layer.0.output.dense");
  const std::vector<float>& dy = seen.at("blocks.0.mlp.down");
  ASSERT_EQ(down.first_norms.size(), dy.size() / 16);
  size_t zeros = 0;
  for (size_t r = 0; r < down.first_norms.size(); ++r) {
    double square = 0;
    for (size_t j = 0; j < 16; ++j) {
      square += double(dy[r * 16 + j]) * double(dy[r * 16 + j]);
      zeros += dy[r * 16 + j] == 0;
    }
    EXPECT_EQ(down.first_norms[r], std::sqrt(square)) << r;
  }
  EXPECT_EQ(down.zero_elements_read.mean(), double(zeros) / double(dy.size()));
  EXPECT_GT(zeros, dy.size() / 20) << "dropout's masks are zeros of the gradient";
  what.dropout = false;
  const auto without = measure_gradients(what, kCpu, ignore);
  EXPECT_LT(module_of(without[0], "layer.0.output.dense").zero_elements_read.mean(), 0.01);
}

TEST(Gradients, AllTasksAreAllBatchesTogether) {
  const Made made;
  GradientTasks what = made.tasks({"sst2", "stsb"});
  what.text = {made.folder / "t.txt"};
  std::vector<std::string> lines;
  const auto all = measure_gradients(what, kCpu, [&](const std::string& line) { lines.push_back(line); });
  ASSERT_EQ(all.size(), 4u);
  EXPECT_EQ(lines.size(), 3u);
  EXPECT_EQ(all[0].name, "sst2");
  EXPECT_EQ(all[1].name, "stsb");
  EXPECT_EQ(all[2].name, "mlm");
  EXPECT_EQ(all[3].name, kAllTasks);
  EXPECT_EQ(all[3].batches, 9);
  EXPECT_EQ(all[3].tokens, all[0].tokens + all[1].tokens + all[2].tokens);
  const char* const name = "layer.1.output.dense";
  double sum = 0, least = 1;
  int64_t elements = 0;
  for (size_t t = 0; t < 3; ++t) {
    const ModuleGradient& module = module_of(all[t], name);
    EXPECT_EQ(module.zero_rows.batches, 3);
    sum += module.zero_rows.sum, least = std::min(least, module.zero_rows.least);
    elements += module.magnitudes.all();
  }
  const ModuleGradient& together = module_of(all[3], name);
  EXPECT_DOUBLE_EQ(together.zero_rows.mean(), sum / 9);
  EXPECT_EQ(together.zero_rows.least, least);
  EXPECT_EQ(together.magnitudes.all(), elements);
  // Heads are those of some tasks alone.
  EXPECT_EQ(module_of(all[3], "bert.pooler.dense").read_rows.batches, 6);
  EXPECT_EQ(module_of(all[3], "cls.predictions.transform.dense").read_rows.batches, 3);
  // A masked language model reads 15 % of the rows after the last block, and of texts of equal length none is
  // padding.
  const ModuleGradient& read = module_of(all[2], name);
  EXPECT_EQ(read.read_rows.mean(), 4 * std::llround(0.15 * 22));
  EXPECT_EQ(read.all_rows.mean(), 4 * 24);
  EXPECT_NEAR(read.zero_rows.mean(), 1 - read.read_rows.mean() / read.all_rows.mean(), 1e-12);
  EXPECT_EQ(module_of(all[2], "layer.0.output.dense").zero_rows.mean(), 0);
}

TEST(Gradients, PaddingIsWhatIsAskedFor) {
  const Made made(models::BertFamily::roberta);
  GradientTasks what = made.tasks({"sst2"});
  what.layers = "encoder.layer.0.output.dense", what.batches = 1;
  const auto rows = [&](const char* padding) {
    what.padding = parse_padding(padding);
    const auto all = measure_gradients(what, kCpu, ignore);
    EXPECT_EQ(all.at(0).modules.size(), 1u);
    EXPECT_EQ(all[0].modules[0].name, "roberta.encoder.layer.0.output.dense");
    return all[0].modules[0].all_rows.mean();
  };
  const double most = rows("max"), longest = rows("longest"), none = rows("none");
  EXPECT_EQ(most, 4 * 24);
  EXPECT_LT(longest, most);
  EXPECT_LT(none, longest);
  EXPECT_EQ(int64_t(longest) % 4, 0);
}

TEST(Gradients, FilesHoldEveryFigure) {
  const Made made;
  const GradientTasks what = made.tasks({"sst2", "stsb"});
  const auto all = measure_gradients(what, kCpu, ignore);
  const fs::path out = made.folder / "out";
  const std::string page = write_gradients(what, all, out.string());
  EXPECT_EQ(page, (out / "gradients.html").string());
  const auto read = [&](const char* name) { return bytes_of(out / name); };
  const std::string html = read("gradients.html");
  for (const char* part : {"Task sst2", "All tasks", "bert.encoder.layer.1.attention.self.key", "Heat maps",
                           "energy, top 10%", "data:image/png;base64"})
    EXPECT_NE(html.find(part), std::string::npos) << part;
  const nlohmann::json json = nlohmann::json::parse(read("gradients.json"));
  ASSERT_EQ(json.at("tasks").size(), 3u);
  const ModuleGradient& module = all[0].modules[3];
  const nlohmann::json& stored = json["tasks"][0]["modules"][3];
  EXPECT_EQ(stored.at("module"), module.name);
  EXPECT_EQ(stored.at("row_sparsity").at("max"), module.zero_rows.largest);
  EXPECT_EQ(stored.at("energy").at("10%").at("avg"), module.energy[1].mean());
  const std::string csv = read("gradients.csv");
  EXPECT_TRUE(csv.starts_with("task,module,batches,columns,rows_avg,rows_max,rows_min,"))
      << csv.substr(0, 90);
  EXPECT_EQ(size_t(std::count(csv.begin(), csv.end(), '\n')), 1 + 3 * all[0].modules.size());
  EXPECT_NE(read("energy.csv").find("sst2," + module.name + ",10%,3,"), std::string::npos);
  EXPECT_NE(read("magnitudes.csv").find("stsb," + module.name + ",0,0,"), std::string::npos);
  // The same work gives the same bytes.
  const fs::path again = made.folder / "again";
  write_gradients(what, measure_gradients(what, kCpu, ignore), again.string());
  for (const char* name : {"gradients.html", "gradients.json", "energy.csv", "magnitudes.csv"})
    EXPECT_EQ(read(name), bytes_of(again / name)) << name;
}

TEST(Gradients, RefuseWhatTheyCannotMeasure) {
  const Made made;
  const auto refused = [&](auto change) {
    GradientTasks what = made.tasks({"sst2"});
    change(what);
    return message_of([&] { measure_gradients(what, kCpu, ignore); });
  };
  const auto expect = [&](auto change, const char* part) {
    const std::string says = refused(change);
    EXPECT_NE(says.find(part), std::string::npos) << says << "\nexpected " << part;
  };
  using W = GradientTasks;
  expect([](W& w) { w.tasks.clear(), w.data.clear(); }, "nothing to measure on");
  expect([](W& w) { w.data.clear(); }, "--task needs --data");
  expect([](W& w) { w.tasks.clear(), w.text = {"t"}; }, "--data needs --task");
  expect([](W& w) { w.tasks = {"sst2", "SST-2"}; }, "given twice");
  expect([](W& w) { w.tasks = {"sst3"}; }, "did you mean");
  expect([](W& w) { w.part = "test"; }, "expected train or dev");
  expect([](W& w) { w.batch = 25; }, "24 examples, a batch takes 25");
  expect([](W& w) { w.batch = 0; }, "expected 1 or more");
  expect([](W& w) { w.max_length = 49; }, "positions for 48");
  expect([](W& w) { w.layers = "encoder.layer.7.*"; }, "no linear module");
  expect([](W& w) { w.options.tolerance = -1; }, "--tolerance");
  expect([](W& w) { w.dtype = DType::f16; }, "expected f32 or bf16");
  expect([](W& w) { w.model += "/nowhere"; }, "neither a config.json");
  expect([](W& w) { w.tasks.clear(), w.text = {w.data + "/t.txt"}, w.data.clear(), w.max_length = 2; },
         "need 3");
  expect([](W& w) { w.tasks.clear(), w.text = {w.data + "/t.txt"}, w.data.clear(), w.batch = 500; },
         "a batch takes 500");
  EXPECT_NE(message_of([] { parse_padding("some"); }).find("max, longest or none"), std::string::npos);
}

}  // namespace
}  // namespace tessera::sparsity
