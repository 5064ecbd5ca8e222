#include <cstdio>

#include "datasets/glue_synthetic.h"
#include "datasets/token_shard.h"
#include "io/checkpoint.h"
#include "io/npy.h"
#include "io/tokenizer/train.h"
#include "tests/io/torch_bytes.h"

// fuzz_seeds FOLDER: proper small files to begin from, a folder a format.

using namespace tessera;

namespace {

void make_seeds(const std::string& folder) {
  for (const char* format : {"safetensors", "npy", "checkpoint", "unpickle", "torch", "index", "config"})
    io::make_folder(folder + "/" + format);
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

void make_weight_seeds(const std::string& folder) {
  using namespace io::test;
  using namespace io::test::pickle;
  const auto put = [&](const std::string& name, const std::string& bytes) {
    io::write_file(folder + "/" + name, bytes);
  };
  const std::string one = program({{"x", matrix()}});
  const std::string parameter =
      global("torch._utils", "_rebuild_parameter") + tuple({matrix(), kTrue, ordered_dict()}) + kReduce;
  const std::string rich = kProto + ordered_dict() + std::string("q\0", 2) + kMark + text("p") + parameter +
                           text("model") + kEmptyDict + text("w") + matrix() + kSetItem + text("epoch") +
                           integer(3) + text("lr") + "G" + std::string(8, '\0') + text("pair") + integer(1) +
                           "K\1\x86" + text("half") + "M\1\1" + std::string("r\5\0\0\0", 5) + text("again") +
                           std::string("j\5\0\0\0", 5) + kSetItems + kEmptyDict + text("_metadata") +
                           ordered_dict() + kSetItem + kBuild + kStop;
  put("unpickle/one", one);
  put("unpickle/rich", rich);
  put("torch/one", torch_bytes(one));
  put("torch/rich", torch_bytes(rich));
  put("index/small",
      R"({"metadata": {"total_size": 1, "a": [null, true]}, "weight_map": {"x": "f.bin", "y": "g"}})");
  put("config/gpt2",
      R"({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "torch_dtype": "float16"})");
  put("config/opt",
      R"({"model_type": "opt", "hidden_size": 8, "num_attention_heads": 2, "word_embed_proj_dim": 8})");
  put("config/llama",
      R"({"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1,
    "rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16, "rope_theta": 1e5}, "eos_token_id": [1, 2], "bos_token_id": 0})");
  put("config/yarn",
      R"({"model_type": "llama", "rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": 32}})");
  put("config/qwen2",
      R"({"model_type": "qwen2", "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1,
    "num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 9,
    "use_sliding_window": true})");
  put("config/phi3",
      R"({"model_type": "phi3", "hidden_size": 8, "num_attention_heads": 1, "partial_rotary_factor": 0.5,
    "original_max_position_embeddings": 16, "rope_scaling": {"type": "longrope", "short_factor": [1, 1.5],
    "long_factor": [2, 3]}})");
  put("config/bert", R"({"model_type": "bert", "architectures": ["BertForSequenceClassification"],
    "id2label": {"0": "a", "1": "b"}, "hidden_size": 8, "num_attention_heads": 2})");
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
    make_weight_seeds(words[1]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "fuzz_seeds: %s\n", error.what());
    return 1;
  }
}
