#include <cstdlib>

#include "io/checkpoint.h"
#include "tests/fuzz/mutate.h"

// Any bytes: an Error, or a checkpoint whose values are proper. The mutator makes the checksums right again,
// three times in four, so that what lies after them is reached.

using namespace tessera;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const auto checkpoint =
        io::Checkpoint::read(io::InputFile("fuzz", {reinterpret_cast<const char*>(data), size}));
    int64_t step = 0;
    float rate = 0;
    Rng rng(0);
    std::string name;
    std::vector<size_t> order;
    Tensor weight = Tensor::zeros({2, 3}, DType::f32, Device::cpu());
    checkpoint.restore(io::named("step", step), io::named("rate", rate), io::named("rng", rng),
                       io::named("name", name), io::named("order", order), io::named("weight", weight));
  } catch (const Error&) {
  }
  return 0;
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t limit, unsigned seed) {
  size = fuzz::mutate_safetensors(data, size, limit, seed);
  return seed % 4 == 0 ? size : fuzz::seal(data, size);
}
