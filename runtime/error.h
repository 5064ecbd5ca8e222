#pragma once

#include <concepts>
#include <locale>
#include <sstream>
#include <stdexcept>
#include <string>

/// Errors. The caller erred: `check(cond, "matmul: ", a, " does not match ", b)` throws `tessera::Error` with
/// the file and line of the check. We erred: `assert`. The machine erred: `check(cudaError_t)` in
/// runtime/cuda.h. The library does not print, exit or abort; commands do (CONTRIBUTING.md lists the
/// exceptions).

namespace tessera {

/// The exception type of the library. `what()` is one line: what failed, which object, expected and got, a
/// next step, and, if an operator, a layer or the tape was called, the user's line that called it and the
/// part of the model (runtime/call_site.h).
class Error : public std::runtime_error {
 public:
  Error(const std::string& message, const char* file, int line);
  /// what() without the user's line and the part of the model: for commands, whose users have no source.
  std::string message() const { return std::string(what(), message_length_); }
  /// The part of the model that failed: "blocks.3.mlp.down", "" if it is not known.
  const char* module() const { return module_; }
  /// The test that failed.
  const char* file() const { return file_; }
  int line() const { return line_; }

 private:
  const char* file_;
  int line_;
  size_t message_length_;
  const char* module_;
};

/// The device or the host could not provide the requested memory. The message names what was asked, what is
/// held by whom, and what to try; the allocator is unharmed and the caller may retry with less.
class OutOfMemory : public Error {
 public:
  using Error::Error;
};

/// What other ranks and users without sources are told of an exception: Error::message(), or else what().
std::string message_of(const std::exception& error);

/// A place in the source: the default argument of a function names its caller.
/// Braces make none, so that `sum(x, {0, 1})` is a call with two dimensions.
struct Site {
  const char* file = nullptr;
  int line = 0;
  explicit constexpr Site() = default;
  template <std::same_as<const char*> File>
  explicit constexpr Site(File file, int line) : file(file), line(line) {}
  static Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return Site(file, line);
  }
};

/// A bool that remembers where it was tested.
struct Condition {
  template <std::same_as<bool> B>
  Condition(B value, const char* file = __builtin_FILE(), int line = __builtin_LINE())
      : value(value), site{file, line} {}
  bool value;
  Site site;
};

/// A stream for messages, whose numbers read the same in every std::locale::global.
class MessageStream : public std::ostringstream {
 public:
  MessageStream() { imbue(std::locale::classic()); }
};

template <class... Parts>
[[noreturn]] void fail_at(Site site, const Parts&... parts) {
  MessageStream text;
  (text << ... << parts);
  throw Error(text.str(), site.file, site.line);
}

/// Throws `Error` with the parts written one after the other, unless the condition holds.
template <class... Parts>
void check(Condition condition, const Parts&... parts) {
  if (!condition.value) [[unlikely]]
    fail_at(condition.site, parts...);
}

}  // namespace tessera
