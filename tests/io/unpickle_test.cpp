#include "io/unpickle.h"

#include <set>

#include "tests/errors.h"
#include "tests/io/files.h"
#include "tests/io/torch_bytes.h"

namespace tessera::io::test {
namespace {

using namespace pickle;

std::vector<PickledTensor> read(const std::string& code) {
  return read_state_dict("model.bin", code);
}

TEST(Unpickle, ReadsADictionaryOfTensors) {
  const auto tensors = read(program({{"a", matrix()},
                                     {"b", tensor_of(storage("HalfStorage", "7", 10), 2, {2, 2}, {1, 4})},
                                     {"c", tensor_of(storage("LongStorage", "8", 1), 0, {}, {})}}));
  ASSERT_EQ(tensors.size(), 3u);
  EXPECT_EQ(tensors[0].name, "a");
  EXPECT_EQ(tensors[0].dtype, DType::f32);
  EXPECT_EQ(tensors[0].layout.shape, (Shape{2, 3}));
  EXPECT_EQ(tensors[0].storage, "0");
  EXPECT_EQ(tensors[0].storage_elements, 6u);
  EXPECT_EQ(tensors[1].dtype, DType::f16);
  EXPECT_EQ(tensors[1].layout.offset, 2);
  EXPECT_EQ(tensors[1].layout.stride(1), 4);
  EXPECT_EQ(tensors[2].layout.shape, Shape{});
}

TEST(Unpickle, ReadsEveryDtypeThatThereIs) {
  const std::pair<const char*, DType> types[] = {
      {"DoubleStorage", DType::f64}, {"FloatStorage", DType::f32},   {"BFloat16Storage", DType::bf16},
      {"HalfStorage", DType::f16},   {"LongStorage", DType::i64},    {"IntStorage", DType::i32},
      {"ByteStorage", DType::u8},    {"BoolStorage", DType::boolean}};
  for (const auto& [name, dtype] : types) EXPECT_EQ(read(program({{"x", matrix(name)}}))[0].dtype, dtype);
}

TEST(Unpickle, ReadsTensorsOfADtypeWithoutATypeOfStorage) {
  const std::string bytes = untyped_storage("0", 6), e4m3 = global("torch", "float8_e4m3fn");
  const auto read_one = [](const std::string& tensor) { return read(program({{"x", tensor}})).at(0); };
  const PickledTensor tensor = read_one(typed_tensor_of(bytes, 1, {2, 2}, {1, 3}, e4m3));
  EXPECT_EQ(tensor.dtype, DType::f8e4m3);
  EXPECT_EQ(tensor.storage_elements, 6u);
  EXPECT_EQ(tensor.layout.shape, (Shape{2, 2}));
  EXPECT_EQ(tensor.layout.offset, 1);
  EXPECT_EQ(read_one(typed_tensor_of(bytes, 0, {6}, {1}, e4m3, kEmptyDict)).dtype, DType::f8e4m3);
  const std::string negated = kEmptyDict + text("neg") + kTrue + kSetItem, mixed = "of other kinds than";
  const std::pair<std::string, std::string> refused[] = {
      {typed_tensor_of(bytes, 2, {2, 3}, {3, 1}, e4m3), "reaches to element 7 of a storage of 6"},
      {typed_tensor_of(bytes, 0, {6}, {1}, e4m3, negated), "whose metadata sets 'neg'"},
      {typed_tensor_of(bytes, 0, {6}, {1}, global("torch", "float8_e5m2")), "names torch.float8_e5m2"},
      {typed_tensor_of(bytes, 0, {6}, {1}, global("torch", "FloatStorage")), mixed},
      {typed_tensor_of(bytes, 0, {6}, {1}, kNone), mixed},
      {typed_tensor_of(storage("FloatStorage", "0", 6), 0, {6}, {1}, e4m3), mixed},
      {tensor_of(bytes, 0, {6}, {1}), mixed},
      {global("torch._utils", "_rebuild_tensor_v3") + tuple({bytes, e4m3}) + kReduce, "of 2 arguments"},
      {e4m3 + kEmptyTuple + kReduce, "calls torch.float8_e4m3fn"}};
  for (const auto& [code, error] : refused) EXPECT_TRUE(throws([&] { read_one(code); }, error)) << error;
}

TEST(Unpickle, UnderstandsWhatSurroundsTensorsAndPassesItOver) {
  // An OrderedDict with attributes, a parameter, memos, nested dictionaries, and values of every other kind.
  const std::string parameter =
      global("torch._utils", "_rebuild_parameter") + tuple({matrix(), kTrue, ordered_dict()}) + kReduce;
  const std::string inner = kEmptyDict + text("w") + matrix() + kSetItem + integer(3) + matrix() + kSetItem;
  const std::string code =
      kProto + ordered_dict() + std::string("q\0", 2) + kMark + text("p") + parameter + text("model") +
      inner + text("epoch") + integer(3) + text("lr") + "G" + std::string(8, '\0') + text("done") + kTrue +
      text("name") + text("x") + text("none") + kNone + text("pair") + integer(1) + "K\1" + "\x86" +
      text("half") + "M\1\1" + std::string("r\5\0\0\0", 5) + text("again") + std::string("j\5\0\0\0", 5) +
      kSetItems + kEmptyDict + text("_metadata") + ordered_dict() + kSetItem + kBuild + kStop;
  std::set<std::string> names;
  std::vector<std::string> others;
  for (const PickledTensor& tensor : read_state_dict("model.bin", code, &others)) names.insert(tensor.name);
  EXPECT_EQ(names, (std::set<std::string>{"p", "model.w", "model.3"}));
  EXPECT_EQ(others, (std::vector<std::string>{"epoch (an integer)", "lr (a float)", "done (a bool)",
                                              "name (a string)", "none (None)", "pair (a tuple)",
                                              "half (an integer)", "again (an integer)"}));
}

/// A tensor of six elements with that as its seventh argument.
std::string with_metadata(const std::string& metadata) {
  return global("torch._utils", "_rebuild_tensor_v2") +
         tuple({storage("FloatStorage", "0", 6), wide(0), integers({6}), integers({1}), kFalse,
                ordered_dict(), metadata}) +
         kReduce;
}

TEST(Unpickle, RefusesTensorsWhoseValuesAreNotThoseOfTheirStorage) {
  const auto set = [](const std::string& name, const std::string& value) {
    return program({{"x", with_metadata(kEmptyDict + text(name) + value + kSetItem)}});
  };
  EXPECT_EQ(read(program({{"x", with_metadata(kEmptyDict)}})).size(), 1u);
  EXPECT_EQ(read(set("neg", kFalse)).size(), 1u);
  EXPECT_TRUE(
      throws([&] { read(set("neg", kTrue)); }, "a tensor whose metadata sets 'neg', so that its values"));
  EXPECT_TRUE(throws([&] { read(set("other", integer(0))); }, "sets 'other'"));
  EXPECT_TRUE(throws(
      [&] {
        read(program({{"x", with_metadata(kTrue)}}));
      },
      "uses a bool as a tensor's metadata"));
}

TEST(Unpickle, EveryInstructionIsKnownOrRefusedByName) {
  const std::string known = "\x80(})N\x88\x89JKM\x8AGXcQt\x85\x86\x87Rbsuqrhj.";
  EXPECT_EQ(known.size(), 28u);
  constexpr char kDigits[] = "0123456789abcdef";
  for (int opcode = 0; opcode < 256; ++opcode) {
    const std::string error = message_of([&] { read(kProto + char(opcode)); });
    ASSERT_FALSE(error.empty()) << opcode;
    const std::string named =
        std::string("has the instruction 0x") + kDigits[opcode >> 4] + kDigits[opcode & 15];
    EXPECT_EQ(error.find(named) == std::string::npos, known.find(char(opcode)) != std::string::npos)
        << opcode << ": " << error;
    if (known.find(char(opcode)) == std::string::npos) {
      expect_parts(error, {"(at byte 2 of it)", "torch.save(model.state_dict(), path)", "safetensors"});
    }
  }
}

TEST(Unpickle, ATensorMayStandAlone) {
  const std::vector<PickledTensor> tensors = read(kProto + matrix() + kStop);
  ASSERT_EQ(tensors.size(), 1u);
  EXPECT_EQ(tensors[0].name, kBareTensor);
  EXPECT_EQ(tensors[0].layout.shape, (Shape{2, 3}));
}

struct RefusedProgram {
  const char* what;
  std::string code, error;
};

std::vector<RefusedProgram> refused_programs() {
  const std::string big(kProto + text("x"));
  const std::string six = storage("FloatStorage", "0", 6);
  const auto tensor = [&](int64_t offset, std::vector<int64_t> sizes, std::vector<int64_t> strides) {
    return program({{"x", tensor_of(six, offset, sizes, strides)}});
  };
  const int64_t huge = INT64_MAX;
  std::string deep = kProto;
  for (int i = 0; i < 10; ++i) deep += kEmptyDict + text("d");
  deep += matrix() + kSetItem;
  for (int i = 0; i < 9; ++i) deep += kSetItem;
  return {
      {"nothing", "", "is cut short"},
      {"no stop", kProto + kEmptyDict, "is cut short"},
      {"protocol 0", std::string("\x80\0.", 3), "is of protocol 0, expected 2"},
      {"protocol 4", "\x80\x04.", "is of protocol 4, expected 2"},
      {"protocol 255", "\x80\xFF.", "is of protocol 255, expected 2"},
      {"stop on an empty stack", kProto + kStop, "takes from an empty stack"},
      {"left over", kProto + kNone + kEmptyDict + kStop, "ends with objects left over"},
      {"a mark left over", kProto + kMark + kEmptyDict + kStop, "ends with objects left over"},
      {"past the end", kProto + kEmptyDict + kStop + "N", "continues past its end"},
      {"no dictionary", kProto + integer(3) + kStop,
       "holds an integer where a dictionary of tensors is expected"},
      {"a storage alone", kProto + storage("FloatStorage", "0", 6) + kStop,
       "holds a storage where a dictionary"},
      {"tuple without mark", kProto + kNone + kTuple + kStop, "goes back to a mark that is not there"},
      {"items without mark", kProto + kEmptyDict + kSetItems + kStop, "goes back to a mark"},
      {"tuple of too few", kProto + kNone + "\x87" + kStop, "takes from an empty stack"},
      {"below the mark", kProto + kEmptyDict + kMark + text("a") + kSetItem + kStop,
       "takes from an empty stack"},
      {"key without value", kProto + kEmptyDict + kMark + text("a") + kSetItems + kStop,
       "a key without a value"},
      {"item of an integer", kProto + integer(1) + text("a") + kNone + kSetItem + kStop,
       "sets an item of an integer"},
      {"item of a tensor", kProto + matrix() + text("a") + kNone + kSetItem + kStop,
       "sets an item of a tensor"},
      {"item of a tuple", kProto + kEmptyTuple + text("a") + kNone + kSetItem + kStop,
       "sets an item of a tuple"},
      {"a tuple for a key", kProto + kEmptyDict + kEmptyTuple + kNone + kSetItem + kStop,
       "uses a tuple as a key"},
      {"memo unset", kProto + "h\x05" + kStop, "asks for memo 5, which is not set"},
      {"long memo unset", kProto + "j" + raw(uint32_t(-1)) + kStop, "asks for memo 4294967295"},
      {"memo of nothing", kProto + std::string("q\0", 2) + kStop, "takes from an empty stack"},
      {"long of 9 bytes", kProto + "\x8A\x09" + std::string(9, '\1') + kStop,
       "an integer of 9 bytes, more than 8"},
      {"long of 255 bytes", kProto + "\x8A\xFF" + kStop, "an integer of 255 bytes"},
      {"text of 2^32 - 1 bytes", kProto + "X" + raw(uint32_t(-1)) + "abc", "is cut short"},
      {"text past the end", big.substr(0, big.size() - 1), "is cut short"},
      {"integer past the end", kProto + "J\1\1", "is cut short"},
      {"global without line", kProto + "ctorch", "is cut short"},
      {"os.system", kProto + global("os", "system") + tuple({text("true")}) + kReduce + kStop,
       "names os.system, which is not among those allowed"},
      {"builtins.eval", kProto + global("builtins", "eval") + kStop, "names builtins.eval"},
      {"posix.system", kProto + global("posix", "system") + kStop, "names posix.system"},
      {"torch.load", kProto + global("torch", "load") + kStop, "names torch.load"},
      {"a submodule's", kProto + global("torch.storage", "FloatStorage") + kStop,
       "names torch.storage.FloatStorage"},
      {"other storages", kProto + global("torch", "ShortStorage") + kStop, "names torch.ShortStorage"},
      {"control characters", kProto + global("a\tb", std::string(200, 'x')) + kStop, "names a?b.xxx"},
      {"calls a storage", kProto + global("torch", "FloatStorage") + kEmptyTuple + kReduce + kStop,
       "calls torch.FloatStorage"},
      {"calls a string", kProto + text("eval") + kEmptyTuple + kReduce + kStop, "calls a string"},
      {"arguments not a tuple", kProto + global("collections", "OrderedDict") + kEmptyDict + kReduce + kStop,
       "uses a dictionary as arguments"},
      {"OrderedDict of items",
       kProto + global("collections", "OrderedDict") + tuple({kEmptyTuple}) + kReduce + kStop,
       "makes an OrderedDict of arguments"},
      {"build on a tensor", kProto + matrix() + kEmptyDict + kBuild + kStop, "sets attributes of a tensor"},
      {"build of a tuple", kProto + kEmptyDict + kEmptyTuple + kBuild + kStop, "uses a tuple as attributes"},
      {"build on nothing", kProto + kEmptyDict + kBuild + kStop, "takes from an empty stack"},
      {"id not a tuple", kProto + text("storage") + kPersistent + kStop,
       "uses a string as the id of a storage"},
      {"id too short", kProto + tuple({text("storage")}) + kPersistent + kStop,
       "an id that is not of a storage"},
      {"id of a module",
       kProto + tuple({text("module"), global("torch", "FloatStorage"), text("0"), text("cpu"), integer(1)}) +
           kPersistent + kStop,
       "an id that is not of a storage"},
      {"id with another name",
       kProto +
           tuple(
               {text("storage"), global("collections", "OrderedDict"), text("0"), text("cpu"), integer(1)}) +
           kPersistent + kStop,
       "an id that is not of a storage"},
      {"storage of -1", kProto + storage("FloatStorage", "0", -1) + kStop, "a storage of -1 elements"},
      {"tensor of no arguments",
       kProto + global("torch._utils", "_rebuild_tensor_v2") + kEmptyTuple + kReduce + kStop,
       "makes a tensor of 0 arguments"},
      {"tensor of a string", program({{"x", tensor_of(text("0"), 0, {1}, {1})}}),
       "makes a tensor of arguments of other kinds"},
      {"parameter of an integer",
       kProto + global("torch._utils", "_rebuild_parameter") + tuple({integer(1), kTrue, ordered_dict()}) +
           kReduce + kStop,
       "makes a parameter of what is not a tensor"},
      {"negative offset", tensor(-1, {1}, {1}), "overflow"},
      {"negative size", tensor(0, {-1}, {1}), "a tensor with size -1 and stride 1"},
      {"negative stride", tensor(5, {2}, {-1}), "a tensor with size 2 and stride -1"},
      {"one too many", tensor(1, {2, 3}, {3, 1}), "reaches to element 6 of a storage of 6"},
      {"stride too far", tensor(0, {2, 3}, {4, 1}), "reaches to element 6"},
      {"repeats", tensor(0, {100, 6}, {0, 1}),
       "a tensor of 600 elements on a storage of 6, which repeats some"},
      {"stride times size overflows", tensor(0, {3}, {huge}), "overflow"},
      {"offset plus reach overflows", tensor(huge, {2}, {huge}), "overflow"},
      {"sizes overflow", tensor(0, {huge, huge}, {0, 0}), "overflow"},
      {"sizes overflow but for a 0", tensor(0, {huge, 0, huge}, {0, 0, 0}), "overflow"},
      {"sizes wrap to small", tensor(0, {int64_t{1} << 32, int64_t{1} << 32}, {0, 0}), "overflow"},
      {"fewer strides", tensor(0, {2, 3}, {1}), "a tensor of 2 sizes and 1 strides"},
      {"nine dimensions", tensor(0, std::vector<int64_t>(9, 1), std::vector<int64_t>(9, 1)),
       "9 sizes and 9 strides"},
      {"size a string",
       kProto + global("torch._utils", "_rebuild_tensor_v2") +
           tuple({six, integer(0), tuple({text("1")}), tuple({integer(1)}), kFalse, ordered_dict()}) +
           kReduce + kStop,
       "a size or stride that is not an integer"},
      {"the same name twice", program({{"x", matrix()}, {"x", matrix()}}), "two tensors of the name 'x'"},
      {"a name that nests to another",
       program({{"a.b", matrix()}, {"a", kEmptyDict + text("b") + matrix() + kSetItem}}),
       "two tensors of the name 'a.b'"},
      {"ten deep", deep + kStop, "dictionaries more than 8 deep"},
      {"within itself",
       kProto + kEmptyDict + std::string("q\0", 2) + text("a") + std::string("h\0", 2) + kSetItem + kStop,
       "dictionaries more than 8 deep"},
      {"three million objects", kProto + std::string(3'000'000, 'N') + kStop, "needs more than 48 MiB"},
  };
}

TEST(Unpickle, RefusesWhatIsNotADictionaryOfTensors) {
  for (const RefusedProgram& refused : refused_programs())
    EXPECT_TRUE(throws([&] { read(refused.code); }, refused.error)) << refused.what;
}

TEST(Unpickle, DictionariesThatShareOneAnotherDoNotMultiply) {
  // Seven dictionaries, each two hundred times in the next: 200^7 paths, of which the budget ends the walk.
  std::string code = kEmptyDict + text("w") + matrix() + kSetItem;
  for (char level = 0; level < 7; ++level) {
    code = kEmptyDict + kMark + text("first") + code + "q" + level;
    for (int i = 0; i < 200; ++i) code += text(std::to_string(i)) + "h" + level;
    code += kSetItems;
  }
  EXPECT_TRUE(throws([&] { read(kProto + code + kStop); }, "needs more than 48 MiB"));
}

TEST(Unpickle, EveryCutAndEveryChangedByteIsReadOrRefused) {
  const std::string whole = program({{"a", matrix()}, {"b", matrix("LongStorage", "1")}});
  for (size_t length = 0; length < whole.size(); ++length)
    EXPECT_FALSE(message_of([&] { read(whole.substr(0, length)); }).empty()) << length;
  for (size_t at = 0; at < whole.size(); ++at)
    for (const int change : {1, 0x20, 0x80, 0xFF}) {
      std::string changed = whole;
      changed[at] = char(changed[at] ^ change);
      message_of([&] { read(changed); });  // nothing but Error comes out, and no sanitizer complains
    }
}

}  // namespace
}  // namespace tessera::io::test
