#include <sys/wait.h>

#include <array>
#include <cstdio>

#include "io/checkpoint.h"
#include "io/events.h"
#include "io/npy.h"
#include "io/torch_file.h"
#include "tests/errors.h"
#include "tests/io/files.h"

// Against the reference implementations, by a Python that has them (TESSERA_PEER_PYTHON, else python3).

namespace tessera::io::test {
namespace {

struct Answer {
  int status = 0;
  std::string text;
};

/// Runs a Python program with one argument.
Answer python(const std::string& program, const std::string& argument) {
  const TemporaryFolder folder;
  put(folder / "program.py", program);
  const char* const chosen = std::getenv("TESSERA_PEER_PYTHON");
  const std::string command =
      std::string(chosen ? chosen : "python3") + " '" + (folder / "program.py") + "' '" + argument + "' 2>&1";
  Answer answer;
  FILE* const pipe = ::popen(command.c_str(), "r");
  if (!pipe) return {1, "cannot start a shell"};
  std::array<char, 4096> buffer;
  for (size_t got; (got = std::fread(buffer.data(), 1, buffer.size(), pipe)) > 0;)
    answer.text.append(buffer.data(), got);
  answer.status = ::pclose(pipe);
  return answer;
}

bool python_has(const std::string& module) {
  static std::map<std::string, bool> known;
  const auto [found, is_new] = known.try_emplace(module);
  if (is_new) found->second = python("import " + module, "").status == 0;
  return found->second;
}

std::string no_module(const std::string& module) {
  return "no Python with " + module + " (set TESSERA_PEER_PYTHON to one that has it)";
}

NamedTensors one_of_each() {
  NamedTensors tensors;
  uint32_t seed = 1;
  for (const DType dtype : all_dtypes())
    for (const Shape& shape : {Shape{}, Shape{3}, Shape{2, 5}, Shape{0, 4}, Shape{2, 3, 4}})
      tensors.emplace_back("name " + std::to_string(seed % 7) + "\xC3\xA9\"\\/" + std::to_string(seed),
                           random_bits(shape, dtype, seed)),
          ++seed;
  return tensors;
}

TEST(Interop, TheReferenceReadsSafetensorsAndWritesTheSameBytes) {
  if (!python_has("safetensors")) GTEST_SKIP() << no_module("safetensors");
  const TemporaryFolder folder;
  const NamedTensors tensors = one_of_each();
  save_safetensors(folder / "ours", tensors, {{"key", "value\n\"\x01\x7F\xC3\xA9"}});
  const Answer answer = python(R"(
import ctypes, sys, safetensors
ours = open(sys.argv[1] + "/ours", "rb").read()
names = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16", "F8_E4M3": "float8_e4m3fn",
         "I64": "int64", "I32": "int32", "U8": "uint8", "BOOL": "bool"}
alive = []
def spec(t):
    data = bytes(t["data"])
    if not hasattr(safetensors, "TensorSpec"):  # before 0.8
        return {"dtype": names[t["dtype"]], "shape": t["shape"], "data": data}
    alive.append(ctypes.create_string_buffer(data, len(data) + 1))
    return safetensors.TensorSpec(dtype=names[t["dtype"]], shape=t["shape"],
                                  data_ptr=ctypes.addressof(alive[-1]), data_len=len(data))
tensors = {name: spec(t) for name, t in safetensors.deserialize(ours)}
theirs = safetensors.serialize(tensors, {"key": 'value\n"\x01\x7f\u00e9'})
open(sys.argv[1] + "/theirs", "wb").write(theirs)
assert len(tensors) == 45, len(tensors)
)",
                               folder.path());
  ASSERT_EQ(answer.status, 0) << answer.text;
  EXPECT_EQ(get(folder / "theirs"), get(folder / "ours"));
  const auto read = load_safetensors(folder / "theirs");
  for (const auto& [name, tensor] : tensors) EXPECT_TRUE(same(read.at(name), tensor)) << name;
}

TEST(Interop, TheReferenceReadsCheckpoints) {
  if (!python_has("safetensors")) GTEST_SKIP() << no_module("safetensors");
  const TemporaryFolder folder;
  save(folder / "file", named("x", Tensor::from(std::vector<float>{1, 2.5}, {2})), named("step", 7));
  const Answer answer = python(R"(
import sys, safetensors
f = safetensors.safe_open(sys.argv[1] + "/file", "np")
assert list(f.keys()) == ["x"] and f.get_tensor("x").tolist() == [1, 2.5]
assert f.metadata()["step"] == "i64 7"
)",
                               folder.path());
  EXPECT_EQ(answer.status, 0) << answer.text;
}

