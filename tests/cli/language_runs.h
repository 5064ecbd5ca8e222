#pragma once

#include <string>

#include "tests/cli/command.h"

/// Texts and a small model for tests of commands that train language models.

namespace tessera::cli::test {

inline void put_texts(const Workplace& at) {
  std::string text;
  for (int i = 0; i < 400; ++i)
    text += "Clause " + std::to_string(i * 7 % 31) + ": everyone may copy this, without charge.\n";
  at.put("a.txt", text);
  at.put("b.txt", text.substr(0, 3000) + "caf\xC3\xA9 \xE4\xB8\xAD\n" + text.substr(0, 900));
}

/// Few words, which a small model learns in ten steps.
inline void put_clauses(const Workplace& at, int clauses = 60) {
  std::string text;
  for (int i = 0; i < clauses; ++i) text += "clause " + std::to_string(i) + ": a copy is free\n";
  at.put("a.txt", text);
}
inline const std::string kOnClauses =
    " --text a.txt --device cpu --quiet --sample-tokens 0 --log-every 1 --ngram 0 --layers 2 --d-model 32 "
    "--n-head 2 --d-ff 64 --length 16";
inline const std::string kTrainOnClauses = "train llama --lr 0.01 --batch-size 4" + kOnClauses;

/// A model that takes a hundred steps in a second.
inline const std::string kModel =
    " --device cpu --layers 1 --d-model 16 --heads 2 --d-ff 32 --length 16 --batch 2 --quiet --log-every 1 "
    "--eval-tokens 64 --sample-tokens 8";
inline const std::string kFromText = " --text a.txt b.txt" + kModel;

}  // namespace tessera::cli::test
