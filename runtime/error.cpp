#include "runtime/error.h"

#include "runtime/call_site.h"

namespace tessera {

Error::Error(const std::string& message, const char* file, int line)
    : std::runtime_error(message + CallScope::current().text()),
      file_(file),
      line_(line),
      message_length_(message.size()),
      module_(CallScope::current().module ? CallScope::current().module : "") {}

std::string message_of(const std::exception& error) {
  const auto* const own = dynamic_cast<const Error*>(&error);
  return own ? own->message() : error.what();
}

}  // namespace tessera
