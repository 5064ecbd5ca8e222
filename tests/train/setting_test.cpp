#include "train/setting.h"

#include <gtest/gtest.h>

#include "tests/errors.h"
#include "train/trainer.h"

namespace tessera::train {
namespace {

using nlohmann::json;

/// A setting of each kind.
struct Some {
  bool packed = false, graph = true;
  int64_t batch = 16, later = 7, width = 0;
  uint64_t seed = 0;
  double lr = 0.5;
  std::string schedule = "cosine";
  DType dtype = DType::f32;
  F32Math math = F32Math::ieee;
  SettingList list(Kept kept = Kept::job) {
    SettingList list(kept);
    list.group("Data");
    list.add("packed", packed, "");
    list.add("graph", graph, "").as_on_off();
    list.add("batch", batch, "").named("--batch-size").formerly("--batch").range(int64_t{1}, int64_t{64});
    list.add("seed", seed, "");
    list.add("model.lr_peak", lr, "").range(0.0, 1.0);
    list.add("schedule", schedule, "").one_of({"cosine", "linear"});
    list.add_hidden("dtype", dtype);
    list.add_hidden("f32_math", math).absent_means("ieee");
    list.add_hidden("later", later).absent_means(7).range(int64_t{8}, int64_t{9});
    list.add("width", width, "").range(int64_t{1}, int64_t{8}).of_powers_of_two().unset_is(0);
    return list;
  }
};

TEST(Setting, IsDeclaredOnceForFlagAndFile) {
  Some some;
  const SettingList list = some.list();
  EXPECT_EQ(list.all()[2].flag, "--batch-size");
  EXPECT_EQ(list.all()[2].old_flags, std::vector<std::string>{"--batch"});
  EXPECT_EQ(list.all()[4].flag, "--lr-peak");
  EXPECT_EQ(list.all()[6].flag, "");
  const json written = to_json(list, Kept::job);
  EXPECT_EQ(written, (json{{"packed", false},
                           {"graph", "on"},
                           {"batch", 16},
                           {"seed", 0},
                           {"model.lr_peak", 0.5},
                           {"schedule", "cosine"},
                           {"dtype", "f32"},
                           {"width", 0}}));
  EXPECT_EQ(to_json(list, Kept::option), json::object());
}

TEST(Setting, ComesBackExactlyAndWhatCameLaterMayBeAbsent) {
  Some some;
  some.packed = true, some.graph = false, some.batch = 3, some.seed = (uint64_t(1) << 63) + 1, some.lr = 0.1;
  some.schedule = "linear", some.dtype = DType::bf16, some.math = F32Math::tf32, some.later = 8;
  const json written = json::parse(to_json(some.list(), Kept::job).dump());
  EXPECT_EQ(written.size(), 10u);
  Some back;
  SettingList list = back.list();
  take_job(list, written, "job");
  EXPECT_EQ(to_json(list, Kept::job), written);
  EXPECT_EQ(back.seed, some.seed);
  // An older run has neither of the two; what the program would begin with does not matter.
  json older = written;
  older.erase("f32_math"), older.erase("later");
  take_job(list, older, "job");
  EXPECT_EQ(back.math, F32Math::ieee);
  EXPECT_EQ(back.later, 7);
}

TEST(Setting, OfAJobMustBeThereAndOfItsType) {
  Some some;
  const json good = to_json(some.list(), Kept::job);
  const auto refused = [&](const json& in) {
    Some other;
    SettingList list = other.list();
    return message_of([&] { take_job(list, in, "run.json"); });
  };
  EXPECT_EQ(refused(good), "");
  for (const auto& [key, value] : good.items()) {
    json bad = good;
    bad.erase(key);
    EXPECT_NE(refused(bad).find("run.json: \"" + key + "\" is missing"), std::string::npos) << refused(bad);
    for (const json& wrong : {json(nullptr), json::array(), json(-3.5), json("x")}) {
      if (value.is_number_float() && wrong.is_number()) continue;
      bad[key] = wrong;
      EXPECT_NE(refused(bad).find("\"" + key + "\""), std::string::npos) << bad;
    }
  }
  json extra = good;
  extra["colour"] = 1;
  EXPECT_NE(refused(extra).find("\"colour\" is not a setting"), std::string::npos);
  EXPECT_NE(refused(json::array()).find("expected an object"), std::string::npos);
}

TEST(Setting, OfAnOptionIsTakenUnlessItIsGivenAgainAndMustFitItsFlag) {
  Some some;
  SettingList list = some.list(Kept::option);
  const json run = {{"options", {{"batch", 32}, {"graph", "off"}, {"schedule", "linear"}}}};
  take_options(list, run, "run.json", {"--schedule"});
  EXPECT_EQ(some.batch, 32);
  EXPECT_FALSE(some.graph);
  EXPECT_EQ(some.schedule, "cosine");
  take_options(list, json::object(), "run.json", {});  // of a run that kept none
  for (const auto& [key, wrong] : {std::pair("batch", json(65)),
                                   {"batch", json(0)},
                                   {"batch", json("3")},
                                   {"batch", json(3.5)},
                                   {"graph", json(true)},
                                   {"schedule", json("cosin")}}) {
    const json bad = {{"options", {{key, wrong}}}};
    const std::string error = message_of([&] { take_options(list, bad, "run.json", {}); });
    EXPECT_NE(error.find("which is not a valid value of --"), std::string::npos) << bad << error;
  }
  EXPECT_EQ(some.batch, 32);
}

/// The values of a program, which no flag has checked, and those of a file meet the same limits.
TEST(Setting, IsWithinTheLimitsThatItDeclares) {
  const auto refused = [](auto&& change) {
    Some some;
    change(some);
    const std::string of_values = message_of([&] { check_values(some.list(), "job"); });
    const json stored = json::parse(to_json(some.list(), Kept::job).dump());
    EXPECT_EQ(message_of([&] {
                Some back;
                SettingList list = back.list();
                take_job(list, stored, "job");
              }).empty(),
              of_values.empty());
    return of_values;
  };
  EXPECT_EQ(refused([](Some&) {}), "");
  EXPECT_EQ(refused([](Some& s) { s.batch = 64, s.width = 8, s.lr = 1, s.later = 9; }), "");
  EXPECT_EQ(refused([](Some& s) { s.batch = 65; }), "job: batch (--batch-size) is 65; expected 1 to 64");
  EXPECT_EQ(refused([](Some& s) { s.batch = -1; }), "job: batch (--batch-size) is -1; expected 1 to 64");
  EXPECT_EQ(refused([](Some& s) { s.lr = 1.5; }), "job: model.lr_peak (--lr-peak) is 1.5; expected 0 to 1");
  EXPECT_EQ(refused([](Some& s) { s.schedule = "step"; }),
            "job: schedule (--schedule) is \"step\"; expected cosine or linear");
  EXPECT_EQ(refused([](Some& s) { s.later = 10; }), "job: later is 10; expected 8 to 9");
  EXPECT_EQ(refused([](Some& s) { s.width = 6; }),
            "job: width (--width) is 6; expected 1 to 8, a power of two");
  EXPECT_EQ(refused([](Some& s) { s.seed = ~uint64_t{0}; }), "");  // declares no limits
}

TEST(Setting, OfALossScaleIsAPowerOfTwo) {
  TrainerOptions options;
  SettingList list = options.list();
  const auto take = [&](int64_t scale) {
    return message_of([&] { take_options(list, {{"options", {{"loss_scale", scale}}}}, "run.json", {}); });
  };
  EXPECT_EQ(take(1024), "");
  EXPECT_EQ(options.loss_scale, 1024);
  EXPECT_NE(take(1000).find("--loss-scale"), std::string::npos);
}

}  // namespace
}  // namespace tessera::train
