#include "pretrained/names.h"

#include "pretrained/config.h"

// Any bytes: an Error, or a configuration of which names and shapes can be listed, and which is written and
// read again.

using namespace tessera;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const auto config = pretrained::parse_config("fuzz", {reinterpret_cast<const char*>(data), size});
    std::visit(
        [](auto model) {
          pretrained::parse_config("again", pretrained::config_text(model));
          model.layers = std::min<int64_t>(model.layers, 2);  // the table of all would be slow, not large
          pretrained::name_table(model);
        },
        config.model);
  } catch (const Error&) {
  }
  return 0;
}
