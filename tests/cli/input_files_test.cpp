#include <gtest/gtest.h>

#include "tests/cli/files.h"

// Files that cannot be what the command line says they are: exit code 1, one message that begins with what
// failed and names the file, and no output file.

namespace tessera::cli::test {
namespace {

std::string header_of(const std::string& header, size_t bytes = 0) {
  std::string text(8, '\0');
  for (size_t i = 0; i < 8; ++i) text[i] = char(header.size() >> (8 * i) & 255);
  return text + header + std::string(bytes, '\0');
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
  put_tensors(at, "chosen_wide.safetensors",
              {{"x", ramp({2, 3}).to(DType::f64)},
               {"indices", chosen({0, 1})},
               {"scales", ramp({2}).to(DType::f64)}});
  const Tensor nan = Tensor::full({2, 4}, std::nan(""), DType::f32, Device::cpu());
  put_tensors(at, "obs_nan.safetensors", {{"weight", ramp({2, 4})}, {"x", nan}});
  put_tensors(at, "obs_vector.safetensors", {{"weight", ramp({2, 4})}, {"x", ramp({4})}});
  put_tensors(at, "multiply_vector.safetensors", {{"x", ramp({2, 4})}, {"b", ramp({4})}});
  put_tensors(at, "low_rank_0.safetensors",
              {{"x", ramp({2, 3})},
               {"a", ramp({0, 3})},
               {"b", ramp({2, 0})},
               {"values", ramp({0})},
               {"support", Tensor::zeros({0}, DType::i32, Device::cpu())}});
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
    {"op gather_selected --in chosen_wide.safetensors --out o", "input \"scales\" is f64|expected f32"},
    {"op scatter_selected --in chosen_wide.safetensors --out o", "input \"scales\" is f64|expected f32"},
    {"op scatter_selected --in chosen_back.safetensors --out o --set rows=-2", "scatter_selected|-2 rows"},
    {"op obs_columns --in obs_nan.safetensors --out o --set zeros=2 --set group=4",
     "obs_columns|not positive definite|not finite"},
    {"op obs_columns --in obs_vector.safetensors --out o", "obs_columns|x is f32[4]|expected [T, C]"},
    {"op multiply24 --in multiply_vector.safetensors --out o", "multiply24|b is f32[4]|[k, n]"},
    {"op sparse_low_rank_linear --in low_rank_0.safetensors --out o",
     "sparse_low_rank_linear|a [0, 3]|with a rank of 1 or more"},
    {"op relu --in control.safetensors --out o", "control.safetensors|\"a?b\"|not an input of relu"},
    {"op softmax --set dim=4294967296 --in good.safetensors --out o", "\"dim\"|4294967296"},
    {"op transpose --set a=-4294967296 --in good.safetensors --out o", "\"a\"|-4294967296"},
    {"op slice --set dim=2 --in good.safetensors --out o", "slice|dimension 2|f32[2, 3]"},
    {"op transpose --set a=2 --in good.safetensors --out o", "transpose|dimension 2|f32[2, 3]"},
    {"op rope --in rope.safetensors --out o --set offset=1", "rope|offset 1|positions"},
    {"op rope --in rope_plain.safetensors --out o --set positions=true", "rope|no input \"positions\""},
    {"op rope_to_cache --in cache.safetensors --out o", "rope_to_cache|after 3|capacity of 3|5 positions"},
    {"op sum --set dim=5 --in good.safetensors --out o", "dim|5"},
    {"op sum --set keep=true --in good.safetensors --out o", "sum|keep|all dimensions"},
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
    expect_failure(workplace, line, 1, "cuda:99");
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
      expect_failure(at, line + file, 1, "read: " + file + "|" + says + "|--any-bytes");
      auto after = at.files();
      std::erase(after, "runs");
      EXPECT_EQ(after, before) << line << file;
    }
  for (const std::string folder : {".", "runs"}) {
    fs::create_directories(at / "runs");
    expect_failure(at, "tokenizer train --kind byte --out t.json --text " + folder, 1,
                   "read: " + folder + " is a directory");
  }
  expect_failures(
      at, {{"tokenizer train --kind byte --out t.json --text good.txt t.json", 1, "is the input t.json"},
           {"tokenizer decode t.json --ids 1 99999", 1,
            "there is no token 99999; there are 257 tokens, whose ids are below 257"}});
  const Outcome taken =
      run(at, "data tokenize --tokenizer t.json --out shards --any-bytes --text latin.txt good.txt");
  EXPECT_EQ(taken.code, 0) << taken.err;
  EXPECT_TRUE(holds_all(taken.err, "warning: 100 of 2101 bytes of the text are not UTF-8"));
  const std::string encode = "tokenizer encode t.json ", warning = "warning: 100 of 2000 bytes of the text";
  EXPECT_TRUE(holds_all(run(at, encode + "--any-bytes --file latin.txt").err, warning));
  at.put("stdin", latin);
  EXPECT_TRUE(holds_all(run(at, encode).err, "read: the standard input|100 of 2000 bytes are not UTF-8"));
  EXPECT_TRUE(holds_all(run(at, encode + "--any-bytes").err, warning));
  fs::remove(at / "stdin");
  fs::create_directory(at / "stdin");  // as of "< folder"
  for (const std::string& line : {encode, std::string("tokenizer decode t.json")})
    expect_failures(at, {{line, 1, "read: the standard input: Is a directory"}});
}

}  // namespace
}  // namespace tessera::cli::test
