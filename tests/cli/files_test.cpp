#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <cstdlib>
#include <functional>
#include <nlohmann/json.hpp>

#include "io/safetensors.h"
#include "runtime/device.h"
#include "tests/cli/command.h"
#include "tests/place.h"

// Files that cannot be what the command line says they are: exit code 1, one message that begins with what
// failed and names the file, and no output file.

namespace tessera::cli::test {
namespace {

using nlohmann::json;

constexpr const char* kLfsPointer =
    "version https://git-lfs.github.com/spec/v1\noid "
    "sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\n"
    "size 12345\n";

std::string header_of(const std::string& header, size_t bytes = 0) {
  std::string text(8, '\0');
  for (size_t i = 0; i < 8; ++i) text[i] = char(header.size() >> (8 * i) & 255);
  return text + header + std::string(bytes, '\0');
}

Tensor ramp(const Shape& shape, DType dtype = DType::f32) {
  std::vector<float> values(size_t(shape.count()));
  for (size_t i = 0; i < values.size(); ++i) values[i] = float(i) / 4 - 1;
  return Tensor::from(values, shape).to(dtype);
}

void put_tensors(const Workplace& at, const std::string& name, const io::NamedTensors& tensors) {
  io::save_safetensors((at / name).string(), tensors);
}

/// What the table of operator files below begins with.
void put_operator_files(const Workplace& at) {
  put_tensors(at, "good.safetensors", {{"x", ramp({2, 3})}});
  const std::string good = at.get("good.safetensors");
  at.put("empty.safetensors", "");
  at.put("cut.safetensors", good.substr(0, good.size() - 3));
  at.put("head.safetensors", good.substr(0, 20));
  at.put("five.safetensors", good.substr(0, 5));
  at.put("long.safetensors", good + "xyz");
  at.put("garbage.safetensors", std::string(200, '\xA7'));
  at.put("lfs.safetensors", kLfsPointer);
  at.put("page.safetensors", "<!DOCTYPE html><html><body>404</body></html>");
  at.put("hole.safetensors", header_of(R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})", 12));
  at.put("unknown.safetensors", header_of(R"({"x":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}})", 1));
  at.put("wrap.safetensors",
         header_of(R"({"x":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}})"));
  fs::create_directory(at / "folder.safetensors");
  put_tensors(at, "ints.safetensors", {{"x", ramp({2, 3}, DType::i32)}});
  put_tensors(at, "misspelt.safetensors", {{"xx", ramp({2, 3})}});
  put_tensors(at, "more.safetensors", {{"x", ramp({2, 3})}, {"extra", ramp({1})}});
  put_tensors(at, "d_shape.safetensors", {{"x", ramp({2, 3})}, {"d_y", ramp({3, 2})}});
  put_tensors(at, "d_dtype.safetensors", {{"x", ramp({2, 3})}, {"d_y", ramp({2, 3}, DType::i32)}});
  put_tensors(at, "d_good.safetensors", {{"x", ramp({2, 3})}, {"d_y", ramp({2, 3})}});
  put_tensors(at, "control.safetensors", {{"x", ramp({2, 3})}, {"a\nb", ramp({1})}});
  put_tensors(at, "rope_plain.safetensors", {{"x", ramp({1, 2, 1, 2})}, {"table", ramp({5, 2})}});
  put_tensors(at, "rope.safetensors",
              {{"x", ramp({1, 2, 1, 2})},
               {"table", ramp({5, 2})},
               {"positions", Tensor::from(std::vector<int64_t>{0, 1}, {2})}});
  put_tensors(at, "cache.safetensors",
              {{"qkv", ramp({1, 1, 3, 2})},
               {"table", ramp({5, 2})},
               {"past", Tensor::full({1}, 3, DType::i64, Device::cpu())},
               {"keys", ramp({1, 3, 1, 2})},
               {"values", ramp({1, 3, 1, 2})}});
  ASSERT_EQ(::mkfifo((at / "pipe").c_str(), 0600), 0);
  put_tensors(at, "linear.safetensors", {{"x", ramp({2, 3})}, {"weight", ramp({4, 3})}});
  put_tensors(at, "factor.safetensors", {{"a", ramp({2, 2}, DType::f64)}, {"shift", ramp({2})}});
  put_tensors(at, "linear_half.safetensors", {{"x", ramp({2, 3})}});
  put_tensors(at, "linear_shape.safetensors", {{"x", ramp({2, 3})}, {"weight", ramp({4, 5})}});
  put_tensors(at, "linear_dtype.safetensors", {{"x", ramp({2, 3})}, {"weight", ramp({4, 3}, DType::bf16)}});
  put_tensors(at, "gather_float.safetensors", {{"x", ramp({2, 3})}, {"indices", ramp({2})}});
  put_tensors(at, "gather_far.safetensors",
              {{"x", ramp({2, 3})}, {"indices", Tensor::full({2}, 7, DType::i64, Device::cpu())}});
  put_tensors(at, "norms.safetensors", {{"norms", ramp({3})}});
  put_tensors(at, "norms_square.safetensors", {{"norms", ramp({2, 3})}});
  const auto number = [](double value) { return Tensor::full({1}, value, DType::i64, Device::cpu()); };
  put_tensors(at, "norms_n.safetensors", {{"norms", ramp({3})}, {"device_n", number(2)}});
  put_tensors(at, "norms_float.safetensors", {{"norms", ramp({3})}, {"device_n", ramp({1})}});
  put_tensors(at, "norms_far.safetensors", {{"norms", ramp({3})}, {"device_rows", number(1LL << 32)}});
  put_tensors(at, "norms_two.safetensors",
              {{"norms", ramp({3})}, {"device_n", Tensor::full({2}, 1, DType::i64, Device::cpu())}});
  const auto chosen = [](std::vector<int64_t> rows) { return Tensor::from(rows, {int64_t(rows.size())}); };
  put_tensors(at, "chosen_back.safetensors", {{"x", ramp({2, 3})}, {"indices", chosen({1, 0})}});
  put_tensors(at, "chosen_far.safetensors", {{"x", ramp({2, 3})}, {"indices", chosen({(1LL << 32) + 1})}});
  put_tensors(at, "chosen_scales.safetensors",
              {{"x", ramp({2, 3})}, {"indices", chosen({0, 1})}, {"scales", ramp({3})}});
}

struct BadFile {
  const char* line;
  const char* says;
};
void PrintTo(const BadFile& bad, std::ostream* out) {
  *out << bad.line;
}

constexpr BadFile kBadOperatorFiles[] = {
    {"op relu --in none.safetensors --out o", "none.safetensors|no file"},
    {"op relu --in nowhere/x.safetensors --out o", "nowhere/x.safetensors"},
    {"op relu --in folder.safetensors --out o", "folder.safetensors|directory"},
    {"op relu --in /dev/zero --out o", "/dev/zero"},
    {"op relu --in empty.safetensors --out o", "empty.safetensors|empty"},
    {"op relu --in cut.safetensors --out o", "cut.safetensors|bytes"},
    {"op relu --in head.safetensors --out o", "head.safetensors|bytes"},
    {"op relu --in five.safetensors --out o", "five.safetensors"},
    {"op relu --in long.safetensors --out o", "long.safetensors|bytes"},
    {"op relu --in garbage.safetensors --out o", "garbage.safetensors"},
    {"op relu --in lfs.safetensors --out o", "lfs.safetensors|Git LFS"},
    {"op relu --in page.safetensors --out o", "page.safetensors|HTML"},
    {"op relu --in hole.safetensors --out o", "hole.safetensors|x"},
    {"op relu --in unknown.safetensors --out o", "unknown.safetensors|F4"},
    {"op relu --in wrap.safetensors --out o", "wrap.safetensors|x"},
    {"op relu --in ints.safetensors --out o", "relu|i32|cpu|expected f64, f32"},
    {"op relu --in misspelt.safetensors --out o", "misspelt.safetensors|\"xx\"|did you mean \"x\"?"},
    {"op relu --in more.safetensors --out o", "more.safetensors|\"extra\"|not an input of relu"},
    {"op relu --in d_good.safetensors --out o", "d_good.safetensors|\"d_y\"|not an input of relu|--grad"},
    {"op relu --in good.safetensors --out o --grad", "good.safetensors|--grad needs \"d_y\"|[2, 3]"},
    {"op split --in good.safetensors --out o --set sizes=0,1,1 --grad",
     "needs \"d_a\" f32[0, 3], or \"d_b\" f32[1, 3], or \"d_c\""},
    {"op relu --in d_shape.safetensors --out o --grad", "d_shape.safetensors|\"d_y\"|[3, 2]|[2, 3]"},
    {"op relu --in d_dtype.safetensors --out o --grad", "d_dtype.safetensors|\"d_y\"|i32|f32"},
    {"op linear --in linear_half.safetensors --out o", "linear|\"weight\"|[out, in]|missing"},
    {"op linear --in linear_shape.safetensors --out o", "linear|weight [4, 5]|expected [out, 3]"},
    {"op linear --in linear_dtype.safetensors --out o", "linear|\"weight\"|bf16|f32"},
    {"op linear --in linear.safetensors --out o --set weight_grad=none",
     "linear: weight_grad is of a slice; set slice=first"},
    {"op linear --in linear.safetensors --out o --set slice=first",
     "linear: slice=first needs a number of rows; set rows or share"},
    {"op linear --in linear.safetensors --out o --set slice=first --set rows=-1", "linear: rows is -1"},
    {"op linear --in linear.safetensors --out o --set slice=first --set rows=1 --set share=0.5",
     "linear: rows is 1 and share 0.5; give one of the two"},
    {"op linear --in linear.safetensors --out o --set slice=first --set rows=1 --set threshold=2",
     "linear: threshold is of slice=threshold, but slice is first"},
    {"op linear --in linear.safetensors --out o --set slice=threshold --set rows=1",
     "linear: rows is given, but with slice=threshold"},
    {"op inverse_factor --in factor.safetensors --out o", "\"shift\" is f32, but \"a\" is f64"},
    {"op gather_rows --in gather_float.safetensors --out o", "gather_rows|\"indices\"|f32|i64 or i32"},
    {"op gather_rows --in gather_far.safetensors --out o", "gather_rows|7|2"},
    {"op select --in norms.safetensors --out o --set n=4", "select top_norm|n = 4|at most 3"},
    {"op select --in norms.safetensors --out o --set n=-1", "select top_norm|n = -1|0 or more"},
    {"op select --in norms_square.safetensors --out o", "select top_norm|f32[2, 3]|rank 1"},
    {"op select --in norms_float.safetensors --out o", "select|\"device_n\"|f32|i64 or i32"},
    {"op select --in norms_two.safetensors --out o", "select top_norm|\"device_n\" is i64[2]|expected [1]"},
    {"op select --in norms_far.safetensors --out o", "device_rows|4294967296|i32"},
    {"op select --in norms_n.safetensors --out o --set mode=threshold",
     "select threshold|\"device_n\" is given|expected none"},
    {"op gather_selected --in chosen_back.safetensors --out o",
     "gather_selected|index 0 at position 1|ascending"},
    {"op gather_selected --in chosen_far.safetensors --out o", "indices|4294967297|i32"},
    {"op gather_selected --in chosen_scales.safetensors --out o", "scales is f32[3]|expected f32 [2]"},
    {"op scatter_selected --in chosen_back.safetensors --out o --set rows=-2", "scatter_selected|-2 rows"},
    {"op relu --in control.safetensors --out o", "control.safetensors|\"a?b\"|not an input of relu"},
    {"op softmax --set dim=4294967296 --in good.safetensors --out o", "\"dim\"|4294967296"},
    {"op transpose --set a=-4294967296 --in good.safetensors --out o", "\"a\"|-4294967296"},
    {"op slice --set dim=2 --in good.safetensors --out o", "slice|dimension 2|f32[2, 3]"},
    {"op transpose --set a=2 --in good.safetensors --out o", "transpose|dimension 2|f32[2, 3]"},
    {"op rope --in rope.safetensors --out o --set offset=1", "rope|offset 1|positions"},
    {"op rope --in rope_plain.safetensors --out o --set positions=true", "rope|no input \"positions\""},
    {"op rope_to_cache --in cache.safetensors --out o", "rope_to_cache|after 3|capacity of 3|5 positions"},
    {"op sum --set dim=5 --in good.safetensors --out o", "dim|5"},
    {"op sum --set keep=true --in good.safetensors --out o", "sum|keep|one dimension"},
    {"bench op embedding --shape V=0,T=4,C=2 --device cpu", "embedding|\"indices\"|at least one"},
    {"bench op cast --set to=f32 --dtype f32 --device cpu --shape R=4,C=4", "cast|nothing to time|input"},
    {"bench op append_to_cache --mode bwd --device cpu", "append_to_cache|no gradient|bwd"},
    {"op relu --in good.safetensors --out nowhere/o", "nowhere|no folder|create it"},
    {"op relu --in good.safetensors --out folder.safetensors", "folder.safetensors|directory"},
    {"op relu --in good.safetensors --out /proc/o", "/proc/o"},
    {"op relu --in good.safetensors --out /dev/null/o", "/dev/null"},
    {"op relu --in good.safetensors --out pipe", "pipe|not a regular file"},
};

class BadOperatorFile : public ::testing::TestWithParam<BadFile> {};

TEST_P(BadOperatorFile, ExitsWithOneAndNamesIt) {
  const Workplace workplace;
  put_operator_files(workplace);
  const auto before = workplace.files();
  const Outcome outcome = run(workplace, GetParam().line);
  EXPECT_EQ(outcome.code, 1) << outcome.out << outcome.err;
  EXPECT_EQ(outcome.out, "");
  EXPECT_TRUE(outcome.err.starts_with("tessera: ")) << outcome.err;
  EXPECT_TRUE(holds_all(first_line(outcome.err), GetParam().says))
      << outcome.err << "expected " << GetParam().says;
  EXPECT_EQ(workplace.files(), before);
}
INSTANTIATE_TEST_SUITE_P(Files, BadOperatorFile, ::testing::ValuesIn(kBadOperatorFiles));

TEST(BadDevice, ThatTheBuildOrTheMachineLacksIsNamedBeforeAnyFile) {
  const Workplace workplace;
  for (const std::string line :
       {"op relu --in a --out b --device cuda:99", "train tnp --device cuda:99",
        "bench op relu --device cuda:99", "bench step tnp --device cuda:99", "bench host --device cuda:99",
        "bench sweep relu --device cuda:99", "bench optim --device cuda:99", "bench copy --device cuda:99",
        "eval tnp r --device cuda:99"}) {
    const Outcome outcome = run(workplace, line);
    EXPECT_EQ(outcome.code, 1) << line;
    EXPECT_TRUE(holds_all(outcome.err, "cuda:99")) << line << ": " << outcome.err;
    EXPECT_TRUE(workplace.files().empty()) << line;
  }
}

TEST(Text, ThatIsNoneIsRefusedByEveryCommandThatReadsIt) {
  const Workplace at;
  const std::string gzip = std::string("\x1F\x8B\x08\0", 4) + std::string(3000, '\xA7');
  std::string utf16 = "\xFF\xFE", latin;
  for (int i = 0; i < 2000; ++i) utf16 += std::string("a\0", 2), latin += i % 20 ? "o" : "\xE9";
  at.put("corpus.gz", gzip), at.put("utf16.txt", utf16), at.put("latin.txt", latin);
  at.put("good.txt", std::string(100, 'a') + "\n");
  ASSERT_EQ(run(at, "tokenizer train --text good.txt --kind byte --out t.json").code, 0);
  const auto before = at.files();
  for (const std::string line :
       {"train gpt --device cpu --text good.txt ", "train llama --device cpu --text ",
        "tokenizer train --kind byte --out new.json --text ",
        "data tokenize --tokenizer t.json --out shards --text ", "tokenizer encode t.json --file "})
    for (const auto& [file, says] : {std::pair<std::string, std::string>{"corpus.gz", "compressed by gzip"},
                                     {"utf16.txt", "UTF-16"},
                                     {"latin.txt", "100 of 2000 bytes are not UTF-8|iconv"}}) {
      const Outcome outcome = run(at, line + file);
      EXPECT_EQ(outcome.code, 1) << line << file << outcome.out;
      EXPECT_TRUE(holds_all(outcome.err, "read: " + file + "|" + says + "|--any-bytes")) << outcome.err;
      auto after = at.files();
      std::erase(after, "runs");
      EXPECT_EQ(after, before) << line << file;
    }
  const Outcome taken =
      run(at, "data tokenize --tokenizer t.json --out shards --any-bytes --text latin.txt good.txt");
  EXPECT_EQ(taken.code, 0) << taken.err;
  EXPECT_TRUE(holds_all(taken.err, "warning: 100 of 2101 bytes of the text are not UTF-8")) << taken.err;
}

TEST(Output, IsNeverAnInput) {
  const Workplace at;
  at.put("text", "any text at all\n"), at.put("other", "more\n");
  put_tensors(at, "x.safetensors", {{"x", ramp({2, 3})}});
  fs::create_symlink("text", at / "link");
  ASSERT_EQ(run(at, "tokenizer train --text text --kind byte --out t.json").code, 0);
  for (const std::string line :
       {"tokenizer train --text other text --kind byte --out text",
        "tokenizer train --text text --out ./link", "op relu --in x.safetensors --out x.safetensors",
        "generate --model m --prompt-file text --json link",
        "train gpt --text other text --json-out text --device cpu"}) {
    const std::string text = at.get("text"), tensors = at.get("x.safetensors");
    const Outcome outcome = run(at, line);
    EXPECT_EQ(outcome.code, 1) << line << outcome.out;
    EXPECT_TRUE(holds_all(outcome.err, "is the input|would be replaced")) << line << outcome.err;
    EXPECT_TRUE(at.get("text") == text && at.get("x.safetensors") == tensors) << line;
  }
}

TEST(Output, IsNeverAFileOfAnInputFolder) {
  const Workplace at;
  at.put("r/run.json", "{}"), at.put("m/config.json", "{}"), at.put("m/model.safetensors", "w");
  at.put("c.toml", "quiet = true\n"), at.put("text", "some text\n"), at.put("items", "{}\n");
  fs::create_symlink("m", at / "link");
  const auto all = [&] {
    std::string bytes;
    for (const std::string& file : at.files())
      if (fs::is_regular_file(at / file)) bytes += file + "\n" + at.get(file);
    return bytes;
  };
  const std::string before = all();
  for (const std::string line :
       {"report r --out r/run.json", "train llama --resume r --json r/run.json",
        "train tnp --resume r --json ./r/run.json", "train bert --resume r --json r/run.json",
        "train bert --task mlm --text text --json text", "train llama --config c.toml --json c.toml",
        "train llama --text text --model m --json link/config.json",
        "generate --model m --prompt a --json m/config.json",
        "generate --model link --prompt a --json m/config.json",
        "eval choice items --model m --predictions m/model.safetensors",
        "sparsity compare m m --json m/model.safetensors",
        "sparsity activations --model m --text text --json m/config.json"}) {
    const Outcome outcome = run(at, line);
    EXPECT_EQ(outcome.code, 1) << line << outcome.out;
    EXPECT_TRUE(holds_all(outcome.err, "is |the input |would be replaced")) << line << outcome.err;
    EXPECT_EQ(all(), before) << line;
  }
  // A new file in such a folder replaces nothing: here the model's config.json is what is wrong.
  const Outcome fresh = run(at, "generate --model m --prompt a --json m/new.json");
  EXPECT_EQ(fresh.err.find("would be replaced"), std::string::npos) << fresh.err;
}

TEST(Tokenize, WarnsIfNothingIsHeldOut) {
  const Workplace at;
  at.put("good.txt", "some text\nand more\n");
  ASSERT_EQ(run(at, "tokenizer train --text good.txt --kind byte --out t.json").code, 0);
  const Outcome none =
      run(at, "data tokenize --tokenizer t.json --out a --text good.txt --piece 1 --validation 0.1");
  EXPECT_EQ(none.code, 0) << none.err;
  EXPECT_TRUE(holds_all(none.out, "validation: 0 tokens")) << none.out;
  EXPECT_TRUE(holds_all(none.err, "warning: --validation 0.1 holds nothing out")) << none.err;
  const Outcome some = run(at, "data tokenize --tokenizer t.json --out b --text good.txt --validation 0.5");
  EXPECT_EQ(some.err, "");
}

TEST(Tokenize, LeavesNoShardOfWhatItCouldNotFinish) {
  const Workplace at;
  at.put("good.txt", "some text\n");
  ASSERT_EQ(run(at, "tokenizer train --text good.txt --kind byte --out t.json").code, 0);
  const auto before = at.files();
  const Outcome outcome = run(
      at, "data tokenize --tokenizer t.json --out a/b --shard-tokens 4 --text good.txt good.txt none.txt");
  EXPECT_EQ(outcome.code, 1);
  EXPECT_TRUE(holds_all(outcome.err, "none.txt")) << outcome.err;
  EXPECT_EQ(at.files(), before);
}

// ---- records of benchmarks ----

constexpr const char* kRecord =
    R"({"op":"linear","shape":{"T":4},"dtype":"f32","mode":"fwd","implementation":"a","ms":{"p10":1,"p50":2,"p90":3}})";

struct BadText {
  const char* name;
  const char* text;
  const char* says;
};
void PrintTo(const BadText& bad, std::ostream* out) {
  *out << bad.name;
}

constexpr BadText kBadRecords[] = {
    {"Empty", "", "bad.jsonl|empty"},
    {"Blank", "\n\n", "bad.jsonl|no benchmark records"},
    {"NoJson", "op linear 3 ms\n", "bad.jsonl:1|JSON"},
    {"Torn", R"({"op":"linear","shape":{"T":)", "bad.jsonl:1|JSON"},
    {"Array", "[1, 2]\n", "bad.jsonl:1|object"},
    {"Number", "3\n", "bad.jsonl:1|object"},
    {"NothingInIt", "{}\n", "bad.jsonl:1|op"},
    {"NoTiming", R"({"op":"linear","shape":{},"dtype":"f32","mode":"fwd","implementation":"a"})",
     "bad.jsonl:1|ms"},
    {"TimingIsText",
     R"({"op":"linear","shape":{},"dtype":"f32","mode":"fwd","implementation":"a","ms":"fast"})",
     "bad.jsonl:1|string"},
    {"MedianIsText",
     R"({"op":"linear","shape":{},"dtype":"f32","mode":"fwd","implementation":"a","ms":{"p10":1,"p50":"2","p90":3}})",
     "bad.jsonl:1|number"},
    {"MedianIsZero",
     R"({"op":"linear","shape":{},"dtype":"f32","mode":"fwd","implementation":"a","ms":{"p10":0,"p50":0,"p90":0}})",
     "bad.jsonl:1|p50|positive"},
    {"ShapeIsList",
     R"({"op":"linear","shape":[4],"dtype":"f32","mode":"fwd","implementation":"a","ms":{"p10":1,"p50":2,"p90":3}})",
     "bad.jsonl:1|array"},
    {"SizeIsText",
     R"({"op":"linear","shape":{"T":"4"},"dtype":"f32","mode":"fwd","implementation":"a","ms":{"p10":1,"p50":2,"p90":3}})",
     "bad.jsonl:1|number"},
    {"SizeIsFraction",
     R"({"op":"linear","shape":{"T":4.5},"dtype":"f32","mode":"fwd","implementation":"a","ms":{"p10":1,"p50":2,"p90":3}})",
     "bad.jsonl:1|\"T\"|4.5|whole number"},
    {"OperatorIsNumber",
     R"({"op":4,"shape":{},"dtype":"f32","mode":"fwd","implementation":"a","ms":{"p10":1,"p50":2,"p90":3}})",
     "bad.jsonl:1|string"},
    {"LfsPointer", kLfsPointer, "bad.jsonl|Git LFS"},
};

class BadRecords : public ::testing::TestWithParam<BadText> {};

TEST_P(BadRecords, AreRefusedWithFileAndLine) {
  const Workplace workplace;
  workplace.put("good.jsonl", std::string(kRecord) + "\n");
  workplace.put("bad.jsonl", GetParam().text);
  for (const std::string line :
       {"bench compare good.jsonl bad.jsonl", "bench compare bad.jsonl good.jsonl"}) {
    const Outcome outcome = run(workplace, line);
    EXPECT_EQ(outcome.code, 1) << outcome.out << outcome.err;
    EXPECT_TRUE(outcome.err.starts_with("tessera: ")) << outcome.err;
    EXPECT_TRUE(holds_all(first_line(outcome.err), GetParam().says)) << outcome.err;
  }
}
INSTANTIATE_TEST_SUITE_P(Kinds, BadRecords, ::testing::ValuesIn(kBadRecords),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(Compare, NamesTheSecondLineAndTheMissingFileAndWorkThatIsNotCommon) {
  const Workplace workplace;
  workplace.put("good.jsonl", std::string(kRecord) + "\n");
  workplace.put("second.jsonl", std::string(kRecord) + "\nrubbish\n");
  std::string other = kRecord;
  other.replace(other.find("linear"), 6, "matmul");
  workplace.put("other.jsonl", other + "\n");
  const auto says = [&](const std::string& line) {
    const Outcome outcome = run(workplace, line);
    EXPECT_EQ(outcome.code, 1) << line;
    return outcome.err;
  };
  EXPECT_TRUE(holds_all(says("bench compare good.jsonl second.jsonl"), "second.jsonl:2|JSON"));
  EXPECT_TRUE(holds_all(says("bench compare good.jsonl none.jsonl"), "none.jsonl|no file"));
  EXPECT_TRUE(holds_all(says("bench compare good.jsonl ."), "directory"));
  EXPECT_TRUE(holds_all(says("bench compare good.jsonl other.jsonl"), "other.jsonl|no common work"));
  EXPECT_TRUE(
      holds_all(says("bench compare good.jsonl good.jsonl --html nowhere/p.html"), "nowhere|no folder"));
}

TEST(Json, RecordsBehindATornLineAreWhole) {
  const Workplace workplace;
  workplace.put("torn.jsonl", std::string(kRecord) + "\n" + std::string(kRecord).substr(0, 40));
  ASSERT_EQ(
      run(workplace, "bench op relu --device cpu --shape R=2,C=3 --seconds 0.001 --json torn.jsonl").code, 0);
  const Outcome torn = run(workplace, "bench compare torn.jsonl torn.jsonl");
  EXPECT_TRUE(torn.code == 1 && holds_all(torn.err, "torn.jsonl:2|JSON")) << torn.err;
  std::string text = workplace.get("torn.jsonl");
  text.erase(text.find('\n') + 1, 41);
  workplace.put("mended.jsonl", text + "\r\n");
  const Outcome mended = run(workplace, "bench compare mended.jsonl mended.jsonl");
  EXPECT_EQ(mended.code, 0) << mended.err;
  EXPECT_TRUE(holds_all(mended.out, "linear|relu")) << mended.out;
}

TEST(Json, AFileThatCannotBeWrittenIsNamedBeforeTheWork) {
  const Workplace workplace;
  for (const std::string line :
       {"bench op linear --device cpu --json nowhere/a.jsonl",
        "bench sweep relu --device cpu --json nowhere/a.jsonl",
        "bench optim --device cpu --json nowhere/a.jsonl", "bench copy --device cpu --json nowhere/a.jsonl",
        "bench host --device cpu --json nowhere/a.jsonl",
        "bench step tnp --device cpu --json nowhere/a.jsonl",
        "train tnp --device cpu --json-out nowhere/a.json"}) {
    const Outcome outcome = run(workplace, line);
    EXPECT_EQ(outcome.code, 1) << line;
    EXPECT_TRUE(holds_all(outcome.err, "nowhere|no folder")) << outcome.err;
    EXPECT_EQ(outcome.out, "") << line << ": results are printed as they are measured";
    EXPECT_TRUE(workplace.files().empty()) << line;
  }
}

TEST(Output, ThatCannotBeWrittenIsAnError) {
  if (!fs::is_character_file("/dev/full")) GTEST_SKIP() << "skipped: there is no /dev/full";
  const Workplace workplace;
  // Little enough to wait in a buffer until the end, and more.
  for (const std::string line : {"--help", "--version", "plan gpt", "doctor --json", "op --list"}) {
    const Outcome outcome = Process(workplace, words_of(line), "/dev/full").wait();
    EXPECT_EQ(outcome.code, 1) << line;
    EXPECT_TRUE(outcome.err.starts_with("tessera: ") &&
                holds_all(outcome.err, "write: the standard output: "))
        << line << ": " << outcome.err;
    EXPECT_EQ(outcome.err.find('\n'), outcome.err.size() - 1) << outcome.err;
  }
}

/// What a shell makes of the line, the command's output and errors sent elsewhere.
int shell(const Workplace& at, const std::string& line) {
  std::string program = tessera::test::place("TESSERA_PROGRAM", TESSERA_PROGRAM);
  if (program.find('/') != std::string::npos) program = fs::absolute(program).string();
  const int status = std::system(("cd " + at.path().string() + " && " + program + " " + line).c_str());
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

TEST(Output, ProgressThatCannotBeWrittenDoesNotEndARun) {
  if (!fs::is_character_file("/dev/full")) GTEST_SKIP() << "skipped: there is no /dev/full";
  const Workplace at;
  EXPECT_EQ(shell(at, "train tnp --steps 3 --name r" + kTiny + " 2>/dev/full >out"), 0);
  EXPECT_TRUE(fs::exists(at / "runs/r/report.html"));
  EXPECT_EQ(shell(at, "train tnp --stpes 3 2>/dev/full"), 2);
  EXPECT_EQ(shell(at, "eval tnp nowhere 2>/dev/full"), 1);
}

TEST(Output, WhereThereIsNoneNoFileOfARunGetsIt) {
  const Workplace at;
  EXPECT_EQ(shell(at, "train tnp --steps 3 --name r" + kTiny + " <&- >&- 2>&-"), 1);  // it could not say so
  EXPECT_EQ(json::parse(at.get("runs/r/run.json")).at("model"), "tnp");
  EXPECT_TRUE(fs::exists(at / "runs/r/report.html"));
  put_tensors(at, "x.safetensors", {{"x", ramp({2, 3})}});
  EXPECT_EQ(shell(at, "op relu --in x.safetensors --out y.safetensors <&- >&- 2>&-"), 0);
  EXPECT_EQ(io::load_safetensors((at / "y.safetensors").string()).size(), 1u);
}

TEST(Output, LargerThanAFileMayBeIsAnError) {
  const Workplace workplace;
  put_tensors(workplace, "x.safetensors", {{"x", ramp({1000, 100})}});
  struct rlimit old {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &old), 0);
  struct rlimit little = old;
  little.rlim_cur = 100'000;  // processes inherit it
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &little), 0);
  const Outcome outcome = run(workplace, "op relu --in x.safetensors --out y.safetensors");
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &old), 0);
  EXPECT_EQ(outcome.code, 1) << "signal " << outcome.signal;
  EXPECT_TRUE(holds_all(outcome.err, "write: y.safetensors|too large")) << outcome.err;
  EXPECT_EQ(workplace.files(), std::vector<std::string>{"x.safetensors"});
}

