#include "tensor/fields.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

enum class Mode { a, b };

struct Head {
  Tensor bias;
  int64_t size = 3;
  void fields(auto&& visit) { visit("bias", bias), visit("size", size); }
};

struct Everything {
  Tensor weight;
  std::vector<Head> heads{2};
  std::optional<Head> absent, present = Head();
  std::unique_ptr<Head> owned = std::make_unique<Head>(), nothing;
  std::variant<std::monostate, Head> none, some = Head();
  std::tuple<Head, double> tuple;
  std::pair<int, std::string> pair;
  std::array<Tensor, 2> array;
  Rng rng{1};
  std::string text;
  bool flag = false;
  Mode mode = Mode::a;
  std::vector<double> curve;
  std::vector<std::vector<Tensor>> nested{std::vector<Tensor>(1), std::vector<Tensor>(2)};
  std::vector<Everything> empty;
  void fields(auto&& visit) {
    visit("weight", weight), visit("heads", heads), visit("absent", absent), visit("present", present);
    visit("owned", owned), visit("nothing", nothing), visit("none", none), visit("some", some);
    visit("tuple", tuple), visit("pair", pair), visit("array", array), visit("rng", rng), visit("text", text);
    visit("flag", flag), visit("mode", mode), visit("curve", curve), visit("nested", nested);
    visit("empty", empty);
  }
};

const std::vector<std::string> kNames = {
    "weight",       "heads.0.bias", "heads.0.size", "heads.1.bias", "heads.1.size", "present.bias",
    "present.size", "owned.bias",   "owned.size",   "some.bias",    "some.size",    "tuple.0.bias",
    "tuple.0.size", "tuple.1",      "pair.0",       "pair.1",       "array.0",      "array.1",
    "rng",          "text",         "flag",         "mode",         "curve",        "nested.0.0",
    "nested.1.0",   "nested.1.1"};

TEST(Fields, NamesEveryLeafInOrder) {
  Everything object;
  std::vector<std::string> names;
  for_each_field(object, [&](const std::string& name, auto& leaf) {
    static_assert(!std::is_const_v<std::remove_reference_t<decltype(leaf)>>);
    names.push_back(name);
  });
  EXPECT_EQ(names, kNames);
}

TEST(Fields, AConstObjectHasConstLeaves) {
  const Everything object;
  std::vector<std::string> names;
  for_each_field(
      object,
      [&](const std::string& name, auto& leaf) {
        static_assert(std::is_const_v<std::remove_reference_t<decltype(leaf)>>);
        names.push_back(name.substr(2));
        EXPECT_EQ(name.substr(0, 2), "x.");
      },
      "x");
  EXPECT_EQ(names, kNames);
}

TEST(Fields, LeavesCanBeChanged) {
  Everything object;
  for_each_field(object, [](const std::string&, auto& leaf) {
    if constexpr (std::is_same_v<decltype(leaf), int64_t&>) leaf = 9;
  });
  EXPECT_EQ(object.heads[1].size, 9);
  EXPECT_EQ(object.owned->size, 9);
  EXPECT_EQ(std::get<Head>(object.some).size, 9);
}

TEST(Fields, NodesAreFoundByType) {
  Everything object;
  std::vector<std::string> heads;
  std::string root = "none";
  for_each_node(object, [&](const std::string& name, auto& node) {
    if constexpr (std::is_same_v<decltype(node), Head&>) heads.push_back(name);
    if constexpr (std::is_same_v<decltype(node), Everything&>) root = name;
  });
  EXPECT_EQ(heads, (std::vector<std::string>{"heads.0", "heads.1", "present", "owned", "some", "tuple.0"}));
  EXPECT_EQ(root, "");
}

struct Wrapper {
  Head head;
  int64_t number = 3;
  void fields(auto&& visit) { visit("", head), visit("number", number); }
};

TEST(Fields, APartWithoutANameHasThatOfItsStruct) {
  std::pair<Wrapper, int64_t> object;
  std::vector<std::string> leaves, top, heads;
  for_each_field(object, [&](const std::string& name, auto&) { leaves.push_back(name); });
  EXPECT_EQ(leaves, (std::vector<std::string>{"0.bias", "0.size", "0.number", "1"}));
  for_each_field(object.first, [&](const std::string& name, auto&) { top.push_back(name); });
  EXPECT_EQ(top, (std::vector<std::string>{"bias", "size", "number"}));
  for_each_node(object, [&](const std::string& name, auto& node) {
    if constexpr (std::is_same_v<decltype(node), Head&>) heads.push_back(name);
  });
  EXPECT_EQ(heads, std::vector<std::string>{"0"});
}

TEST(Fields, ALeafAloneHasThePrefixForItsName) {
  int64_t step = 0;
  std::string seen;
  for_each_field(
      step, [&](const std::string& name, auto&) { seen = name; }, "step");
  EXPECT_EQ(seen, "step");
}

}  // namespace
}  // namespace tessera
