#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "io/safetensors.h"
#include "runtime/device.h"
#include "tensor/precision.h"
#include "tests/cli/command.h"

// --precision: its default by device, that the choice is said, kept by a resumed run, and found in records.

namespace tessera::cli::test {
namespace {

using nlohmann::json;

json job_of(const Workplace& at, const std::string& name) {
  return json::parse(at.get("runs/" + name + "/run.json")).at("job");
}

TEST(PrecisionFlag, OfACpuRunIsF32UnlessGivenAndIsSaid) {
  const Workplace at;
  EXPECT_TRUE(holds_all(first_line(said(at, "train tnp --name plain --steps 2" + kTiny)), "on cpu|, f32"));
  EXPECT_EQ(job_of(at, "plain").at("model.dtype"), "f32");
  EXPECT_FALSE(job_of(at, "plain").contains("f32_math"));
  EXPECT_TRUE(
      holds_all(first_line(said(at, "train tnp --name half --precision bf16 --steps 2" + kTiny)), ", bf16"));
  EXPECT_EQ(job_of(at, "half").at("model.dtype"), "bf16");
}

TEST(PrecisionFlag, Tf32IsKeptByAResumedRun) {
  const Workplace at;
  EXPECT_TRUE(
      holds_all(first_line(said(at, "train tnp --name t --precision tf32 --steps 2" + kTiny)), ", tf32"));
  EXPECT_EQ(job_of(at, "t").at("model.dtype"), "f32");
  EXPECT_EQ(job_of(at, "t").at("f32_math"), "tf32");
  const std::string resumed = said(at, "train tnp --resume runs/t --steps 4 --device cpu");
  EXPECT_TRUE(holds_all(resumed, "resuming from|, tf32"));
  EXPECT_EQ(job_of(at, "t").at("f32_math"), "tf32");
  said(at, "eval tnp runs/t --tasks 4 --device cpu");
  EXPECT_EQ(run(at, "train tnp --resume runs/t --precision f32 --steps 5 --device cpu").code, 2);
  // Another curve than that of f32, which a run without the flag has.
  said(at, "train tnp --name f --steps 4" + kTiny);
  const auto last_loss = [&](const std::string& name) {
    return metrics_of(at, "runs/" + name).back().at("loss").get<double>();
  };
  EXPECT_NE(last_loss("t"), last_loss("f"));
  EXPECT_NEAR(last_loss("t"), last_loss("f"), 0.05);
}

TEST(PrecisionFlag, OfPlansIsThatOfTheDevice) {
  const Workplace at;
  const std::string usual = name_of(default_precision(Device::best()));
  for (const char* model : {"tnp", "gpt", "llama"}) {
    const std::string line = std::string("plan ") + model + " --memory 80 --json";
    EXPECT_EQ(json::parse(said(at, line)).at("precision"), usual);
    EXPECT_EQ(json::parse(said(at, line + " --precision tf32")).at("precision"), "tf32");
    EXPECT_EQ(json::parse(said(at, line + " --precision tf32")).at("parameter_count"),
              json::parse(said(at, line + " --precision f32")).at("parameter_count"));
  }
}

TEST(PrecisionFlag, RecordsNameTf32) {
  const Workplace at;
  said(at,
       "bench step tnp --device cpu --d-model 8 --d-ff 8 --n-head 1 --layers 1 --emb-hidden 8 --m 4 --n 4 "
       "--batch-size 2 --seconds 0.01 --precision f32,tf32,bf16 --json s.jsonl");
  said(at,
       "bench op linear --device cpu --shape B=0,T=4,bias=0,in=8,out=8 --seconds 0.01 --dtype tf32,f32 "
       "--mode fwd --json s.jsonl");
  said(at, "bench sweep linear --device cpu --count 3 --dtype tf32 --mode fwd --json s.jsonl");
  std::string dtypes;
  for (const json& record : json_lines(at.get("s.jsonl")))
    dtypes += record.at("dtype").get<std::string>() + " ";
  EXPECT_EQ(dtypes, "f32 tf32 bf16 tf32 f32 tf32 tf32 tf32 ");
}

TEST(F32MathFlag, RunsAnOperatorInTf32) {
  const Workplace at;
  std::vector<float> values;
  for (int i = 0; i < 12; ++i) values.push_back(1.0f + 0.0307f * float(i));
  const Tensor x = Tensor::from(values, {3, 4}), weight = Tensor::from(values, {3, 4});
  io::save_safetensors(at / "x", {{"x", x}, {"weight", weight}});
  io::save_safetensors(at / "rounded", {{"x", rounded_to_tf32(x)}, {"weight", rounded_to_tf32(weight)}});
  const auto y = [&](const std::string& line) {
    said(at, "op linear --out y " + line);
    return io::load_safetensors(at / "y").at("y").to_vector<float>();
  };
  EXPECT_EQ(y("--in x --f32-math tf32"), y("--in rounded"));
  EXPECT_NE(y("--in x --f32-math tf32"), y("--in x"));
  EXPECT_EQ(y("--in x --f32-math ieee"), y("--in x"));
  EXPECT_EQ(run(at, "op linear --in x --out y --f32-math fast").code, 2);
}

}  // namespace
}  // namespace tessera::cli::test
