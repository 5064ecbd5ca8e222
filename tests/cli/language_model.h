#pragma once

#include "models/gpt.h"
#include "pretrained/load.h"
#include "tests/cli/command.h"

namespace tessera::cli::test {

struct TinyModel {
  int64_t vocabulary = 260, positions = 64;
  double deviation = 0.4;  // 0: every token is as likely as every other
  DType dtype = DType::f32;
  std::string more = {};  // fields of config.json: "\"eos_token_id\": 3"
};

/// A folder `name` with a GPT-2 of random weights and a tokenizer of bytes (and one special token). Empty if
/// it could be made, else why this build cannot.
inline std::string put_model(const Workplace& at, const std::string& name, const TinyModel& tiny = {}) {
  Rng rng(5);
  const bool even = tiny.deviation == 0;
  const models::Gpt model({.vocabulary = tiny.vocabulary,
                           .positions = tiny.positions,
                           .d_model = 16,
                           .d_ff = 24,
                           .heads = 2,
                           .layers = 2,
                           .init_deviation = even ? 0.1 : tiny.deviation,
                           .dtype = tiny.dtype},
                          rng, Device::cpu());
  if (even) model.token.weight.detach().fill(0);
  const std::string folder = at / name;
  fs::remove_all(folder);
  pretrained::save(model, folder);
  if (!tiny.more.empty()) {
    std::string config = at.get(name + "/config.json");
    config.insert(config.find('{') + 1, tiny.more + ",");
    at.put(name + "/config.json", config);
  }
  at.put("text", "any text at all");
  const Outcome made = run(at, "tokenizer train --text text --kind byte --out " + name + "/tokenizer.json");
  return made.code == 0 ? "" : made.err;
}

}  // namespace tessera::cli::test