/// What the reference refuses, we refuse: random damage to headers, judged by both.
TEST(Interop, NothingIsAcceptedThatTheReferenceRefuses) {
  if (!python_has("safetensors")) GTEST_SKIP() << no_module("safetensors");
  const TemporaryFolder folder;
  const std::array<std::string, 3> seeds = {
      safetensors_bytes(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})", "12"),
      safetensors_bytes(R"({"__metadata__":{"k":"v"},"a":{"dtype":"F16","shape":[1,2],"data_offsets":[0,4]},)"
                        R"("b":{"dtype":"BOOL","shape":[0],"data_offsets":[4,4]}})",
                        "1234"),
      safetensors_bytes("{}      ")};
  const std::string pieces[] = {"{",
                                "}",
                                "[",
                                "]",
                                ":",
                                ",",
                                "\"",
                                "0",
                                "1",
                                "2",
                                " ",
                                "-",
                                "\\u0061",
                                "null",
                                "\n",
                                "\x80",
                                std::string(1, '\0')};
  std::mt19937 random(7);
  std::string all;
  std::vector<bool> ours;
  const int kMutants = 20'000;
  for (int i = 0; i < kMutants; ++i) {
    std::string bytes = seeds[random() % seeds.size()];
    for (int changes = 1 + int(random() % 4 == 0); changes > 0; --changes) {
      const size_t at = random() % bytes.size();
      switch (random() % 5) {
        case 0:
          bytes[at] = char(bytes[at] ^ (1 << random() % 8));
          break;
        case 1:
          bytes.erase(at, 1 + random() % 3);
          break;
        case 2:
          bytes.insert(at, pieces[random() % std::size(pieces)]);
          break;
        case 3:
          bytes.replace(at, 1, pieces[random() % std::size(pieces)]);
          break;
        default:
          bytes.insert(at, bytes.substr(random() % bytes.size(), random() % 20));
      }
      if (bytes.empty()) bytes = "x";
    }
    // Mostly with the length made right, so that the mutants get past the first check.
    if (bytes.size() > 8 && random() % 8) {
      const size_t end = bytes.rfind('}');
      const uint64_t length = end == std::string::npos || end < 8 ? bytes.size() - 8 : end - 7;
      std::memcpy(bytes.data(), &length, 8);
    }
    ours.push_back(message_of([&] { SafetensorsFile(InputFile("memory", bytes)); }).empty());
    const uint32_t size = uint32_t(bytes.size());
    all.append(reinterpret_cast<const char*>(&size), 4).append(bytes);
  }
  put(folder / "mutants", all);
  const Answer answer = python(R"(
import sys, safetensors, struct
data, at = open(sys.argv[1] + "/mutants", "rb").read(), 0
out = []
while at < len(data):
    n, = struct.unpack_from("<I", data, at)
    try:
        safetensors.deserialize(data[at + 4 : at + 4 + n])
        out.append("1")
    except Exception:
        out.append("0")
    at += 4 + n
print("".join(out))
)",
                               folder.path());
  ASSERT_EQ(answer.status, 0) << answer.text;
  ASSERT_EQ(answer.text.size(), size_t(kMutants) + 1) << answer.text;
  int accepted = 0, stricter = 0;
  for (int i = 0; i < kMutants; ++i) {
    EXPECT_FALSE(ours[size_t(i)] && answer.text[size_t(i)] == '0') << "mutant " << i;
    accepted += ours[size_t(i)];
    stricter += !ours[size_t(i)] && answer.text[size_t(i)] == '1';
  }
  EXPECT_GT(accepted, 500);  // else the mutants prove nothing
  RecordProperty("accepted", accepted);
  RecordProperty("stricter", stricter);
}

