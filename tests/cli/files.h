#pragma once

#include <nlohmann/json.hpp>
#include <ostream>
#include <string>
#include <vector>

#include "io/safetensors.h"
#include "tests/cli/command.h"

/// Files for tests of commands that read them.

namespace tessera::cli::test {

inline constexpr const char* kLfsPointer =
    "version https://git-lfs.github.com/spec/v1\noid "
    "sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\n"
    "size 12345\n";

inline Tensor ramp(const Shape& shape, DType dtype = DType::f32) {
  std::vector<float> values(size_t(shape.count()));
  for (size_t i = 0; i < values.size(); ++i) values[i] = float(i) / 4 - 1;
  return Tensor::from(values, shape).to(dtype);
}

inline void put_tensors(const Workplace& at, const std::string& name, const io::NamedTensors& tensors) {
  io::save_safetensors(at / name, tensors);
}

/// Leaves the first `positions` of a BERT model directory.
inline void limit_positions(const Workplace& at, const std::string& model, int64_t positions) {
  const std::string path = at / (model + "/model.safetensors"),
                    table = "bert.embeddings.position_embeddings.weight";
  auto weights = io::load_safetensors(path);
  weights.at(table) = weights.at(table).slice(0, 0, positions);
  io::save_safetensors(path, weights);
  nlohmann::json config = nlohmann::json::parse(at.get(model + "/config.json"));
  config["max_position_embeddings"] = positions;
  at.put(model + "/config.json", config.dump());
}

/// A file's text, and parts of what is said of it, separated by '|'.
struct BadText {
  const char* name;
  const char* text;
  const char* says;
};
inline void PrintTo(const BadText& bad, std::ostream* out) {
  *out << bad.name;
}

}  // namespace tessera::cli::test
