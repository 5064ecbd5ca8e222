#pragma once

#include <unistd.h>

#include <algorithm>
#include <sstream>
#include <stop_token>

#include "tests/dist/launched.h"
#include "tests/errors.h"
#include "tests/place.h"

/// Launches `tessera train`; for sources that are built with TESSERA_PROGRAM.

namespace tessera::dist::test {

inline std::vector<std::string> words_of(const std::string& line) {
  std::istringstream in(line);
  std::vector<std::string> words;
  for (std::string word; in >> word;) words.push_back(word);
  return words;
}

/// The program and the words of the line.
inline std::vector<std::string> tessera(const std::string& line) {
  std::vector<std::string> words = words_of(line);
  words.insert(words.begin(), tessera::test::place("TESSERA_PROGRAM", TESSERA_PROGRAM));
  return words;
}

/// A text for language models: words in an order that repeats itself late.
inline void write_text(const TemporaryFolder& folder, int words) {
  std::ofstream out(folder / "text.txt");
  for (int i = 0; i < words; ++i) out << "word" << (i * i) % 97 << (i % 11 ? " " : ".\n");
}

inline Said train(const TemporaryFolder& folder, int ranks, const std::string& line) {
  return launched(folder, {.ranks = ranks, .command = tessera("train " + line)});
}

/// The same, and expects that the ranks end well.
inline Said train_to_end(const TemporaryFolder& folder, int ranks, const std::string& line) {
  const Said said = train(folder, ranks, line);
  EXPECT_EQ(said.end.code, 0) << line << "\n" << said.err << said.end.cause;
  return said;
}

/// Expects that `tessera train` ends so on that many ranks, with a message that has all the parts, and leaves
/// nothing in the folder `runs`.
inline void expect_refused(const TemporaryFolder& folder, int ranks, const std::string& line, int code,
                           std::initializer_list<const char*> parts) {
  const Said said = train(folder, ranks, line);
  EXPECT_EQ(said.end.code, code) << line << said.err;
  expect_parts(said.err, parts);
  EXPECT_FALSE(fs::exists(folder / "runs") && !fs::is_empty(folder / "runs")) << line;
}

/// Returns when a run in the folder `runs` has logged so many steps; false if it is stopped before. A
/// checkpoint is no such event: later ones replace it, and it may come and go between two looks.
inline bool await_steps(const std::stop_token& stop, const TemporaryFolder& folder, const std::string& run,
                        int64_t steps) {
  const std::string log = "runs/" + run + "/metrics.jsonl";
  while (!stop.stop_requested() && std::ranges::count(folder.get(log), '\n') < steps) ::usleep(1000);
  return !stop.stop_requested();
}

/// The bytes of a checkpoint of a run in the folder `runs`; "" if there is none.
inline std::string checkpoint(const TemporaryFolder& folder, const std::string& run, int step) {
  const std::string digits = std::to_string(step);
  return folder.get("runs/" + run + "/checkpoints/step-" + std::string(6 - digits.size(), '0') + digits +
                    ".safetensors");
}

}  // namespace tessera::dist::test