TEST(Interop, NumpyReadsNpyAndWritesTheSameBytes) {
  if (!python_has("numpy")) GTEST_SKIP() << no_module("numpy");
  const TemporaryFolder folder;
  std::map<std::string, Tensor> tensors;
  for (const auto& [name, tensor] : one_of_each())
    if (tensor.dtype() != DType::bf16 && tensor.dtype() != DType::f8e4m3)
      tensors.emplace(std::to_string(tensors.size()), tensor);
  for (const auto& [name, tensor] : tensors) save_npy(folder / (name + ".ours"), tensor);
  const Answer answer = python(R"(
import sys, glob, io, numpy
from numpy.lib import format
for path in glob.glob(sys.argv[1] + "/*.ours"):
    with open(path, "rb") as f: x = numpy.load(f)
    base = path[:-len("ours")]
    with open(base + "theirs", "wb") as f: numpy.save(f, x)
    for version in (1, 2, 3):
        with open(base + "v%d" % version, "wb") as f: format.write_array(f, x, (version, 0))
    with open(base + "fortran", "wb") as f: numpy.save(f, numpy.asarray(x, order="F"))
    with open(base + "big", "wb") as f: numpy.save(f, x.astype(x.dtype.newbyteorder(">")))
arrays = {"x": numpy.arange(3, dtype=numpy.int16), "y/z": numpy.full((50, 50), 0.5, dtype=numpy.float32)}
numpy.savez(sys.argv[1] + "/archive.npz", **arrays)
numpy.savez_compressed(sys.argv[1] + "/compressed.npz", **arrays)
numpy.save(sys.argv[1] + "/objects.npy", numpy.array([None, {}], dtype=object), allow_pickle=True)
numpy.save(sys.argv[1] + "/records.npy", numpy.zeros(2, dtype=[("a", "<f4")]))
)",
                               folder.path());
  ASSERT_EQ(answer.status, 0) << answer.text;
  for (const auto& [name, tensor] : tensors) {
    EXPECT_EQ(get(folder / (name + ".theirs")), get(folder / (name + ".ours"))) << name;
    for (const char* kind : {".theirs", ".v1", ".v2", ".v3", ".fortran"})
      EXPECT_TRUE(same(load_npy(folder / (name + kind)), tensor)) << name << kind;
    if (size_of(tensor.dtype()) == 1) continue;  // no byte order
    EXPECT_TRUE(throws([&] { load_npy(folder / (name + ".big")); }, "big-endian")) << name;
  }
  EXPECT_TRUE(throws([&] { load_npy(folder / "archive.npz"); }, "an .npz? read it with load_npz"));
  for (const char* const name : {"archive.npz", "compressed.npz"}) {
    if (!has_torch_files()) break;
    const std::map<std::string, Tensor> arrays = load_npz(folder / name);
    ASSERT_EQ(arrays.size(), 2u) << name;
    EXPECT_EQ(arrays.at("x").to_vector<int32_t>(), (std::vector<int32_t>{0, 1, 2})) << name;
    EXPECT_TRUE(same(arrays.at("y/z"), Tensor::full({50, 50}, 0.5))) << name;
  }
  EXPECT_TRUE(throws([&] { load_npy(folder / "objects.npy"); }, "Python objects (a pickle)"));
  EXPECT_TRUE(throws([&] { load_npy(folder / "records.npy"); }, "a structured array"));
}

TEST(Interop, TensorBoardReadsEvents) {
  if (!EventWriter::available()) GTEST_SKIP() << "this build has no libprotobuf";
  if (!python_has("tensorboard")) GTEST_SKIP() << no_module("tensorboard");
  const TemporaryFolder folder;
  {
    EventWriter events(folder / "run");
    events.scalar("loss/train", 0, 1.5, 1e9);
    events.scalar("loss/train", 1, 0.0, 1e9 + 1);
    events.scalar("loss/train", 2, NAN, 1e9 + 2);
    events.scalar("rate", 5'000'000'000, -INFINITY, 1e9 + 3);
    events.flush();
  }
  const Answer answer = python(R"(
import sys, math
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1] + "/run")
events.Reload()
assert sorted(events.Tags()["scalars"]) == ["loss/train", "rate"], events.Tags()
loss = [(e.wall_time, e.step, e.value) for e in events.Scalars("loss/train")]
assert loss[:2] == [(1e9, 0, 1.5), (1e9 + 1, 1, 0.0)] and loss[2][1] == 2 and math.isnan(loss[2][2]), loss
assert [(e.step, e.value) for e in events.Scalars("rate")] == [(5000000000, -math.inf)]
)",
                               folder.path());
  EXPECT_EQ(answer.status, 0) << answer.text;
}

}  // namespace
}  // namespace tessera::io::test
