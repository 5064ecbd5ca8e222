#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <iostream>
#include <system_error>

#include "cli/commands.h"
#include "cli/explain.h"
#include "comm/status.h"
#include "report/facts.h"
#include "report/progress.h"
#include "runtime/error.h"
#include "runtime/interrupt.h"
#include "runtime/parallel.h"

namespace tessera::cli {
namespace {

/// The one line on why the command failed; the launcher reads it, too.
void tell_error(const std::string& message) {
  comm::Status& status = comm::own_status();
  comm::copy_text(status.error, sizeof(status.error), message);
  report::tell("tessera: " + message + "\n");
}

/// What was printed may still be in a buffer, and the disk full: then a command has not done what it was
/// asked for, whatever `code` says.
int checked_output(int code) {
  errno = 0;
  std::cout.flush();
  const bool flushed = std::fflush(stdout) == 0 && !std::ferror(stdout) && std::cout.good();
  if (flushed) return code;
  report::tell(fmt::format("tessera: write: the standard output: {}\n",
                           errno != 0 ? std::strerror(errno) : "only a part could be written"));
  return code == 0 ? 1 : code;
}

/// Without them the first file that is opened would be the standard output, and get what is printed.
void occupy_standard_files() {
  for (const int file : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (::fcntl(file, F_GETFD) < 0) ::open("/dev/null", file == STDERR_FILENO ? O_WRONLY : O_RDONLY);
}

int run(int argc, char** argv) {
  occupy_standard_files();
  try {
    cpu_threads();  // the flags' defaults may ask for it
  } catch (const Error& error) {
    tell_error(error.message());
    return 2;
  }
  std::signal(SIGXFSZ, SIG_IGN);  // a file beyond the limit is an error like a full disk, not the end
  CLI::App app{"tessera: train, run, prune and measure deep learning models and operators", "tessera"};
  app.set_version_flag("--version",
                       std::string("tessera ") + report::kVersion + " (" + report::kRevision + ")");
  app.require_subcommand(1);
  app.formatter(compact_help());
  app.option_defaults()->always_capture_default();
  Action action;
  add_doctor(app, action);
  add_train(app, action);
  add_eval(app, action);
  add_generate(app, action);
  add_op(app, action);
  add_bench(app, action);
  add_plan(app, action);
  add_report(app, action);
  add_study(app, action);
  add_tokenizer(app, action);
  add_data(app, action);
  add_convert(app, action);
  add_prune(app, action);
  add_calibrate(app, action);
  add_sparsify(app, action);
  add_sparsity(app, action);
  add_launch(app, action);
  be_strict(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& wanted) {  // --help, --version
    return checked_output(app.exit(wanted));
  } catch (const CLI::ParseError& error) {
    tell_error(explain(app, error, std::vector<std::string>(argv + 1, argv + argc)));
    return 2;
  }
  try {
    return checked_output(action());
  } catch (const UsageError& error) {
    tell_error(error.what());
    return 2;
  } catch (const Interrupted& interrupted) {
    tell_error(interrupted.message() + " before there was a result to save");
    return 128 + interrupted.signal();
  } catch (const Error& error) {
    const std::string layer = error.module();
    tell_error(error.message() + (layer.empty() ? "" : " (in " + layer + ")"));
    return 1;
  } catch (const std::system_error& error) {  // of fmt::print, which does not say what it could not write to
    tell_error(std::ferror(stdout) ? "write: the standard output: " + error.code().message() : error.what());
    return 1;
  } catch (const std::exception& error) {
    tell_error(error.what());
    return 1;
  }
}

}  // namespace
}  // namespace tessera::cli

int main(int argc, char** argv) {
  return tessera::cli::run(argc, argv);
}
