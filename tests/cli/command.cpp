#include "tests/cli/command.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <sstream>
#include <stdexcept>

#include "tests/place.h"

namespace tessera::cli::test {
std::vector<std::string> Workplace::files() const {
  std::vector<std::string> found;
  for (const auto& entry : fs::recursive_directory_iterator(path()))
    found.push_back(fs::relative(entry.path(), path()).string());
  std::sort(found.begin(), found.end());
  return found;
}

Process::Process(const Workplace& workplace, const std::vector<std::string>& arguments,
                 const std::string& output) {
  std::string program = tessera::test::place("TESSERA_PROGRAM", TESSERA_PROGRAM);
  if (program.find('/') != std::string::npos)
    program = fs::absolute(program).string();  // it stands elsewhere
  std::vector<char*> argv{program.data()};
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  const std::string stdin_file = workplace / "stdin",
                    input = fs::exists(stdin_file) ? stdin_file : "/dev/null";
  id_ = ::fork();
  if (id_ < 0) throw std::runtime_error("fork failed");
  if (id_ > 0) return;
  const int in = ::open(input.c_str(), O_RDONLY);
  const int out = ::open((output.empty() ? out_ : output).c_str(), O_WRONLY | O_CREAT, 0600),
            err = ::open(err_.c_str(), O_WRONLY | O_CREAT, 0600);
  ::dup2(in, 0), ::dup2(out, 1), ::dup2(err, 2);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);                          // also if ctest ends the test
  ::signal(SIGHUP, SIG_DFL);                                   // tests may run under nohup
  ::setenv("ASAN_OPTIONS", "allocator_may_return_null=1", 0);  // as an allocator without sanitizers does
  if (::chdir(workplace.path().c_str()) == 0) ::execvp(program.c_str(), argv.data());
  ::_exit(127);
}

Process::~Process() {
  if (ended_) return;
  send(SIGKILL);
  ::waitpid(id_, nullptr, 0);
}

void Process::send(int signal) const {
  ::kill(id_, signal);
}

bool Process::ended(bool wait) {
  if (ended_) return true;
  rusage used{};
  pid_t found = 0;
  do found = ::wait4(id_, &status_, wait ? 0 : WNOHANG, &used);
  while (found < 0 && errno == EINTR);
  if (found != id_) return false;
  cpu_seconds_ = double(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
                 double(used.ru_utime.tv_usec + used.ru_stime.tv_usec) * 1e-6;
  return ended_ = true;
}

bool Process::running() {
  return !ended(false);
}

std::string Process::out() const {
  return get(out_);
}

bool Process::waiting() const {
  const std::string state = get("/proc/" + std::to_string(id_) + "/stat");  // "<id> (<name>) S ..."
  const size_t name = state.rfind(") ");
  return name != std::string::npos && state.compare(name + 2, 1, "S") == 0;
}

bool Process::await_stop() {
  siginfo_t info{};
  while (::waitid(P_PID, id_t(id_), &info, WSTOPPED | WEXITED | WNOWAIT) < 0)
    if (errno != EINTR) return false;
  return info.si_code == CLD_STOPPED;
}

Outcome Process::wait() {
  if (!ended(true)) throw std::runtime_error("wait4 failed");
  Outcome outcome;
  if (WIFEXITED(status_)) outcome.code = WEXITSTATUS(status_);
  if (WIFSIGNALED(status_)) outcome.signal = WTERMSIG(status_);
  outcome.cpu_seconds = cpu_seconds_;
  outcome.out = get(out_), outcome.err = get(err_);
  return outcome;
}

std::vector<std::string> words_of(const std::string& line) {
  std::vector<std::string> words;
  std::istringstream text(line);
  for (std::string word; text >> word;) words.push_back(word == "''" ? "" : word);
  return words;
}

Outcome run(const Workplace& workplace, const std::string& line) {
  return Process(workplace, words_of(line)).wait();
}

void wait_a_little() {
  ::usleep(200);
}

Variable::Variable(const char* name, const std::string& value) : name_(name) {
  if (const char* before = std::getenv(name)) before_ = before;
  ::setenv(name, value.c_str(), 1);
}

Variable::~Variable() {
  before_ ? ::setenv(name_, before_->c_str(), 1) : ::unsetenv(name_);
}

std::string first_line(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

testing::AssertionResult holds_all(const std::string& text, const std::string& parts) {
  std::istringstream list(parts);
  for (std::string part; std::getline(list, part, '|');)
    if (text.find(part) == std::string::npos)
      return testing::AssertionFailure() << "there is no \"" << part << "\" in:\n" << text;
  return testing::AssertionSuccess();
}

void expect_success(const Outcome& outcome) {
  EXPECT_EQ(outcome.code, 0) << "signal " << outcome.signal << "\n" << outcome.out << outcome.err;
}

std::string said(const Workplace& workplace, const std::string& line) {
  const Outcome outcome = run(workplace, line);
  EXPECT_EQ(outcome.code, 0) << line << "\n" << outcome.out << outcome.err;
  return outcome.out;
}

Outcome expect_failure(const Workplace& workplace, const std::string& line, int code,
                       const std::string& says) {
  Outcome outcome = run(workplace, line);
  EXPECT_EQ(outcome.code, code) << line << "\n" << outcome.out << outcome.err;
  EXPECT_TRUE(holds_all(outcome.err, says)) << line;
  return outcome;
}

void expect_failures(const Workplace& workplace, std::initializer_list<Failure> failures,
                     const std::string& more) {
  for (const Failure& one : failures) {
    const Outcome outcome =
        expect_failure(workplace, one.line + (one.code == 1 ? more : ""), one.code, one.says);
    EXPECT_EQ(outcome.out, "") << one.line;
    EXPECT_LE(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 2) << one.line << ": " << outcome.err;
  }
}

std::vector<nlohmann::json> metrics_of(const Workplace& workplace, const std::string& folder) {
  return json_lines(workplace.get(folder + "/metrics.jsonl"));
}

int64_t steps_logged(const Workplace& workplace, const std::string& folder) {
  const std::string text = workplace.get(folder + "/metrics.jsonl");
  return std::count(text.begin(), text.end(), '\n');
}

std::vector<std::string> curve_of(const Workplace& workplace, const std::string& folder,
                                  std::initializer_list<const char*> values) {
  std::vector<std::string> lines;
  for (const nlohmann::json& record : metrics_of(workplace, folder)) {
    nlohmann::json kept = {{"step", record.at("step")}};
    for (const auto& [name, value] : record.items())
      for (const std::string wanted : values)
        if (wanted.back() == '_' ? name.starts_with(wanted) : name == wanted) kept[name] = value;
    lines.push_back(kept.dump());
  }
  return lines;
}

void cut_back(const Workplace& workplace, const std::string& folder, int64_t step) {
  for (const auto& entry : fs::directory_iterator(workplace / (folder + "/checkpoints")))
    if (std::stoll(entry.path().stem().string().substr(5)) > step) fs::remove(entry.path());
  fs::remove(workplace / (folder + "/report.html"));
}

}  // namespace tessera::cli::test
