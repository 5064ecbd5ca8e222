#include "bench/compare.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <nlohmann/json.hpp>

namespace tessera::bench {
namespace {

Record record(const std::string& implementation, double ms, const std::string& campaign = "") {
  Record r;
  r.op = "softmax";
  r.shape = {{"R", 4}, {"C", 8}};
  r.dtype = "bf16";
  r.device = "cuda:0";
  r.gpu = "NVIDIA H200";
  r.mode = "fwd";
  r.implementation = implementation;
  r.ms = {ms, ms, ms, 5};
  r.campaign = campaign;
  return r;
}

Record missing(const std::string& implementation, bool required) {
  Record r = record(implementation, 0, "new");
  r.missing = "was not compiled within 100 s";
  r.required = required;
  return r;
}

TEST(Compare, ShowsTheFastestOfTheCampaignAndTheFastestEver) {
  const Record ours = record("tessera", 2, "new");
  const auto list = compare({ours}, {record("torch compile", 4, "new"), record("torch eager", 6, "new"),
                                     record("torch compile", 3, "old"), record("torch eager", 9, "")});
  ASSERT_EQ(list.size(), 1u);
  EXPECT_EQ(list[0].b->ms.p50, 4);
  EXPECT_EQ(list[0].ratio, 2);
  EXPECT_EQ(list[0].ever->ms.p50, 3);
  EXPECT_EQ(list[0].ratio_ever, 1.5);
  const std::string text = format_comparison(list);
  EXPECT_NE(text.find("2.00x"), std::string::npos) << text;
  EXPECT_NE(text.find("1.50x"), std::string::npos) << text;
}

TEST(Compare, HasNoRatioWithinARunThatHadNoPeer) {
  const auto list = compare({record("tessera", 2, "new")}, {record("torch compile", 3, "old")});
  ASSERT_EQ(list.size(), 1u);
  EXPECT_FALSE(list[0].b);
  EXPECT_EQ(list[0].ratio, 0);
  EXPECT_EQ(list[0].ratio_ever, 1.5);
}

TEST(Compare, LeavesTheCellEmptyWhereARequiredPeerIsMissing) {
  const Record ours = record("tessera", 2, "new"), eager = record("torch eager", 9, "new");
  auto list = compare({ours}, {eager, missing("torch compile", true)});
  ASSERT_EQ(list.size(), 1u);
  EXPECT_FALSE(list[0].b);
  EXPECT_FALSE(list[0].ever);
  EXPECT_NE(list[0].missing.find("torch compile: was not compiled"), std::string::npos) << list[0].missing;
  EXPECT_NE(format_comparison(list).find("missing: torch compile"), std::string::npos);
  // Once it has a time, of whatever campaign, that time counts.
  list = compare({ours}, {eager, missing("torch compile", true), record("torch compile", 3, "old")});
  EXPECT_EQ(list[0].ever->ms.p50, 3);
  // The campaign itself has only the weaker one.
  EXPECT_FALSE(list[0].b);
  EXPECT_EQ(list[0].ratio, 0);
  EXPECT_NE(format_comparison(list).find("missing: torch compile"), std::string::npos);
  EXPECT_EQ(format_comparison(list).find("torch eager"), std::string::npos);
  list = compare({ours}, {eager, missing("torch compile", true), record("torch compile", 4, "new")});
  EXPECT_EQ(list[0].b->ms.p50, 4);
  EXPECT_EQ(list[0].missing, "");
  // What only might have been another way does not make the others weaker.
  list = compare({ours}, {eager, missing("torch eager padded 8", false)});
  EXPECT_EQ(list[0].b->ms.p50, 9);
}

TEST(Compare, DoesNotCountAnotherGpu) {
  Record other = record("torch compile", 1, "new");
  other.gpu = "NVIDIA H100 80GB HBM3";
  LeftOut left_out;
  const auto list = compare({record("tessera", 2, "new")}, {other}, {}, &left_out);
  EXPECT_TRUE(list.empty());
  EXPECT_EQ(left_out.other_gpu, 1);
  EXPECT_EQ(left_out.without_peer, 1);
  EXPECT_EQ(compare({record("tessera", 2, "new")}, {other}, {.any_gpu = true}).size(), 1u);
}

TEST(Compare, CountsWhatDiffersInTheDeviceAlone) {
  Record other = record("tessera", 1, "new");
  other.device = "cpu";
  LeftOut left_out;
  EXPECT_TRUE(compare({record("tessera", 2, "new")}, {other}, {.any_gpu = true}, &left_out).empty());
  EXPECT_EQ(left_out.other_device, 1);
  EXPECT_TRUE(compare({other}, {record("tessera", 2, "new")}, {}, &left_out).empty());
  EXPECT_EQ(left_out.other_device, 1);
  other.op = "matmul";
  EXPECT_TRUE(compare({other, record("tessera", 2, "new")}, {}, {}, &left_out).empty());
  EXPECT_EQ(left_out.other_device, 0);
}

TEST(Compare, SaysWhatTheSidesDoDifferently) {
  Record ours = record("tessera", 2), theirs = record("torch graph", 3);
  ours.does = {{"weights", "bf16 with f32 masters"}, {"recomputed", "nothing"}, {"host", "waits"}};
  theirs.does = {{"weights", "bf16 without masters"}, {"recomputed", "nothing"}};
  EXPECT_EQ(differences(ours, theirs), "weights: bf16 with f32 masters / bf16 without masters");
  EXPECT_NE(format_comparison(compare({ours}, {theirs})).find(differences(ours, theirs)), std::string::npos);
}

TEST(Record, IsStampedWithTheCampaignOfTheEnvironment) {
  std::vector<Record> records{record("tessera", 2), record("tessera", 2, "old")};
  setenv("TESSERA_CAMPAIGN", "new", 1);
  stamp(records);
  unsetenv("TESSERA_CAMPAIGN");
  EXPECT_EQ(records[0].campaign, "new");
  EXPECT_EQ(records[1].campaign, "old");
}

TEST(Record, KeepsWhatBelongsToACampaign) {
  Record r = record("torch graph", 3, "2026-11-22");
  r.driver = "580.159.04";
  r.does = {{"weights", "f32"}};
  const Record back = from_json(to_json(r));
  EXPECT_EQ(back.gpu, r.gpu);
  EXPECT_EQ(back.driver, r.driver);
  EXPECT_EQ(back.campaign, r.campaign);
  EXPECT_EQ(back.does, r.does);
  const Record none = from_json(to_json(missing("torch compile", true)));
  EXPECT_EQ(none.missing, "was not compiled within 100 s");
  EXPECT_TRUE(none.required);
  EXPECT_EQ(none.ms.p50, 0);
}

}  // namespace
}  // namespace tessera::bench