// ---- configuration files ----

constexpr BadText kBadConfigs[] = {
    {"UnknownKey", "stpes = 3\n", "run.toml|\"stpes\"|did you mean steps?"},
    {"UnknownKeyAmongGood", "steps = 3\nwidth_of_everything = 8\n", "run.toml|\"width_of_everything\""},
    {"Underscore", "batch_size = 3\n", "run.toml|\"batch_size\"|did you mean batch-size?"},
    {"BadNumber", "lr = \"fast\"\n", "run.toml:1: |--lr|fast is not a number"},
    {"NoQuotes", "\nlr = fast\n", "run.toml:2: not valid TOML"},
    {"TrailingGarbage", "lr = 1e-3x\n", "run.toml:1: not valid TOML"},
    {"TrailingComma", "steps = 1\nlr=0.5,\n", "run.toml:2: not valid TOML"},
    {"NoValue", "lr\n", "run.toml:1: not valid TOML"},
    {"SwitchWithoutValue", "pre-norm\n", "run.toml:1: not valid TOML"},
    {"EmptySection", "[]\n", "run.toml:1: not valid TOML"},
    {"Bytes", "\x01\xFE\xFF\n", "run.toml:1: not valid TOML"},
    {"Date", "steps = 2026-01-01\n", "run.toml:1: \"steps\"|expected a number"},
    {"NotFinite", "lr = nan\n", "run.toml|--lr|nan is not finite"},
    {"OutOfRange", "steps = 0\n", "run.toml|--steps|0 not in range"},
    {"Fraction", "steps = 1.5\n", "run.toml|--steps|1.5 is not a whole number"},
    {"BadChoice", "prior = \"rbg\"\n", "run.toml|--prior|rbg not in"},
    {"BadDevice", "device = \"gpu\"\n", "run.toml|--device|\"gpu\""},
    {"BadFlag", "pre-norm = 3\n", "run.toml|\"pre-norm\"|true or false"},
    {"List", "steps = [1, 2]\n", "run.toml|\"steps\"|one value"},
    {"Twice", "steps = 1\nlr = 1\nsteps = 2\n", "run.toml:3: |steps|redefine"},
    {"Section", "[training]\nsteps = 1\n", "run.toml:1: |[training]|sections"},
    {"ItsOwnName", "config = \"run.toml\"\n", "run.toml|\"config\""},
    {"Contradiction", "prior = \"rbf\"\nfeatures = 3\n", "rbf|one-dimensional"},
    {"ResumeAndLr", "resume = \"r\"\nlr = 1\n", "--resume|--lr cannot change it"},
};

