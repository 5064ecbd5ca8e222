#include "io/checkpoint.h"

#include <cmath>
#include <limits>

#include "autograd/tape.h"
#include "io/checksum.h"
#include "tests/errors.h"
#include "tests/io/files.h"
#include "tests/tensors.h"

namespace tessera::io::test {
namespace {

enum class Mode : uint8_t { train = 3, evaluate = 200 };

struct Head {
  Tensor weight, bias;
  void fields(auto&& visit) { visit("weight", weight), visit("bias", bias); }
};

struct Model {
  Tensor table;
  std::vector<Head> heads;
  std::optional<Head> extra;
  Mode mode = Mode::train;
  void fields(auto&& visit) {
    visit("table", table), visit("heads", heads), visit("extra", extra), visit("mode", mode);
  }
};

/// One of every kind of leaf that is no tensor.
struct Scalars {
  bool flag = true;
  int8_t small = -128;
  uint8_t byte = 255;
  int32_t count = -7;
  int64_t step = std::numeric_limits<int64_t>::min();
  uint64_t seed = std::numeric_limits<uint64_t>::max();
  float rate = 0.1f;
  double loss = 1.0 / 3, infinite = -INFINITY, zero = -0.0, tiny = 5e-324;
  std::string name = "a \"quoted\"\nline \xC3\xA9 and more", empty;
  std::vector<double> curve = {1.5, -2.5};
  std::vector<size_t> order = {3, 0, ~size_t{0}};
  std::vector<int16_t> shorts;
  Rng rng{42};
  void fields(auto&& visit) {
    visit("flag", flag), visit("small", small), visit("byte", byte), visit("count", count),
        visit("step", step);
    visit("seed", seed), visit("rate", rate), visit("loss", loss), visit("infinite", infinite),
        visit("zero", zero);
    visit("tiny", tiny), visit("name", name), visit("empty", empty), visit("curve", curve),
        visit("order", order);
    visit("shorts", shorts), visit("rng", rng);
  }
};

Model make_model(uint32_t seed, DType dtype = DType::f32) {
  Model model{random_bits({4, 6}, dtype, seed).clone(), {}, {}, Mode::evaluate};
  for (uint32_t i = 0; i < 2; ++i)
    model.heads.push_back(
        {random_bits({3, 5}, DType::bf16, seed + i).clone(), random_bits({5}, DType::f64, i)});
  model.heads[1].bias = Tensor();
  return model;
}

std::vector<std::string> bits_of_all(Model& model) {
  std::vector<std::string> bits;
  for_each_field(model, [&](const std::string& name, auto& leaf) {
    if constexpr (std::is_same_v<std::decay_t<decltype(leaf)>, Tensor>)
      bits.push_back(name + (leaf.defined() ? bits_of(leaf) : "-"));
  });
  return bits;
}

TEST(Checkpoint, RoundTripsAModel) {
  const TemporaryFolder folder;
  Model model = make_model(1), other = make_model(100);
  other.mode = Mode::train;
  save(folder / "file", model);
  const void* const address = other.table.raw();
  const uint64_t version = other.table.version();
  load(folder / "file", other);
  EXPECT_EQ(bits_of_all(model), bits_of_all(other));
  EXPECT_EQ(other.mode, Mode::evaluate);
  EXPECT_EQ(other.table.raw(), address);  // in place: optimizers and graphs hold on to it
  EXPECT_GT(other.table.version(), version);
  const Checkpoint checkpoint = Checkpoint::read(folder / "file");
  std::vector<std::string> names;
  for (const auto& [name, value] : checkpoint.values()) names.push_back(name);
  EXPECT_EQ(names,
            (std::vector<std::string>{"heads.0.bias", "heads.0.weight", "heads.1.weight", "mode", "table"}));
  EXPECT_TRUE(same(checkpoint.get<Tensor>("table"), model.table));
  // Any reader of safetensors sees the tensors.
  EXPECT_TRUE(same(load_safetensors(folder / "file").at("heads.1.weight"), model.heads[1].weight));
}

TEST(Checkpoint, AValueGetsAnotherName) {
  Checkpoint checkpoint;
  checkpoint.add("a", int64_t{1}).add("b", int64_t{2});
  checkpoint.rename("a", "c");
  EXPECT_EQ(checkpoint.find("a"), nullptr);
  EXPECT_EQ(checkpoint.get<int64_t>("c"), 1);
  expect_error([&] { checkpoint.rename("b", "c"); }, {"cannot rename 'b' to 'c'", "the name is taken"});
  expect_error([&] { checkpoint.rename("a", "d"); }, {"cannot rename 'a' to 'd'", "there is none"});
  EXPECT_EQ(checkpoint.get<int64_t>("b"), 2);
}

TEST(Checkpoint, APartIsRestoredAlone) {
  const TemporaryFolder folder;
  Model model = make_model(1), other = make_model(100);
  other.mode = Mode::train;
  save(folder / "file", named("model", model), named("model2", make_model(7)), named("step", int64_t{3}));
  const Checkpoint all = Checkpoint::read(folder / "file");
  all.part("model").restore(other);
  EXPECT_EQ(bits_of_all(model), bits_of_all(other));
  EXPECT_EQ(other.mode, Mode::evaluate);
  std::vector<std::string> names;
  for (const auto& [name, tensor] : all.part("model").tensors()) names.push_back(name);
  EXPECT_EQ(names, (std::vector<std::string>{"heads.0.bias", "heads.0.weight", "heads.1.weight", "table"}));
  EXPECT_TRUE(same(all.part("model.heads").tensors().at("1.weight"), model.heads[1].weight));
  int64_t step = 0;
  all.part("step").restore(step);
  EXPECT_EQ(step, 3);
  expect_error([&] { all.part("modle"); },
               {"file has no part 'modle' among model, model2, step; did you mean model?"});
  other = make_model(100);
  expect_error([&] { all.part("model2").restore(step); }, {"file does not fit"});
}

struct Written {
  int64_t step = 0;
  Tensor a = Tensor::zeros({2}, DType::f32, kCpu), b = Tensor::zeros({3}, DType::f32, kCpu),
         c = Tensor::zeros({2}, DType::f32, kCpu);
  void fields(auto&& visit) { visit("step", step), visit("a", a), visit("b", b), visit("c", c); }
};

TEST(Checkpoint, LoadsNothingIfATensorCannotBeWritten) {
  const TemporaryFolder folder;
  Written saved;
  saved.step = 7;
  for (const Tensor& tensor : {saved.a, saved.b, saved.c}) tensor.fill(5);
  save(folder / "file", saved);
  const auto refused = [&](Written& to, std::initializer_list<const char*> parts) {
    const Tensor a = to.a.detach(), c = to.c.detach();
    expect_error([&] { load(folder / "file", to); }, parts);
    EXPECT_EQ(to.step, 0);
    for (const Tensor& tensor : {a, c}) EXPECT_EQ(tensor.to_vector<double>(), std::vector<double>(2, 0.0));
  };
  Written expanded;
  expanded.b = Tensor::zeros({1}, DType::f32, kCpu).expand({3});
  refused(expanded, {"file does not fit: 1 name differs; nothing was changed", "b ", "f32[3]",
                     "the tensor is expanded; clone() it"});
  Written on_tape;
  Tensor leaf = on_tape.c.clone();
  require_grad(leaf);
  Tape tape;
  tape.record("mine", {&leaf}, {&on_tape.c}, [](Backward&) {});
  refused(on_tape, {"1 name differs", "c ", "f32[2]", "a result of a tape; detach() it"});
  Written fits;
  require_grad(fits.a);  // parameters are written
  load(folder / "file", fits);
  EXPECT_EQ(fits.a.detach().to_vector<double>(), std::vector<double>(2, 5.0));
}

TEST(Checkpoint, RoundTripsEveryScalarExactly) {
  const TemporaryFolder folder;
  Scalars a;
  for (int i = 0; i < 5; ++i) a.rng.reserve(Device::cpu());
  save(folder / "file", a);
  Scalars b;
  b.flag = false, b.small = 1, b.byte = 0, b.count = 1, b.step = 0, b.seed = 0, b.rate = 0, b.loss = 0;
  b.infinite = 0, b.zero = 1, b.tiny = 0, b.name = "", b.empty = "x", b.curve = {}, b.order = {1},
  b.shorts = {1};
  b.rng = Rng(7);
  load(folder / "file", b);
  EXPECT_EQ(std::tie(a.flag, a.small, a.byte, a.count, a.step, a.seed, a.rate, a.loss, a.infinite, a.tiny),
            std::tie(b.flag, b.small, b.byte, b.count, b.step, b.seed, b.rate, b.loss, b.infinite, b.tiny));
  EXPECT_TRUE(b.zero == 0 && std::signbit(b.zero));
  EXPECT_EQ(std::tie(a.name, a.empty, a.curve, a.order, a.shorts),
            std::tie(b.name, b.empty, b.curve, b.order, b.shorts));
  EXPECT_EQ(b.rng.state(), (Rng::State{42, 5}));
  b.loss = NAN;
  save(folder / "file", b);
  load(folder / "file", a);
  EXPECT_TRUE(std::isnan(a.loss));
  const Metadata metadata = SafetensorsFile(folder / "file").metadata();
  EXPECT_EQ(metadata.at("rng"), "rng 42 5");
  EXPECT_EQ(metadata.at("count"), "i64 -7");
  EXPECT_EQ(metadata.at("rate"), "f32 0.1");
}

TEST(Checkpoint, NamesThings) {
  const TemporaryFolder folder;
  Model model = make_model(1);
  Rng rng(1);
  int64_t step = 12;
  save(folder / "file", named("model", model), named("rng", rng), named("step", step), named("end", 3.5));
  step = 0;
  double end = 0;
  load(folder / "file", named("model", model), named("rng", rng), named("step", step), named("end", end));
  EXPECT_EQ(step, 12);
  EXPECT_EQ(end, 3.5);
  EXPECT_EQ(Checkpoint::read(folder / "file").get<int64_t>("step"), 12);
  EXPECT_EQ(Checkpoint::read(folder / "file").get<Rng>("rng").state(), rng.state());
  save(folder / "file", model, rng);
  EXPECT_NE(Checkpoint::read(folder / "file").find("0.heads.0.bias"), nullptr);
  EXPECT_NE(Checkpoint::read(folder / "file").find("1"), nullptr);
  save(folder / "file", step);
  EXPECT_EQ(Checkpoint::read(folder / "file").get<int64_t>("value"), 12);
  const Model& constant = model;
  save(folder / "file", constant);
  load(folder / "file", model);
  EXPECT_TRUE(throws([&] { save(folder / "file", named("a", rng), named("a", step)); },
                     "the name 'a' is used twice"));
  EXPECT_TRUE(throws([&] { save(folder / "file", named("tessera.x", rng)); }, "cannot be used"));
  EXPECT_TRUE(throws([&] { Checkpoint().add("", step); }, "cannot be used"));
}

TEST(Checkpoint, SavesAnyLayoutAndTensorsOnTheTape) {
  const TemporaryFolder folder;
  const Tensor base = random_bits({6, 10}, DType::f32, 1);
  Tensor leaf = base.transpose(0, 1);
  Tensor target = Tensor::zeros({10, 6}, DType::f32, Device::cpu()).transpose(0, 1).clone().transpose(0, 1);
  save(folder / "file", named("x", leaf));
  load(folder / "file", named("x", target));
  EXPECT_TRUE(same(target, leaf));
}

TEST(Checkpoint, RefusesWhatDoesNotFitWithATableAndChangesNothing) {
  const TemporaryFolder folder;
  Model model = make_model(1);
  int64_t step = 5;
  double rate = 0.5;
  std::vector<float> curve = {1, 2};
  Rng rng(3);
  save(folder / "file", named("model", model), named("step", step), named("rate", rate),
       named("curve", curve), named("rng", rng));

  Model other = make_model(50, DType::f16);
  other.heads.push_back({Tensor::zeros({1}, DType::f32, Device::cpu()), {}});
  other.heads[0].weight = random_bits({5, 3}, DType::bf16, 9);
  other.heads[1].weight = Tensor();
  other.heads[1].bias = Tensor::zeros({5}, DType::f64, Device::cpu());
  const auto before = bits_of_all(other);
  std::string wrong_step = "untouched";
  std::vector<double> wrong_curve = {7};
  float wrong_rate = 7;
  uint8_t extra = 9;
  const std::string text = message_of([&] {
    load(folder / "file", named("model", other), named("step", wrong_step), named("curve", wrong_curve),
         named("rate", wrong_rate), named("rng", extra));
  });
  std::string expected =
      "checkpoint: " + (folder / "file") +
      " does not fit: 9 names differ; nothing was changed. Build the same things with the same "
      "options as when it was saved.";
  for (const char* row :
       {"name                  in the file  wanted", "curve                 f32[2]       f64[any]",
        "model.heads.0.weight  bf16[3, 5]   bf16[5, 3]", "model.heads.1.bias    missing      f64[5]",
        "model.heads.1.weight  bf16[3, 5]   nothing (the tensor is undefined)",
        "model.heads.2.weight  missing      f32[1]", "model.table           f32[4, 6]    f16[4, 6]",
        "rate                  f64          f32", "rng                   rng          u64 of 8 bits",
        "step                  i64          string"})
    expected += std::string("\n  ") + row;
  EXPECT_EQ(text, expected);
  EXPECT_EQ(bits_of_all(other), before);
  EXPECT_EQ(wrong_step, "untouched");
  EXPECT_EQ(wrong_curve, std::vector<double>{7});
  EXPECT_EQ(std::pair(wrong_rate, int(extra)), std::pair(7.0f, 9));

  // A field that the file has and the object lacks is as bad: something would be forgotten.
  EXPECT_TRUE(throws([&] { load(folder / "file", named("model", model), named("step", step)); },
                     "rng    rng          not expected"));
  expect_error([&] { load(folder / "file", named("model", model), named("step", step)); },
               {"io::Checkpoint::read(path).part(\"model\").restore(model)"});
  EXPECT_TRUE(
      throws([&] { load(folder / "file", named("s", step), named("s", step)); }, "it is asked for twice"));
  int8_t narrow = 0;
  save(folder / "file", named("n", 300));
  EXPECT_TRUE(throws([&] { load(folder / "file", named("n", narrow)); }, "n     i64          i64 of 8 bits"));
  EXPECT_TRUE(
      throws([&] { Checkpoint::read(folder / "file").get<std::string>("n"); }, "n     i64          string"));
  EXPECT_TRUE(
      throws([&] { Checkpoint::read(folder / "file").get<Tensor>("m"); }, "m     missing      tensor"));
}

TEST(Checkpoint, OneTensorUnderTwoNamesNeedsEqualValues) {
  const TemporaryFolder folder;
  Head untied{random_bits({3, 5}, DType::f32, 1).clone(), random_bits({3, 5}, DType::f32, 2).clone()};
  save(folder / "untied", named("model", untied));
  Head tied{Tensor::zeros({3, 5}, DType::f32, Device::cpu())};
  tied.bias = tied.weight;
  EXPECT_TRUE(throws([&] { load(folder / "untied", named("model", tied)); },
                     "model.bias  f32[3, 5]    the values of model.weight, which is the same tensor (tied)"));
  EXPECT_EQ(tied.weight.to_vector<float>(), std::vector<float>(15)) << "nothing was changed";

  untied.bias.copy_from(untied.weight);
  save(folder / "equal", named("model", untied));
  load(folder / "equal", named("model", tied));
  EXPECT_TRUE(same_bits(tied.weight, untied.weight));
  // Other views of the memory are no second name of the tensor.
  Head halves{tied.weight.slice(0, 0, 1), tied.weight.slice(0, 1, 2)};
  const Head other{random_bits({1, 5}, DType::f32, 3).clone(), random_bits({1, 5}, DType::f32, 4).clone()};
  save(folder / "halves", named("model", other));
  load(folder / "halves", named("model", halves));
  EXPECT_TRUE(same_bits(halves.bias, other.bias));
}

/// A struct whose state is not a member: fields() reads it into a local and writes it back.
struct Cursor {
  int64_t hidden = 0;
  void fields(auto&& visit) {
    int64_t position = hidden * 2;
    visit("position", position);
    hidden = position / 2;
  }
};

TEST(Checkpoint, FieldsMayBeComputed) {
  const TemporaryFolder folder;
  Cursor cursor{21};
  save(folder / "file", cursor);
  cursor.hidden = 0;
  load(folder / "file", cursor);
  EXPECT_EQ(cursor.hidden, 21);
}

/// The file of one scalar "n" and one tensor "x", with `change` done to its header and its checksum made
/// right again.
std::string resealed(const std::function<void(std::string& header)>& change) {
  const TemporaryFolder folder;
  save(folder / "file", named("n", int64_t{5}), named("x", Tensor::from(std::vector<float>{1, 2}, {2})));
  const std::string bytes = get(folder / "file");
  uint64_t length = 0;
  std::memcpy(&length, bytes.data(), 8);
  std::string header = bytes.substr(8, length);
  change(header);
  std::string head = safetensors_bytes(header);
  const std::string mark = "\"tessera.checksum\":\"xxh3 ";
  const size_t place = head.find(mark) + mark.size();
  if (head.find(mark) != std::string::npos && place + Xxh3::kDigits < head.size()) {
    head.replace(place, Xxh3::kDigits, Xxh3::kDigits, '0');
    Xxh3 hash;
    hash.add(head);
    head.replace(place, Xxh3::kDigits, hash.digits());
  }
  return head + bytes.substr(8 + length);
}

std::string change_to(const std::string& from, const std::string& to) {
  return resealed([&](std::string& header) {
    const size_t place = header.find(from);
    ASSERT_NE(place, std::string::npos) << from;
    header.replace(place, from.size(), to);
  });
}

TEST(Checkpoint, RefusesMalformedFilesByName) {
  const std::string good = change_to("\"i64 5\"", "\"i64 6\"");
  EXPECT_EQ(Checkpoint::read(InputFile("memory", good)).get<int64_t>("n"), 6);
  const std::pair<std::string, std::string> files[] = {
      {safetensors_bytes("{}"),
       "is not a checkpoint of tessera; its tensors can be read with load_safetensors"},
      {change_to("tessera.format", "tessera.formaT"), "is not a checkpoint of tessera"},
      {change_to("tessera.checksum", "tessera.checksuM"), "is not a checkpoint of tessera"},
      {change_to("\"tessera.format\":\"1\"", "\"tessera.format\":\"2\""),
       "has format 2, this program reads format 1; use the newer tessera"},
      {change_to("\"tessera.checksum\":\"xxh3 ", "\"tessera.checksum\":\"xxh4 "), "it says no proper value"},
      {change_to("\"tessera.checksum\":\"", "\"tessera.checksum\": \""), "it says no proper value"},
      {change_to("\"tessera.checksum\"", "\"tessera\\u002echecksum\""), "it says no proper value"},
      {change_to("\"n\":\"i64 5\"", "\"n\":\"i64\""), "the value of 'n', 'i64', is not a type and a value"},
      {change_to("\"i64 5\"", "\"\""), "is not a type and a value"},
      {change_to("\"i64 5\"", "\" 5\""), "is not a type and a value"},
      {change_to("\"i64 5\"", "\"i65 5\""), "'i65 5', is not a type and a value"},
      {change_to("\"i64 5\"", "\"i64  5\""), "is not a type and a value"},
      {change_to("\"i64 5\"", "\"i64 5 \""), "is not a type and a value"},
      {change_to("\"i64 5\"", "\"i64 +5\""), "is not a type and a value"},
      {change_to("\"i64 5\"", "\"i64 5.0\""), "is not a type and a value"},
      {change_to("\"i64 5\"", "\"i64 9223372036854775808\""), "is not a type and a value"},
      {change_to("\"i64 5\"", "\"u64 -1\""), "is not a type and a value"},
      {change_to("\"i64 5\"", "\"bool 2\""), "is not a type and a value"},
      {change_to("\"i64 5\"", "\"bool true\""), "is not a type and a value"},
      {change_to("\"i64 5\"", "\"f64 1.5x\""), "is not a type and a value"},
      {change_to("\"i64 5\"", "\"f64 1e999\""), "is not a type and a value"},
      {change_to("\"i64 5\"", "\"f32 \""), "is not a type and a value"},
      {change_to("\"i64 5\"", "\"rng 5\""), "is not a type and a value"},
      {change_to("\"i64 5\"", "\"rng 5 -1\""), "is not a type and a value"},
      {change_to("\"i64 5\"", "\"rng 5 1 1\""), "is not a type and a value"},
      {change_to("\"n\":", "\"\":"), "memory: the name '' cannot be used"},
      {change_to("\"n\":", "\"tessera.n\":"), "memory: the name 'tessera.n' cannot be used"},
      {change_to("\"x\":\"xxh3", "\"y\":\"xxh3"),
       "tensor 'x' has no checksum; another program changed the file"},
      {change_to("\"x\":\"xxh3", "\"x\":\"crc3"), "tensor 'x' (bytes "},
      {change_to("\"x\":{", "\"tessera.x\":{"), "tensor 'tessera.x' has no checksum"},
      {change_to("\"n\":\"i64 5\"", "\"n\":\"i64 5\",\"n\":\"i64 6\""), "the metadata key 'n' occurs twice"},
      {change_to("\"shape\":[2]", "\"shape\":[3]"), "has 8 bytes, expected 12 from its dtype and shape"},
  };
  for (const auto& [bytes, error] : files)
    EXPECT_TRUE(throws([&] { Checkpoint::read(InputFile("memory", bytes)); }, error));
}

TEST(Checkpoint, TwoTensorsThatChangedPlacesAreNoticed) {
  const TemporaryFolder folder;
  save(folder / "file", named("a", random_bits({4}, DType::f32, 1)),
       named("b", random_bits({4}, DType::f32, 2)));
  std::string bytes = get(folder / "file");
  const size_t data = bytes.size() - 32;
  bytes = bytes.substr(0, data) + bytes.substr(data + 16) + bytes.substr(data, 16);
  EXPECT_TRUE(throws([&] { Checkpoint::read(InputFile("memory", bytes)); }, "tensor 'a' (bytes "));
}

}  // namespace
}  // namespace tessera::io::test
