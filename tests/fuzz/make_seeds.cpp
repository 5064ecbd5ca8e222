#include <cstdio>

#include "io/checkpoint.h"
#include "io/npy.h"

// fuzz_seeds FOLDER: proper small files to begin from, a folder a format.

using namespace tessera;

namespace {

void make_seeds(const std::string& folder) {
  for (const char* format : {"safetensors", "npy", "checkpoint"}) io::make_folder(folder + "/" + format);
  const Tensor weight = Tensor::from(std::vector<float>{1, 2, 3, 4, 5, 6}, {2, 3});
  io::NamedTensors all;
  int number = 0;
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16, DType::f8e4m3, DType::i64,
                            DType::i32, DType::u8, DType::boolean}) {
    const Tensor tensor = weight.to(dtype);
    all.emplace_back(name_of(dtype), tensor);
    const std::string name = "/" + std::to_string(number++);
    io::save_safetensors(folder + "/safetensors" + name, {{"x", tensor}, {"none", tensor.slice(0, 0, 0)}},
                         {{"key", "value"}});
    if (dtype != DType::bf16 && dtype != DType::f8e4m3) io::save_npy(folder + "/npy" + name, tensor);
  }
  io::save_safetensors(folder + "/safetensors/all", all);
  io::save_npy(folder + "/npy/scalar", Tensor::from(std::vector<double>{1}, {}));
  io::save(folder + "/checkpoint/weight", io::named("weight", weight), io::named("step", int64_t{7}));
  io::save(folder + "/checkpoint/all", io::named("weight", weight), io::named("step", int64_t{7}),
           io::named("rate", 0.5f), io::named("rng", Rng(1)), io::named("name", std::string("text")),
           io::named("order", std::vector<size_t>{2, 1}));
  io::save(folder + "/checkpoint/scalars", io::named("rate", 0.5f), io::named("flag", true));
}

}  // namespace

int main(int count, char** words) {
  if (count != 2) {
    std::fputs("usage: fuzz_seeds FOLDER\n", stderr);
    return 2;
  }
  try {
    make_seeds(words[1]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "fuzz_seeds: %s\n", error.what());
    return 1;
  }
}
