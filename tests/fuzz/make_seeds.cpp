#include <cstdio>

#include "datasets/glue_synthetic.h"
#include "datasets/token_shard.h"
#include "io/checkpoint.h"
#include "io/npy.h"
#include "io/tokenizer/train.h"

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

/// Small tokenizers of the golden tests, and a file of each other reader.
void make_token_seeds(const std::string& folder) {
  for (const char* format : {"tokenizer_json", "tokenizer_files", "sentencepiece", "shard", "glue"})
    io::make_folder(folder + "/" + format);
  const std::string golden = std::string(TESSERA_TEST_DATA) + "/io/tokenizers/";
  constexpr uint64_t kMost = 1 << 20;
  for (const char* name : {"gpt2", "llama3", "bert", "llama2", "llama2_metaspace", "mixed", "word_level"})
    io::write_file(folder + "/tokenizer_json/" + name, io::read_file(golden + name + ".json", kMost));
  io::write_file(folder + "/tokenizer_json/character", io::character_tokenizer({"ab"}));
  io::write_file(folder + "/tokenizer_json/small",
                 R"({"model":{"type":"BPE","vocab":{"a":0,"b":1,"ab":2},"merges":["a b"]}})");
  io::write_file(folder + "/tokenizer_files/pair",
                 std::string(R"({"a":0,"b":1,"ab":2})") + '\0' + "#version: 0.2\na b\n");
  io::write_file(folder + "/tokenizer_files/lines", "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n##b\n");
  io::write_file(folder + "/sentencepiece/bpe", io::read_file(golden + "sp_bpe.model", kMost));
  for (const int64_t vocabulary : {100, 100'000}) {
    datasets::TokenShardWriter shard(vocabulary, std::string(32, '0'), 0);
    shard.add(std::vector<int32_t>{1, 2, 3, 0});
    shard.add(std::vector<int32_t>{99, 0});
    shard.write(folder + "/shard/" + std::to_string(vocabulary));
  }
  for (const datasets::GlueInfo& info : datasets::glue_tasks()) {
    datasets::write_synthetic_glue(info.task, folder + "/glue-files", {.train = 4, .dev = 1, .test = 2});
    const datasets::GlueData data(info.task, folder + "/glue-files", "train");
    io::write_file(folder + "/glue/" + info.name,
                   std::string(1, char(info.task)) + io::read_file(data.path(), kMost));
    // The fuzz target's first byte: the upper bit is JSONL, the rest modulo 9 the task (128 modulo 9 is 2).
    io::write_file(folder + "/glue/" + info.name + "-json",
                   std::string(1, char(0x80 + (int(info.task) + 7) % 9)) +
                       R"({"sentence":"a","sentence1":"b","sentence2":"c","question":"d","label":1})" + "\n");
  }
}

}  // namespace

int main(int count, char** words) {
  if (count != 2) {
    std::fputs("usage: fuzz_seeds FOLDER\n", stderr);
    return 2;
  }
  try {
    make_seeds(words[1]);
    make_token_seeds(words[1]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "fuzz_seeds: %s\n", error.what());
    return 1;
  }
}