class BadConfigs : public ::testing::TestWithParam<BadText> {};

TEST_P(BadConfigs, AreUsageErrors) {
  const Workplace workplace;
  workplace.put("run.toml", GetParam().text);
  const Outcome outcome = run(workplace, "train tnp --config run.toml");
  EXPECT_EQ(outcome.code, 2) << outcome.out << outcome.err;
  EXPECT_EQ(outcome.err.find('\n'), outcome.err.size() - 1) << outcome.err;
  EXPECT_TRUE(holds_all(outcome.err, GetParam().says)) << outcome.err << "expected " << GetParam().says;
  EXPECT_EQ(workplace.files(), std::vector<std::string>{"run.toml"});
}
INSTANTIATE_TEST_SUITE_P(Kinds, BadConfigs, ::testing::ValuesIn(kBadConfigs),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(Config, AFileThatIsNoneIsARunTimeError) {
  const Workplace workplace;
  workplace.put("empty.toml", "");
  for (const std::string name : {"none.toml", ".", "empty.toml"}) {
    const Outcome outcome = run(workplace, "train tnp --config " + name);
    EXPECT_EQ(outcome.code, 1) << outcome.err;
    EXPECT_TRUE(holds_all(outcome.err, name)) << outcome.err;
  }
}

TEST(Config, GivesFlagsAndTheCommandLineWins) {
  const Workplace workplace;
  workplace.put("run.toml",
                "# a run\nsteps = 7\nlr = +2e-3\npre-norm = true\nquiet = false\nname = "
                "\"from \\u0066ile #1\" # not its name\nfeatures = 0x1\nprior = \"\"\"rbf\"\"\"\nwarmup = "
                "1_0\n");
  const Outcome outcome = run(workplace, "train tnp --config run.toml --steps 3" + kTiny);
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const json job = json::parse(workplace.get("runs/from file #1/run.json"))["job"];
  EXPECT_EQ(job["steps"], 3);
  EXPECT_EQ(job["lr"], 2e-3);
  EXPECT_EQ(job["prior"], "rbf");
  EXPECT_EQ(job["model.pre_norm"], true);
  EXPECT_EQ(job["model.d_model"], 8);
  EXPECT_EQ(job["warmup"], 10);
}

// ---- run folders ----

/// A finished run in runs/r of two checkpoints.
void put_run(const Workplace& at) {
  const Outcome outcome = run(at, "train tnp --quiet --steps 4 --save-every 2 --name r" + kTiny);
  ASSERT_EQ(outcome.code, 0) << outcome.err;
}

struct BadRun {
  const char* name;
  std::function<void(const Workplace&)> damage;
  const char* says;
};
void PrintTo(const BadRun& bad, std::ostream* out) {
  *out << bad.name;
}

std::function<void(const Workplace&)> put_job(const char* key, json value) {
  return [key, value = std::move(value)](const Workplace& at) {
    json settings = json::parse(at.get("runs/r/run.json"));
    settings["job"][key] = value;
    at.put("runs/r/run.json", settings.dump());
  };
}

void damage_checkpoints(const Workplace& at, const std::function<std::string(std::string)>& damage) {
  for (const auto& entry : fs::directory_iterator(at / "runs/r/checkpoints")) {
    const std::string name = "runs/r/checkpoints/" + entry.path().filename().string();
    at.put(name, damage(at.get(name)));
  }
}

const std::vector<BadRun>& bad_runs() {
  static const std::vector<BadRun> kRuns = {
      {"NoFolder", [](const Workplace& at) { fs::remove_all(at / "runs/r"); }, "runs/r|run.json"},
      {"NoSettings", [](const Workplace& at) { fs::remove(at / "runs/r/run.json"); }, "runs/r|run.json"},
      {"SettingsAreAFolder",
       [](const Workplace& at) {
         fs::remove(at / "runs/r/run.json");
         fs::create_directory(at / "runs/r/run.json");
       },
       "runs/r|run.json"},
      {"EmptySettings", [](const Workplace& at) { at.put("runs/r/run.json", ""); }, "run.json|empty"},
      {"Garbage", [](const Workplace& at) { at.put("runs/r/run.json", "{\"job\": {"); },
       "run.json|JSON object"},
      {"Array", [](const Workplace& at) { at.put("runs/r/run.json", "[1]"); }, "run.json|JSON object"},
      {"NoJob", [](const Workplace& at) { at.put("runs/r/run.json", "{}"); }, "run.json|\"job\""},
      {"JobIsText", [](const Workplace& at) { at.put("runs/r/run.json", R"({"job":"tnp"})"); },
       "run.json|object"},
      {"EmptyJob", [](const Workplace& at) { at.put("runs/r/run.json", R"({"job":{}})"); },
       "run.json|missing"},
      {"UnknownSetting", put_job("colour", 3), "run.json|\"colour\"|not a setting"},
      {"TextForNumber", put_job("batch", "2"), "run.json|\"batch\"|another type"},
      {"FractionForSize", put_job("batch", 2.5), "run.json|\"batch\"|2.5"},
      {"FlagForNumber", put_job("lr", true), "run.json|\"lr\"|true"},
      {"NumberForFlag", put_job("model.pre_norm", 1), "run.json|\"model.pre_norm\"|1"},
      {"NumberForWord", put_job("prior", 1), "run.json|\"prior\"|1"},
      {"NegativeSeed", put_job("seed", -1), "run.json|\"seed\"|-1"},
      {"NegativeSize", put_job("model.layers", -1), "run.json|layers|-1"},
      {"HugeSize", put_job("context", int64_t(1) << 62), "run.json|context|from 1 to"},
      {"TooLargeForSigned", put_job("context", ~uint64_t(0)), "run.json|\"context\""},
      {"ZeroLr", put_job("lr", 0.0), "run.json|lr|positive"},
      {"NoNumber", put_job("lr", nullptr), "run.json|\"lr\"|null"},
      {"UnknownPrior", put_job("prior", "rbg"), "run.json|rbg"},
      {"UnknownDType", put_job("model.dtype", "f31"), "run.json|f31"},
      {"UnknownSchedule", put_job("schedule", "cosin"), "run.json|cosin"},
      {"HeadsThatDoNotDivide", put_job("model.heads", 3), "run.json|d_model 8|3"},
      {"AnotherModel", put_job("model.d_ff", 9), "checkpoints/|another job|\"model.d_ff\"|8|9"},
      {"AnotherCurve", put_job("lr", 0.5), "checkpoints/|another job|\"lr\"|0.5"},
      {"CheckpointsCut",
       [](const Workplace& at) {
         damage_checkpoints(at, [](const std::string& bytes) { return bytes.substr(0, bytes.size() / 2); });
       },
       "none of the 2|checkpoints|another folder"},
      {"CheckpointsFlipped",
       [](const Workplace& at) {
         damage_checkpoints(at, [](std::string bytes) {
           bytes[bytes.size() - 5] = char(bytes[bytes.size() - 5] ^ 4);
           return bytes;
         });
       },
       "none of the 2|damaged|another folder"},
      {"CheckpointsEmpty",
       [](const Workplace& at) { damage_checkpoints(at, [](const std::string&) { return ""; }); },
       "none of the 2|empty"},
  };
  return kRuns;
}

class BadRuns : public ::testing::TestWithParam<BadRun> {};

TEST_P(BadRuns, AreRefusedByResumeAndEval) {
  const Workplace workplace;
  put_run(workplace);
  GetParam().damage(workplace);
  for (const std::string line :
       {"train tnp --device cpu --steps 8 --resume runs/r", "eval tnp runs/r --device cpu --tasks 2"}) {
    const Outcome outcome = run(workplace, line);
    EXPECT_EQ(outcome.code, 1) << line << outcome.out << outcome.err;
    const size_t last = outcome.err.rfind("tessera: ");  // after warnings of what was passed over
    EXPECT_TRUE(last != std::string::npos && holds_all(outcome.err.substr(last), GetParam().says))
        << line << ": " << outcome.err << "expected " << GetParam().says;
  }
}
INSTANTIATE_TEST_SUITE_P(Kinds, BadRuns, ::testing::ValuesIn(bad_runs()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(Runs, EvalOfARunWithoutACheckpointSaysSo) {
  const Workplace workplace;
  put_run(workplace);
  fs::remove_all(workplace / "runs/r/checkpoints");
  const Outcome outcome = run(workplace, "eval tnp runs/r --device cpu --tasks 2");
  EXPECT_EQ(outcome.code, 1);
  EXPECT_TRUE(holds_all(outcome.err, "runs/r/checkpoints|no checkpoint yet")) << outcome.err;
}

TEST(Runs, BadOptionsOfAResumedRunAreRefused) {
  const Workplace workplace;
  put_run(workplace);
  json settings = json::parse(workplace.get("runs/r/run.json"));
  settings["options"]["save_every"] = -3;
  workplace.put("runs/r/run.json", settings.dump());
  const Outcome outcome = run(workplace, "train tnp --device cpu --steps 8 --resume runs/r");
  EXPECT_EQ(outcome.code, 1);
  EXPECT_TRUE(holds_all(outcome.err, "run.json|\"save_every\"|-3|--save-every")) << outcome.err;
}

TEST(Runs, AFolderThatCannotBeMadeIsNamed) {
  const Workplace workplace;
  workplace.put("file", "in the way");
  for (const std::string root : {"/proc/tessera-runs", "file", "file/runs", "/dev/null/runs"}) {
    const Outcome outcome = run(workplace, "train tnp --steps 1 --runs " + root + kTiny);
    EXPECT_EQ(outcome.code, 1) << outcome.out << outcome.err;
    EXPECT_TRUE(outcome.err.starts_with("tessera: run folder")) << outcome.err;
    EXPECT_TRUE(holds_all(outcome.err, root)) << outcome.err;
  }
  EXPECT_EQ(workplace.files(), std::vector<std::string>{"file"});
}

TEST(Runs, ADatabaseThatIsNoneIsNamed) {
  const Workplace workplace;
  workplace.put("runs/runs.sqlite", std::string(4096, 'x'));
  const Outcome outcome = run(workplace, "train tnp --steps 1" + kTiny);
  EXPECT_EQ(outcome.code, 0) << outcome.err;  // the run is worth more than its row
  EXPECT_TRUE(holds_all(outcome.err, "warning|runs.sqlite|not a database")) << outcome.err;
}

TEST(Runs, WhatDoesNotFitIntoMemoryIsSaid) {
  const Workplace workplace;
  const Outcome outcome =
      run(workplace, "train tnp --steps 1 --device cpu --m 1000000 --n 1000000 --batch-size 1000000");
  EXPECT_EQ(outcome.code, 1) << outcome.out << outcome.err;
  EXPECT_TRUE(holds_all(outcome.err, "memory")) << outcome.err;
}

}  // namespace
}  // namespace tessera::cli::test
