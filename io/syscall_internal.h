#pragma once

#include <cerrno>
#include <cstddef>
#include <string>
#include <system_error>

namespace tessera::io {

/// One call may be asked for at most this many bytes: Linux itself stops at 2 GiB.
inline constexpr size_t kLargestCall = size_t{1} << 30;

/// Calls `f` again for as long as a signal interrupts it.
template <class F>
auto retry(F&& f) {
  for (;;) {
    const auto result = f();
    if (result != -1 || errno != EINTR) return result;
  }
}

/// "No space left on device".
inline std::string text_of(int error) {
  return std::generic_category().message(error);
}

}  // namespace tessera::io
