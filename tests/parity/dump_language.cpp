#include "tests/parity/language_run.h"

#include <cstdio>

using namespace tessera;

/// Runs a model that transformers wrote and writes what it computes, for transformers to repeat:
///   dump_language FOLDER OUT.safetensors
/// FOLDER has config.json, weights and batch.safetensors; see language_run.h. The weights as loaded are saved
/// again into FOLDER/saved (one file) and FOLDER/sharded (several).

namespace {

template <class Model>
void dump(const Model& model, const std::string& folder, const std::string& out) {
  pretrained::save(model, folder + "/saved");
  pretrained::save(model, folder + "/sharded", {.shard_bytes = 20'000});
  io::save_safetensors(out, parity::run(model, folder));
}

}  // namespace

int main(int count, char** words) try {
  if (count != 3) {
    std::fprintf(stderr, "usage: dump_language FOLDER OUT.safetensors\n");
    return 2;
  }
  const std::string folder = words[1], out = words[2];
  Rng rng(1);
  const Device cpu = Device::cpu();
  const std::string type = pretrained::read_config(folder).type;
  if (type == "llama")
    dump(pretrained::load_llama(folder, rng, cpu), folder, out);
  else if (type == "bert" || type == "roberta")
    dump(pretrained::load_bert(folder, rng, cpu), folder, out);
  else
    dump(pretrained::load_gpt(folder, rng, cpu), folder, out);
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
