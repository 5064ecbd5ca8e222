#include <gtest/gtest.h>

#include "train/language_job.h"

namespace tessera::train {
namespace {

TEST(GaloreOfFactors, ProjectsThoseOfEachModuleOnTheirOwn) {
  LanguageSettings settings;
  settings.model = models::LlamaConfig{
      .vocabulary = 256, .positions = 16, .d_model = 64, .d_ff = 96, .heads = 2, .kv_heads = 1, .layers = 1};
  settings.length = 16, settings.galore_rank = 8;
  settings.optimizer = "galore", settings.factors.form = "low_rank", settings.factors.rank = 24;
  LanguageJob job(settings, Device::cpu());
  std::vector<std::string> names;
  job.optimizer().fields([&](const std::string& name, auto&) {
    if (name.starts_with("projection.") && name.find("blocks.0.attention") != std::string::npos)
      names.push_back(name);
  });
  std::string said;
  for (const std::string& name : names) said += name + "\n";
  EXPECT_EQ(names.size(), 8u) << said;  // two factors of each of q, k, v and o
}

}  // namespace
}  // namespace tessera::train
