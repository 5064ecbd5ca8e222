#include "train/language_settings.h"

#include <nlohmann/json.hpp>

#include "tests/errors.h"
#include "tests/train/small_language.h"
#include "train/language_sizes.h"

namespace tessera::train {
namespace {

using nlohmann::json;

TEST(LanguageSettings, ComesBackFromJsonExactly) {
  for (const bool llama : {false, true}) {
    LanguageSettings job = small_language_job(llama);
    job.lr = 0.1, job.seed = (uint64_t(1) << 62) + 1, job.documents = true, job.beta2 = 0.987654321;
    std::visit([](auto& model) { model.dtype = DType::bf16; }, job.model);
    const json out = json::parse(to_json(job).dump());
    const LanguageSettings back = job_settings<LanguageSettings>(out);
    EXPECT_EQ(to_json(back), to_json(job));
    EXPECT_EQ(back.is_llama(), llama);
    EXPECT_EQ(back.dtype(), DType::bf16);
  }
}

TEST(LanguageSettings, EverySettingMustBeThereAndOfItsType) {
  const json good = to_json(small_language_job());
  for (const auto& [name, value] : good.items()) {
    json missing = good;
    missing.erase(name);
    if (name == "data_order") {  // newer than other runs
      EXPECT_EQ(job_settings<LanguageSettings>(missing).data_order, 1);
      missing[name] = datasets::kDataOrder + 1;
    }
    EXPECT_NE(message_of([&] {
                job_settings<LanguageSettings>(missing);
              }).find(name == "data_order" ? "this build knows" : "\"" + name + "\" is missing"),
              std::string::npos);
    if (name == "model") continue;
    json bad = good;
    bad[name] = value.is_string() ? json(1) : json("1");
    EXPECT_NE(message_of([&] { job_settings<LanguageSettings>(bad); }).find("\"" + name + "\""),
              std::string::npos);
  }
  json extra = good;
  extra["colour"] = 1;
  EXPECT_NE(message_of([&] { job_settings<LanguageSettings>(extra); }).find("\"colour\""), std::string::npos);
}

TEST(LanguageSettings, SaysWhatDoesNotFit) {
  const auto refuses = [](auto&& change, const char* part) {
    LanguageSettings job = small_language_job();
    change(job);
    EXPECT_NE(message_of([&] { job.validate(); }).find(part), std::string::npos)
        << part << " in: " << message_of([&] { job.validate(); });
  };
  refuses([](LanguageSettings& job) { job.length = 17; }, "17");
  refuses([](LanguageSettings& job) { job.batch = 0; }, "batch");
  refuses([](LanguageSettings& job) { job.accumulate = 0; }, "accumulate");
  refuses([](LanguageSettings& job) { job.lr = 0; }, "lr");
  refuses([](LanguageSettings& job) { job.galore_scale = 0; },
          "galore_scale (--galore-scale) is 0; expected 1e-06 to");
  refuses([](LanguageSettings& job) { job.min_lr_ratio = 2; }, "min_lr_ratio");
  refuses([](LanguageSettings& job) { job.beta2 = 1; }, "beta2");
  refuses([](LanguageSettings& job) { job.schedule = "spiral"; }, "spiral");
  refuses([](LanguageSettings& job) { job.ema = 1; }, "ema (--ema) is 1");
  refuses([](LanguageSettings& job) { job.ema = -0.5; }, "ema (--ema) is -0.5");
  refuses([](LanguageSettings& job) { job.dropout = 1; }, "dropout (--dropout) is 1");
  EXPECT_EQ(message_of([] { small_language_job().validate(); }), "");
}

TEST(LanguageSizes, AreThoseOfThePapers) {
  // 124M (Radford et al. counted 117M without what is tied twice), and 6.7B.
  LanguageConfig small = models::GptConfig{}, large = models::LlamaConfig{};
  apply_size(small, "small");
  apply_size(large, "7b");
  EXPECT_EQ(plan::count_parameters(small), 124'439'808);
  EXPECT_EQ(plan::count_parameters(large), 6'738'415'616);
}

}  // namespace
}  // namespace tessera::train
