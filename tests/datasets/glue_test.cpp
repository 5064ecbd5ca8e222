#include "datasets/glue.h"

#include <gtest/gtest.h>

#include <cmath>

#include "datasets/glue_batches.h"
#include "datasets/glue_submission.h"
#include "datasets/glue_synthetic.h"
#include "datasets/loader.h"
#include "io/file.h"
#include "io/tokenizer/train.h"
#include "tests/comma_locale.h"
#include "tests/folder.h"

namespace tessera::datasets {
namespace {

GlueData parse(GlueTask task, const std::string& text, bool is_test = false,
               const std::string& name = "x.tsv") {
  return GlueData::read(task, io::InputFile(name, std::span(text.data(), text.size())), is_test);
}

std::string error_of(GlueTask task, const std::string& text, const std::string& name = "x.tsv") {
  try {
    parse(task, text, false, name);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Glue, ReadsTheOfficialLayouts) {
  const GlueData cola =
      parse(GlueTask::cola, "gj04\t1\t\tOur friends won't buy this.\ngj04\t0\t*\tThey drank \"the pub.\n");
  ASSERT_EQ(cola.size(), 2);
  EXPECT_EQ(cola.first(1), "They drank \"the pub.");
  EXPECT_EQ(cola.label(0), 1);
  EXPECT_EQ(cola.label(1), 0);
  const GlueData cola_test = parse(GlueTask::cola, "index\tsentence\n0\tBill whistled.\n", true);
  EXPECT_EQ(cola_test.first(0), "Bill whistled.");
  EXPECT_FALSE(cola_test.has_labels());
  EXPECT_THROW(cola_test.label(0), Error);
  EXPECT_EQ(parse(GlueTask::sst2, "sentence\tlabel\r\nhide new secretions \t0\r\n").label(0), 0);
  const GlueData mrpc = parse(GlueTask::mrpc,
                              "\xEF\xBB\xBFQuality\t#1 ID\t#2 ID\t#1 String\t#2 "
                              "String\n1\t702876\t702977\tAmrozi accused\tReferring to him\n");
  EXPECT_EQ(mrpc.second(0), "Referring to him");
  const GlueData stsb =
      parse(GlueTask::stsb,
            "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n"
            "0\tmain-captions\tMSRvid\t2012test\t0001\tnone\tnone\tA plane.\tAn air plane.\t4.750\n");
  EXPECT_DOUBLE_EQ(stsb.label(0), 4.75);
  const GlueData qqp = parse(GlueTask::qqp,
                             "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n1\t2\t3\tHow?\tWhy?"
                             "\t0\n4\t5\tbroken\n6\t7\t8\tA?\tB?\t1");
  EXPECT_EQ(qqp.size(), 2);
  EXPECT_EQ(qqp.left_out(), 1);
  const std::string mnli =
      "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\t"
      "sentence2_parse\tsentence1\tsentence2\tlabel1\tgold_label\n";
  const GlueData m = parse(
      GlueTask::mnli,
      mnli + "0\t1\t2\tx\t\t\t\t\tA.\tB.\tneutral\tcontradiction\n0\t1\t2\tx\t\t\t\t\tA.\tB.\tneutral\t-\n");
  EXPECT_EQ(m.size(), 1);
  EXPECT_EQ(m.label(0), 2);
  EXPECT_EQ(m.left_out(), 1);
  EXPECT_EQ(parse(GlueTask::qnli, "index\tquestion\tsentence\tlabel\n0\tQ?\tS.\tnot_entailment\n").label(0),
            1);
  EXPECT_EQ(parse(GlueTask::rte, "index\tsentence1\tsentence2\tlabel\n0\tA\tB\tentailment\n").label(0), 0);
  EXPECT_EQ(parse(GlueTask::wnli, "index\tsentence1\tsentence2\tlabel\n0\tA\tB\t1\n").label(0), 1);
  EXPECT_EQ(parse(GlueTask::rte, "index\tsentence1\tsentence2\tlabel\n0\tA\tB\t1\n\r\n\n").size(), 1)
      << "empty lines at the end";
  EXPECT_EQ(parse(GlueTask::cola, "gj04\t1\t\tx\n\n").size(), 1);
}

TEST(Glue, ReadsJsonLines) {
  const GlueData pair = parse(GlueTask::mnli,
                              "{\"premise\":\"A \\u00e9\",\"hypothesis\":\"B\",\"label\":2,\"idx\":0}\n\n"
                              "{\"premise\":\"C\",\"hypothesis\":\"D\",\"label\":\"neutral\"}",
                              false, "x.jsonl");
  ASSERT_EQ(pair.size(), 2);
  EXPECT_EQ(pair.first(0), "A \xC3\xA9");
  EXPECT_EQ(pair.second(1), "D");
  EXPECT_EQ(pair.label(1), 1);
  EXPECT_FALSE(parse(GlueTask::sst2, "{\"sentence\":\"a\",\"label\":-1}", true, "x.jsonl").has_labels());
  // The scores of STS-B are floats there, its missing ones too.
  EXPECT_FALSE(
      parse(GlueTask::stsb, "{\"sentence1\":\"a\",\"sentence2\":\"b\",\"label\":-1.0}", true, "x.jsonl")
          .has_labels());
  EXPECT_DOUBLE_EQ(
      parse(GlueTask::stsb, "{\"sentence1\":\"a\",\"sentence2\":\"b\",\"label\":2.5}", false, "x.jsonl")
          .label(0),
      2.5);
}

TEST(Glue, RefusesMalformedFilesWithAReason) {
  struct Case {
    GlueTask task;
    std::string text, error;
    const char* name = "x.tsv";
  };
  const std::string rte = "index\tsentence1\tsentence2\tlabel\n", j = "x.jsonl";
  const std::vector<Case> cases = {
      {GlueTask::rte, "x", "line 1 is a header without the column \"sentence1\" of RTE"},
      {GlueTask::rte, "index\tsentence1\tlabel\n", "without the column \"sentence2\""},
      {GlueTask::rte, "index\tsentence1\tsentence2\n", "without the column \"label\""},
      {GlueTask::rte, "index\tsentence1\tsentence2\tlabel\tlabel\n",
       "line 1 is a header with two columns \"label\""},
      {GlueTask::rte, "sentence1\tsentence1\tsentence2\tlabel\n", "with two columns \"sentence1\""},
      {GlueTask::rte, rte, "has no examples"},
      {GlueTask::rte, rte + "0\ta\tb\n", "line 2 has 3 columns, the header 4"},
      {GlueTask::rte, rte + "0\ta\tb\tentailment\tc\n", "line 2 has 5 columns"},
      {GlueTask::rte, rte + "0\ta\tb\tperhaps\n",
       "line 2 has the label \"perhaps\", expected one of entailment, not_entailment"},
      {GlueTask::rte, rte + "0\ta\tb\t2\n", "has the label \"2\""},
      {GlueTask::rte, rte + "0\ta\tb\t0.5\n", "has the label \"0.5\""},
      {GlueTask::rte, rte + "0\ta\tb\t\n", "has the label \"\""},
      {GlueTask::rte, rte + "0\ta\tb\t-1\n", "has the label \"-1\""},
      {GlueTask::rte, rte + "0\ta\tb\tentailment\n\n0\ta\tb\tentailment\n",
       "line 3 is empty, though rows follow"},
      {GlueTask::rte, rte + std::string("0\ta\0\tb\t1\n", 9), "line 2 holds a NUL byte"},
      {GlueTask::rte, rte + "0\tcaf\xE9\tb\t1\n", "line 2 is not UTF-8 text"},
      {GlueTask::rte, rte + std::string(2 << 20, 'a'), "is longer than 1048576 bytes"},
      {GlueTask::rte, std::string("\0\0\0\0", 4), "holds a NUL byte"},
      {GlueTask::rte, "<html><body>404</body></html>", "is an HTML page"},
      {GlueTask::rte, "version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"},
      {GlueTask::cola, "gj04\t1\tx\n", "line 1 has 3 columns, expected 4"},
      {GlueTask::cola, "gj04\t2\t\tx\n", "expected one of unacceptable, acceptable"},
      {GlueTask::cola, "a\t1\t\tx\na\t1\t\tx\ty\n", "line 2 has 5 columns"},
      {GlueTask::stsb, "sentence1\tsentence2\tscore\na\tb\t5.1\n",
       "has the score \"5.1\", expected a number from 0 to 5"},
      {GlueTask::stsb, "sentence1\tsentence2\tscore\na\tb\tnan\n", "has the score \"nan\""},
      {GlueTask::stsb, "sentence1\tsentence2\tscore\na\tb\t-0.1\n", "has the score \"-0.1\""},
      {GlueTask::stsb, "sentence1\tsentence2\tscore\na\tb\t1e400\n", "has the score \"1e400\""},
      {GlueTask::stsb, "sentence1\tsentence2\tscore\na\tb\t3x\n", "has the score \"3x\""},
      {GlueTask::qqp, "question1\tquestion2\tis_duplicate\na\tb\t1\tc\n", "line 2 has 4 columns"},
      {GlueTask::mrpc, "Quality\t#1 String\n", "without the column \"#2 String\" of MRPC"},
      {GlueTask::sst2, "hello", "line 1 is not valid JSON at byte 1", "x.jsonl"},
      {GlueTask::sst2, "{\"sentence\":\"a\"", "is not valid JSON", "x.jsonl"},
      {GlueTask::sst2, "[]", "line 1 holds a list, expected one object", "x.jsonl"},
      {GlueTask::sst2, "3", "holds a plain value, expected one object", "x.jsonl"},
      {GlueTask::sst2, "null", "holds null", "x.jsonl"},
      {GlueTask::sst2, "{\"sentence\":[]}", "holds a list", "x.jsonl"},
      {GlueTask::sst2, "{\"sentence\":{}}", "holds an object within an object", "x.jsonl"},
      {GlueTask::sst2, "{\"sentence\":\"a\",\"sentence\":\"b\"}", "has the key \"sentence\" twice",
       "x.jsonl"},
      {GlueTask::sst2, "{\"label\":1}", "has no \"sentence\"", "x.jsonl"},
      {GlueTask::sst2, "{\"sentence\":null,\"label\":1}", "has no \"sentence\"", "x.jsonl"},
      {GlueTask::sst2, "{\"sentence\":\"a\",\"label\":1}\n{\"sentence\":\"b\"}",
       "line 2 has no label, unlike those before", "x.jsonl"},
      {GlueTask::sst2, "{\"sentence\":\"a\"}\n{\"sentence\":\"b\",\"label\":1}", "line 2 has a label, unlike",
       "x.jsonl"},
      {GlueTask::sst2, "{\"sentence\":\"a\",\"label\":7}", "has the label \"7\"", "x.jsonl"},
      {GlueTask::sst2, "{\"sentence\":\"\xFF\",\"label\":1}", "line 1 is not UTF-8 text", "x.jsonl"},
      {GlueTask::sst2, "{}{}", "is not valid JSON", "x.jsonl"}};
  EXPECT_GE(cases.size(), 40u);
  for (const Case& one : cases) {
    const std::string error = error_of(one.task, one.text, one.name);
    EXPECT_NE(error.find(one.error), std::string::npos) << one.text.substr(0, 100) << "\n" << error;
    EXPECT_NE(error.find(one.name), std::string::npos);
  }
}

TEST(Glue, NamesTasks) {
  EXPECT_EQ(parse_glue_task("SST-2").task, GlueTask::sst2);
  EXPECT_EQ(parse_glue_task("mnli").labels.size(), 3u);
  try {
    parse_glue_task("sst");
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("did you mean"), std::string::npos);
  }
}

TEST(GlueMetrics, ByHand) {
  const std::vector<double> p = {1, 1, 0, 0, 1, 0, 1, 0}, t = {1, 0, 0, 1, 1, 0, 1, 0};
  // Both 3, only predicted 1, only there 1, neither 3.
  EXPECT_DOUBLE_EQ(accuracy(p, t), 0.75);
  EXPECT_DOUBLE_EQ(f1(p, t), 0.75);
  EXPECT_DOUBLE_EQ(matthews(p, t), (3 * 3 - 1) / 16.0);
  const std::vector<double> zeros(8, 0);
  EXPECT_EQ(matthews(zeros, t), 0);
  EXPECT_EQ(f1(zeros, zeros), 0);
  // Of a model that has diverged.
  std::vector<double> lost = p;
  lost[1] = std::nan("");
  for (const GlueTask task : {GlueTask::sst2, GlueTask::mrpc, GlueTask::cola})
    for (const auto& [name, value] : glue_metrics(task, lost, t)) EXPECT_TRUE(std::isnan(value)) << name;
  const auto both = glue_metrics(GlueTask::mrpc, p, t);
  ASSERT_EQ(both.size(), 3u);
  EXPECT_EQ(both[2].first, "score");
  EXPECT_DOUBLE_EQ(both[2].second, 0.75);
  const std::vector<double> x = {1, 2, 3, 4};
  EXPECT_THROW(accuracy(p, x), Error);
  EXPECT_THROW(accuracy({}, {}), Error);
  EXPECT_THROW(matthews(x, x), Error);
}

TEST(Glue, ScoresInFilesHaveAPointInEveryLocale) {
  const CommaLocale comma;
  EXPECT_EQ(glue_submission(GlueTask::stsb, std::vector<double>{1.25, 4.5}),
            "index\tprediction\n0\t1.250\n1\t4.500\n");
  const TemporaryFolder folder;
  write_synthetic_glue(GlueTask::stsb, folder / "a", {.train = 20, .dev = 20, .test = 1});
  EXPECT_EQ(GlueData(GlueTask::stsb, folder / "a", "train").size(), 20);
}

class Synthetic : public ::testing::TestWithParam<int> {
 protected:
  const TemporaryFolder folder_;
};

TEST_P(Synthetic, IsReadBackDecidedByTheSeedAndBalanced) {
  const GlueInfo& info = glue_tasks()[size_t(GetParam())];
  write_synthetic_glue(info.task, folder_ / "a", {.train = 1200, .dev = 300, .test = 10, .seed = 4});
  write_synthetic_glue(info.task, folder_ / "b", {.train = 1200, .dev = 300, .test = 10, .seed = 4});
  write_synthetic_glue(info.task, folder_ / "c", {.train = 1200, .dev = 300, .test = 10, .seed = 5});
  const GlueData train(info.task, folder_ / "a", "train"), dev(info.task, folder_ / "a", "dev"),
      test(info.task, folder_ / "a", "test"), other(info.task, folder_ / "c", "train");
  EXPECT_EQ(train.size(), 1200);
  EXPECT_EQ(dev.size(), 300);
  EXPECT_EQ(test.size(), 10);
  EXPECT_FALSE(test.has_labels());
  if (info.task == GlueTask::mnli)
    EXPECT_EQ(GlueData(info.task, folder_ / "a", "dev_mismatched").size(), 300);
  EXPECT_EQ(io::read_file(train.path(), 1 << 30),
            io::read_file(GlueData(info.task, folder_ / "b", "train").path(), 1 << 30));
  EXPECT_NE(io::read_file(train.path(), 1 << 30), io::read_file(other.path(), 1 << 30));
  std::vector<double> share(6), labels;
  for (int64_t i = 0; i < train.size(); ++i) {
    EXPECT_FALSE(train.first(i).empty());
    EXPECT_EQ(train.second(i).empty(), !info.is_pair);
    labels.push_back(train.label(i));
    share[size_t(std::lround(train.label(i)))] += 1.0 / double(train.size());
  }
  // No class is so frequent that naming it alone would do.
  for (const double one : share) EXPECT_LT(one, 0.66);
  for (int64_t c = 0; c < info.classes(); ++c)
    if (info.classes() > 1) EXPECT_GT(share[size_t(c)], 0.25);
}

INSTANTIATE_TEST_SUITE_P(Tasks, Synthetic, ::testing::Range(0, 9),
                         [](const auto& info) { return std::string(glue_tasks()[size_t(info.param)].name); });

TEST(GlueItems, PadsAndPacks) {
  const GlueData data =
      parse(GlueTask::rte, "sentence1\tsentence2\tlabel\nab\tc\t1\nabcdefgh\tabcdefgh\t0\na\t\t1\n");
  // A byte a token, no special tokens around: what is where can be read off.
  const io::Tokenizer tokenizer = io::Tokenizer::parse("bytes", io::byte_tokenizer({"<pad>"}));
  const GlueItems padded(data, tokenizer, {.max_length = 10, .pad_multiple = 4});
  const std::vector<int64_t> rows = {0, 2};
  const GlueBatch small = padded.batch(rows);
  const auto id = [](char c) { return int64_t(c) + 1; };
  EXPECT_EQ(small.ids.shape(), Shape({2, 4}));
  EXPECT_EQ(small.ids.to_vector<int64_t>(),
            (std::vector<int64_t>{id('a'), id('b'), id('c'), 0, id('a'), 0, 0, 0}));
  EXPECT_EQ(small.types.to_vector<int64_t>(), (std::vector<int64_t>{0, 0, 1, 0, 0, 0, 0, 0}));
  EXPECT_EQ(small.mask.to_vector<bool>(),
            (std::vector<bool>{true, true, true, false, true, false, false, false}));
  EXPECT_EQ(small.lengths.to_vector<int32_t>(), (std::vector<int32_t>{0, 3, 4}));
  EXPECT_EQ(small.labels.to_vector<int64_t>(), (std::vector<int64_t>{1, 1}));
  EXPECT_EQ(padded.cut(), 1);
  const GlueItems packed(data, tokenizer, {.max_length = 10, .packed = true});
  const std::vector<int64_t> all = {1, 0};
  const GlueBatch batch = packed.batch(all);
  EXPECT_EQ(batch.ids.shape(), Shape({13}));
  EXPECT_EQ(batch.lengths.to_vector<int32_t>(), (std::vector<int32_t>{0, 10, 13}));
  EXPECT_EQ(batch.types.to_vector<int64_t>(), (std::vector<int64_t>{0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 1}));
  const GlueItems fixed(data, tokenizer, {.max_length = 10, .pad_to = 12});
  EXPECT_EQ(fixed.batch(rows).ids.shape(), Shape({2, 12}));
  EXPECT_THROW(GlueItems(data, tokenizer, {.max_length = 10, .pad_to = 8}), Error);
  const io::Tokenizer without = io::Tokenizer::parse("bytes", io::byte_tokenizer({"<end>"}));
  EXPECT_THROW(GlueItems(data, without, {.max_length = 10}), Error);
  Rng rng(1);
  Loader<GlueItems> loader(packed, {.size = 2, .shuffle = &rng, .device = Device::cpu()});
  EXPECT_EQ(loader.next().labels.size(0), 2);
}

}  // namespace
}  // namespace tessera::datasets
