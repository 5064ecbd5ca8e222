#pragma once

#include <sys/types.h>

#include <gtest/gtest.h>

#include <filesystem>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "tests/folder.h"
#include "tests/json_lines.h"

/// Runs the built command `tessera` as a user does: a process with arguments and a folder to stand in.
/// Nothing here has a time limit: that is ctest's, and a process ends with the test that started it.

namespace tessera::cli::test {

namespace fs = std::filesystem;

/// How a process ended, and what it said.
struct Outcome {
  int code = -1;           // the exit code; -1 if a signal ended it
  int signal = 0;          // that ended it
  double cpu_seconds = 0;  // of the process itself: not a matter of how busy the machine is
  std::string out, err;
};

/// A folder for one test, removed afterwards; the working directory of the commands.
struct Workplace : TemporaryFolder {
  /// Every path below, relative, sorted.
  std::vector<std::string> files() const;
};

/// A process that runs; killed if it outlives the object. Its standard input is the file "stdin" of the
/// workplace, if there is one.
class Process {
 public:
  /// `output`: what its standard output goes to, instead of the Outcome.
  Process(const Workplace& workplace, const std::vector<std::string>& arguments,
          const std::string& output = {});
  ~Process();
  Process(const Process&) = delete;
  void send(int signal) const;
  bool running();
  /// What it has written to its standard output so far.
  std::string out() const;
  /// Whether its main thread waits for something.
  bool waiting() const;
  /// After SIGSTOP: waits until the process is stopped. Returns false if it has ended instead.
  bool await_stop();
  Outcome wait();

 private:
  /// Collects the process if it has ended, or waits for that.
  bool ended(bool wait);
  pid_t id_ = -1;
  int status_ = 0;
  bool ended_ = false;
  double cpu_seconds_ = 0;
  const TemporaryFolder said_;
  const std::string out_ = said_ / "out", err_ = said_ / "err";
};

/// "train tnp --name ''": words at blanks, '' for an empty one.
std::vector<std::string> words_of(const std::string& line);
Outcome run(const Workplace& workplace, const std::string& line);

/// Between two looks at a state that another process brings about.
void wait_a_little();
/// Waits until `state()` is true or the process has ended. Returns whether it is still running.
template <class State>
bool wait_for(Process& process, State state) {
  while (process.running() && !state()) wait_a_little();
  return process.running();
}

/// Sets a variable of the environment, which processes inherit, while it lives.
class Variable {
 public:
  Variable(const char* name, const std::string& value);
  ~Variable();
  Variable(const Variable&) = delete;

 private:
  const char* const name_;
  std::optional<std::string> before_;
};

/// The first line that `text` has.
std::string first_line(const std::string& text);
/// Whether all parts, separated by '|', occur; a failure shows the first that does not, and the text.
testing::AssertionResult holds_all(const std::string& text, const std::string& parts);

/// Expects that it ended with status 0.
void expect_success(const Outcome& outcome);
/// The standard output of a command that must succeed.
std::string said(const Workplace& workplace, const std::string& line);

/// Expects that the command ends with that status and a message that holds all parts, separated by '|'.
Outcome expect_failure(const Workplace& workplace, const std::string& line, int code,
                       const std::string& says);

/// A command that must fail: its exit status, and parts of its message separated by '|'.
struct Failure {
  std::string line;
  int code;
  const char* says;
};
/// Expects that each fails so, in at most two lines, and writes nothing to standard output; `more` is
/// appended to those with status 1.
void expect_failures(const Workplace& workplace, std::initializer_list<Failure> failures,
                     const std::string& more = {});

/// The records of metrics.jsonl in the run folder.
std::vector<nlohmann::json> metrics_of(const Workplace& workplace, const std::string& folder);
/// How many there are so far, even if the last one is not complete.
int64_t steps_logged(const Workplace& workplace, const std::string& folder);
/// Each of them as JSON: the step, and of these values those that it has ("eval_" stands for all that begin
/// so).
std::vector<std::string> curve_of(const Workplace& workplace, const std::string& folder,
                                  std::initializer_list<const char*> values);

/// As if the run had been killed after that step, the last one that a checkpoint is kept of.
void cut_back(const Workplace& workplace, const std::string& folder, int64_t step);

/// The flags of a model that trains thousands of steps in seconds.
inline const std::string kTiny =
    " --device cpu --d-model 8 --d-ff 8 --n-head 1 --layers 1 --emb-hidden 8 --components 2 --m 4 --n 4 "
    "--batch-size 2 --eval-tasks 4";

}  // namespace tessera::cli::test
