#include "io/events_internal.h"
#include "runtime/error.h"

namespace tessera::io::events {
namespace {

[[noreturn]] void refuse() {
  fail_at(
      Site::here(),
      "events: this build has no libprotobuf, so it writes no TensorBoard files; install libprotobuf-dev and "
      "protobuf-compiler and build again");
}

}  // namespace

bool available() {
  return false;
}

std::string version_message(double) {
  refuse();
}

std::string scalar_message(std::string_view, int64_t, float, double) {
  refuse();
}

}  // namespace tessera::io::events
