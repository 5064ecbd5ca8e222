#pragma once

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "tests/folder.h"
#include "train/language_job.h"

/// A small language model, and text for it.

namespace tessera::train {

inline LanguageSettings small_language_job(bool llama = false) {
  LanguageSettings job;
  if (llama)
    job.model = models::LlamaConfig{.vocabulary = 257,
                                    .positions = 16,
                                    .d_model = 16,
                                    .d_ff = 20,
                                    .heads = 4,
                                    .kv_heads = 2,
                                    .layers = 2};
  else
    job.model = models::GptConfig{
        .vocabulary = 257, .positions = 16, .d_model = 16, .d_ff = 24, .heads = 2, .layers = 2};
  job.length = 16, job.batch = 2, job.steps = 20, job.warmup = 2;
  return job;
}

inline std::string language_text(int lines) {
  std::string text;
  for (int i = 0; i < lines; ++i) text += "line " + std::to_string(i * 7 % 23) + " is free, as in speech\n";
  return text;
}

/// Byte tokens of two texts, the second short.
inline LanguageData small_language_data(const TemporaryFolder& root, bool documents = false) {
  const std::string folder = root / "data";
  if (!std::filesystem::exists(folder)) {
    std::ofstream(root / "a.txt") << language_text(60);
    std::ofstream(root / "b.txt") << language_text(9);
    write_language_data(
        {.files = {root / "a.txt", root / "b.txt"}, .tokenizer = {}, .kind = "byte", .validation = 0.2},
        folder);
  }
  return LanguageData(folder, folder, 16, documents);
}

/// The mean loss of all tokens but the first, in nats.
inline double language_loss(LanguageJob& session, std::span<const int64_t> tokens) {
  return session.measure(std::vector<eval::PerplexityWindow>{{tokens, 1}}).nats;
}

inline datasets::TokenBatch language_batch(const LanguageData& data, std::vector<int64_t> windows) {
  return data.train().batch(windows);
}

}  // namespace tessera::train
