#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "pretrained/layers.h"
#include "pretrained/sparse_file.h"
#include "tests/cli/language_model.h"

// tessera convert --format, and generate, eval ppl with --sparse and gates: what they print, and what they
// refuse.

namespace tessera::cli::test {
namespace {

using nlohmann::json;

/// A GPT-2 "m" whose block matrices are half zeros, and its compressed form "c". Empty, or why it cannot be
/// made.
std::string put_sparse(const Workplace& at) {
  if (const std::string why = put_model(at, "m", {.dtype = DType::f16}); !why.empty()) return why;
  Rng rng(1);
  models::Gpt model = pretrained::load_gpt(at / "m", rng, Device::cpu());
  for (const pretrained::LinearModule& module : pretrained::linear_modules(model).all)
    if (module.ours.starts_with("blocks."))
      for (int64_t r = 0; r < module.layer->out; ++r)
        for (int64_t c = r % 2; c < module.layer->in; c += 2)
          module.layer->weight.detach().at({r, c}).fill(0);
  fs::remove(at / "m/model.safetensors");
  fs::remove(at / "m/config.json");
  pretrained::save(model, at / "m");
  const Outcome made = run(at, "convert m c --format tca-bme");
  return made.code == 0 ? "" : made.err;
}

json generated(const Workplace& at, const std::string& options) {
  expect_success(
      run(at, "generate --device cpu --prompt abc --greedy --max-tokens 12 --json o.json " + options));
  return json::parse(at.get("o.json"));
}

TEST(SparseCommands, TheChainGivesTheDenseModelsText) {
  const Workplace at;
  if (const std::string why = put_sparse(at); !why.empty()) GTEST_SKIP() << "skipped: " << why;
  EXPECT_TRUE(holds_all(said(at, "convert m t --format tiled-cbc"),
                        "transformer.h.0.attn.c_attn|48 x 16|50.0%|fingerprint"));
  const json dense = generated(at, "--model m");
  EXPECT_TRUE(dense["sparse"].empty());
  for (const std::string flags :
       {"--model c", "--model t --sparse required", "--model c --sparse auto", "--model c --sparse off"}) {
    const json sparse = generated(at, flags);
    EXPECT_EQ(sparse["texts"], dense["texts"]) << flags;
    EXPECT_EQ(sparse["sparse"].size(), flags.find("off") != std::string::npos ? 0u : 8u) << flags;
  }
  const json layer = generated(at, "--model c")["sparse"][0];
  EXPECT_EQ(layer["layer"], "transformer.h.0.attn.c_attn");
  EXPECT_EQ(layer["format"], "tca-bme");
  EXPECT_EQ(layer["variant"], "cpu");
  EXPECT_EQ(layer["weight_sparsity"], 0.5);
  EXPECT_EQ(layer["dense_bytes"], 2 * 48 * 16);
  EXPECT_FALSE(layer.contains("activation_sparsity"));
  // Under auto every layer has a line; under required there is nothing to say.
  EXPECT_TRUE(
      holds_all(run(at, "generate --device cpu --prompt a --max-tokens 1 --model c --sparse auto").err,
                "c_attn: tca-bme (cpu)|mlp.c_proj"));
  EXPECT_EQ(run(at, "generate --device cpu --prompt a --max-tokens 1 --model c").err, "");
}

TEST(SparseCommands, GatesAreCountedOnTheText) {
  const Workplace at;
  if (const std::string why = put_sparse(at); !why.empty()) GTEST_SKIP() << "skipped: " << why;
  const json open = generated(at, "--model c --gate-threshold 0"),
             gated = generated(at, "--model c --gate-threshold 0.5"),
             columns = generated(at, "--model m --gate-threshold 0.5");
  EXPECT_EQ(open["texts"], generated(at, "--model m")["texts"]);
  EXPECT_EQ(gated["texts"], columns["texts"]);
  EXPECT_EQ(columns["sparse"][0]["format"], "dense-columns");
  for (size_t i = 0; i < 8; ++i) {
    EXPECT_GT(gated["sparse"][i]["activation_sparsity"], 0.05);
    EXPECT_EQ(gated["sparse"][i]["activation_sparsity"], columns["sparse"][i]["activation_sparsity"]);
    EXPECT_LE(gated["sparse"][i]["gate_overlap"], 1);
  }
  const auto perplexity = [&](const std::string& flags) {
    return json::parse(said(at, "eval ppl --device cpu --length 16 --text long --json " + flags));
  };
  std::string text;
  for (int i = 0; i < 40; ++i) text += "some text " + std::to_string(i);
  at.put("long", text);
  const double dense = perplexity("--model m")["perplexity"], half = perplexity("--model c")["perplexity"];
  EXPECT_NEAR(dense, half, 1e-3 * dense);
  EXPECT_NE(perplexity("--model c --gate-threshold 0.5")["perplexity"], half);
  EXPECT_EQ(perplexity("--model c --gate-threshold 0.5")["sparse"].size(), 8u);
}

TEST(SparseCommands, RefuseWhatCannotRun) {
  const Workplace at;
  if (const std::string why = put_sparse(at); !why.empty()) GTEST_SKIP() << "skipped: " << why;
  const auto gates = [&](const std::string& name, const json& change) {
    json file{{"format", "tessera-gates"}, {"layers", json::object()}};
    for (int l = 0; l < 2; ++l)
      for (const char* const part : {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"})
        file["layers"]["transformer.h." + std::to_string(l) + "." + part] = 0.1;
    file.merge_patch(change);
    at.put(name, file.dump());
  };
  gates("good", json::object());
  gates("foreign", {{"fingerprint", "00"}});
  gates("lacks", {{"layers", {{"transformer.h.1.mlp.c_fc", nullptr}}}});
  gates("more", {{"layers", {{"transformer.h.9.mlp.c_fc", 1}}}});
  gates("negative", {{"layers", {{"transformer.h.1.mlp.c_fc", -1}}}});
  gates("text", {{"layers", {{"transformer.h.1.mlp.c_fc", "a"}}}});
  gates("many", {{"layers", {{"transformer.h.1.mlp.c_fc", {{"top_k", 17}}}}}});
  gates("scale", {{"scale", "two"}});
  gates("field", {{"tresholds", 1}});
  at.put("no_json", "{");
  at.put("twice", R"({"format": "tessera-gates", "layers": {"a": 1, "a": 2}})");
  at.put("other", "{}");
  expect_success(run(at, "generate --device cpu --prompt a --max-tokens 1 --model c --gates good"));
  const std::string go = "generate --device cpu --prompt a --max-tokens 1 ";
  const auto refused = [&](const std::string& line, int code, const char* says) {
    const Outcome outcome = run(at, line);
    EXPECT_EQ(outcome.code, code) << line << "\n" << outcome.err;
    EXPECT_TRUE(holds_all(outcome.err, says)) << line;
    EXPECT_EQ(outcome.out, "") << line;
    if (code == 1) EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
  };
  refused(go + "--model m --sparse required", 1,
          "--sparse required|transformer.h.0.attn.c_attn|its weight is dense");
  refused(go + "--model c --samples 33", 1, "transformer.h.0.attn.c_attn|33 tokens|at most 32");
  refused(go + "--model m --gate-threshold 0.1 --samples 9", 1, "9 tokens|dense-columns|at most 8");
  expect_success(run(at, "convert m w --format tca-bme --dtype f32"));
  refused(go + "--model w --dtype bf16", 1, "is f32|is to run in bf16; give --dtype f32, or convert");
  refused(go + "--model c --dtype bf16", 1, "is f16|is to run in bf16; give --dtype f16 or f32, or convert");
  refused(go + "--model c --sparse off --gate-threshold 1", 2, "--sparse off");
  refused(go + "--model c --sparse maybe", 2, "--sparse");
  refused(go + "--model c --gate-threshold -1", 2, "--gate-threshold");
  refused(go + "--model c --gate-threshold nan", 2, "--gate-threshold");
  refused(go + "--model c --gate-threshold 1 --gates good", 2, "--gate");
  refused(go + "--model c --dtype bf16", 1, "is f16|--dtype f16");
  refused(go + "--model c --gates foreign", 1, "fingerprint 00|calibrate");
  refused(go + "--model m --gates foreign", 1, "fingerprint 00|calibrate");
  refused(go + "--model c --gates lacks", 1, "none for layer transformer.h.1.mlp.c_fc");
  refused(go + "--model c --gates more", 1, "no layer 'transformer.h.9.mlp.c_fc'");
  refused(go + "--model c --gates negative", 1, "c_fc|-1");
  refused(go + "--model c --gates text", 1, "c_fc|neither a threshold");
  refused(go + "--model c --gates many", 1, "keeps 17 inputs of 16");
  refused(go + "--model c --gates scale", 1, "column-norm");
  refused(go + "--model c --gates field", 1, "unknown field 'tresholds'");
  refused(go + "--model c --gates no_json", 1, "is not valid JSON");
  refused(go + "--model c --gates twice", 1, "\"a\" occurs twice");
  refused(go + "--model c --gates other", 1, "tessera-gates");
  refused(go + "--model c --gates absent", 1, "absent");
  refused("convert c d --format tiled-cbc", 1, "compressed already");
  refused("convert c d", 1, "is compressed; --format dense");
  refused("convert m d --format dense", 1, "nothing in it is compressed");
  refused("convert c d --format dense --dtype f16", 2, "leave out --dtype");
  refused("convert m d --format tca-bme --shard-mb 1", 2, "--shard-mb|one file|leave it out");
  refused("convert m c --format tca-bme", 1, "has weights already");
  refused("convert m c", 1, "has weights already");
  refused("convert m m --format tca-bme", 1, "m");
  refused("convert m d --format csr", 2, "--format");
  refused("convert nothing d --format tca-bme", 1, "nothing");
  refused("convert m/model.safetensors d --format tca-bme", 2, "--format|is a file|model directory");
  EXPECT_FALSE(fs::exists(at / "d"));
}

/// The bytes of the compressed file with a change, in folder "b" next to "c".
template <class Change>
void put_broken(const Workplace& at, Change&& change) {
  fs::remove_all(at / "b");
  fs::copy(at / "c", at / "b", fs::copy_options::recursive);
  std::string bytes = at.get("c/sparse.safetensors");
  change(bytes);
  at.put("b/sparse.safetensors", bytes);
}

TEST(SparseCommands, AFieldIsLeftOutOnTheWayBackToDenseWeightsToo) {
  const Workplace at;
  if (const std::string why = put_sparse(at); !why.empty()) GTEST_SKIP() << "skipped: " << why;
  json config = json::parse(at.get("c/config.json"));
  const json plain = config;
  config["note"] = {{"of", "the author"}};
  at.put("c/config.json", config.dump());
  expect_failure(at, "convert c d --format dense", 1, "note");
  said(at, "convert c d --format dense --ignore-field note");
  EXPECT_EQ(json::parse(at.get("d/config.json")), plain);
}

TEST(SparseCommands, RefuseDamagedFiles) {
  const Workplace at;
  if (const std::string why = put_sparse(at); !why.empty()) GTEST_SKIP() << "skipped: " << why;
  const auto refused = [&](const char* says) {
    const Outcome outcome =
        expect_failure(at, "generate --device cpu --prompt a --max-tokens 1 --model b", 1, says);
    EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
  };
  const std::string whole = at.get("c/sparse.safetensors");
  for (const double share : {0.0, 0.001, 0.3, 0.9, 0.999}) {
    put_broken(at, [&](std::string& bytes) { bytes.resize(size_t(double(bytes.size()) * share)); });
    refused("sparse.safetensors");
  }
  // A byte anywhere: of the header, or of a tensor, of which each has its checksum.
  for (size_t at_byte = 8; at_byte < whole.size(); at_byte += whole.size() / 40) {
    put_broken(at, [&](std::string& bytes) { bytes[at_byte] = char(bytes[at_byte] ^ 0x04); });
    refused("");
  }
  const auto replace = [](std::string& bytes, const std::string& from, const std::string& to) {
    const size_t found = bytes.find(from);
    ASSERT_NE(found, std::string::npos) << from;
    bytes.replace(found, from.size(), to);
  };
  put_broken(at,
             [&](std::string& bytes) { replace(bytes, "tessera_sparse\":\"2\"", "tessera_sparse\":\"3\""); });
  refused("has version 3|reads versions 1 and 2");
  put_broken(at, [&](std::string& bytes) { replace(bytes, "tessera_sparse", "tessera_spurse"); });
  refused("has no 'tessera_sparse'");
  put_broken(at, [&](std::string& bytes) { replace(bytes, "\\\"stored\\\":", "\\\"stared\\\":"); });
  refused("do not agree with their checksum");
  fs::remove_all(at / "b");
  fs::copy(at / "c", at / "b", fs::copy_options::recursive);
  std::string config = at.get("b/config.json");
  config.replace(config.find("\"n_layer\": 2"), 12, "\"n_layer\": 3");
  at.put("b/config.json", config);
  refused("lacks");
}

}  // namespace
}  // namespace tessera::cli::test
