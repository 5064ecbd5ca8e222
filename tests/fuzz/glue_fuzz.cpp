#include <cstdlib>

#include "datasets/glue.h"
#include "runtime/error.h"

// The first byte chooses task and format, the rest is the file: an Error, or examples within the file's
// bytes.

using namespace tessera;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const datasets::GlueTask task = datasets::glue_tasks()[data[0] % 9].task;
  const char* const name = data[0] & 0x80 ? "fuzz.jsonl" : "fuzz.tsv";
  try {
    const io::InputFile file(name, {reinterpret_cast<const char*>(data) + 1, size - 1});
    const datasets::GlueData read = datasets::GlueData::read(task, file, data[0] & 0x40);
    size_t bytes = 0;
    for (int64_t i = 0; i < read.size(); ++i) {
      bytes += read.first(i).size() + read.second(i).size();
      const double most =
          datasets::glue_info(task).labels.empty() ? 5 : double(datasets::glue_info(task).classes() - 1);
      if (read.has_labels() && !(read.label(i) >= 0 && read.label(i) <= most)) std::abort();
    }
    if (bytes > size) std::abort();
  } catch (const Error&) {
  }
  return 0;
}
