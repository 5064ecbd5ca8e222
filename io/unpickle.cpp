#include "io/unpickle.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <map>
#include <set>
#include <utility>

#include "io/safetensors_internal.h"

namespace tessera::io {
namespace {

enum class Kind : uint8_t {
  none,
  boolean,
  integer,
  real,
  text,
  tuple,
  dictionary,
  name,
  storage,
  untyped_storage,
  tensor
};

const char* name_of(Kind kind) {
  constexpr const char* kNames[] = {
      "None",   "a bool",    "an integer",         "a float", "a string", "a tuple", "a dictionary",
      "a name", "a storage", "an untyped storage", "a tensor"};
  return kNames[size_t(kind)];
}

/// The names that may occur, and what they stand for.
enum class Global : uint8_t {
  ordered_dict,
  rebuild_tensor,
  rebuild_typed_tensor,
  rebuild_parameter,
  storage,
  untyped_storage,
  dtype
};
struct GlobalName {
  const char *module, *name;
  Global global;
  DType dtype;
};
constexpr std::array<GlobalName, 14> kGlobals = {
    {{"collections", "OrderedDict", Global::ordered_dict, DType::f32},
     {"torch._utils", "_rebuild_tensor_v2", Global::rebuild_tensor, DType::f32},
     {"torch._utils", "_rebuild_tensor_v3", Global::rebuild_typed_tensor, DType::f32},
     {"torch._utils", "_rebuild_parameter", Global::rebuild_parameter, DType::f32},
     {"torch", "DoubleStorage", Global::storage, DType::f64},
     {"torch", "FloatStorage", Global::storage, DType::f32},
     {"torch", "BFloat16Storage", Global::storage, DType::bf16},
     {"torch", "HalfStorage", Global::storage, DType::f16},
     {"torch", "LongStorage", Global::storage, DType::i64},
     {"torch", "IntStorage", Global::storage, DType::i32},
     {"torch", "ByteStorage", Global::storage, DType::u8},
     {"torch", "BoolStorage", Global::storage, DType::boolean},
     {"torch.storage", "UntypedStorage", Global::untyped_storage, DType::u8},
     {"torch", "float8_e4m3fn", Global::dtype, DType::f8e4m3}}};

struct Object {
  Kind kind = Kind::none;
  int64_t integer = 0;               // boolean, integer; number of the name in kGlobals; a storage's elements
  DType dtype = DType::f32;          // of a storage, of a tensor
  std::string text;                  // text; key of a storage
  std::vector<const Object*> items;  // tuple; dictionary: keys and values in turn; tensor: its storage
  Layout layout;                     // tensor
};

/// Memory limit of the unpickler, whatever the file's size; no state dictionary comes near it.
constexpr size_t kBudget = size_t{48} << 20;
constexpr int kDeepest = 8;  // dictionaries within dictionaries

class Machine {
 public:
  Machine(const std::string& path, std::string_view pickle) : path_(path), code_(pickle) {}

  const Object& run() {
    while (true) {
      opcode_at_ = at_;
      spend(32);  // a place on the stack, a memo or an item of a tuple
      const auto opcode = uint8_t(take(1)[0]);
      if (opcode == '.') break;
      step(opcode);
    }
    const Object* const result = pop();
    require(stack_.empty() && marks_.empty(), "ends with objects left over");
    require(at_ == code_.size(), "continues past its end");
    return *result;
  }

  std::vector<PickledTensor> tensors_of(const Object& object, std::vector<std::string>* others) {
    if (object.kind == Kind::tensor) return {named(kBareTensor, object)};
    require(object.kind == Kind::dictionary,
            std::string("holds ") + name_of(object.kind) + " where a dictionary of tensors is expected");
    std::vector<PickledTensor> tensors;
    std::set<std::string> names;
    collect(object, "", 0, tensors, names, others);
    return tensors;
  }

 private:
  template <class... Parts>
  [[noreturn]] void refuse(const Parts&... parts) const {
    fail_at(
        Site::here(), "read: ", path_, ": the pickle ", parts..., " (at byte ", opcode_at_,
        " of it); only tensors and dictionaries of them as state_dict() makes them are read, and nothing is "
        "executed. In Python write that alone, torch.save(model.state_dict(), path), or a safetensors file");
  }
  template <class... Parts>
  void require(bool holds, const Parts&... parts) const {
    if (!holds) refuse(parts...);
  }

  void spend(size_t bytes) {
    spent_ += bytes;
    require(spent_ <= kBudget, "needs more than ", kBudget >> 20, " MiB of memory to be read");
  }

  // ---- the program's bytes ----

  std::string_view take(uint64_t bytes) {
    require(bytes <= code_.size() - at_, "is cut short");
    const std::string_view part = code_.substr(at_, size_t(bytes));
    at_ += size_t(bytes);
    return part;
  }
  template <class T>
  T number() {
    T value;
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }
  std::string_view line() {
    const size_t end = code_.find('\n', at_);
    require(end != std::string_view::npos, "is cut short");
    const std::string_view text = take(end - at_);
    at_ += 1;
    return text;
  }

  // ---- the stack ----

  Object& push(Kind kind) {
    spend(sizeof(Object) + 16);
    objects_.emplace_back();
    objects_.back().kind = kind;
    stack_.push_back(&objects_.back());
    return objects_.back();
  }
  void push_integer(int64_t value) { push(Kind::integer).integer = value; }
  /// The mark on top of the stack hides what lies below it.
  const Object* pop() {
    require(stack_.size() > (marks_.empty() ? 0 : marks_.back()), "takes from an empty stack");
    const Object* const object = stack_.back();
    stack_.pop_back();
    return object;
  }
  const Object* pop(Kind kind, const char* what) {
    const Object* const object = pop();
    require(object->kind == kind, "uses ", name_of(object->kind), " as ", what);
    return object;
  }
  std::vector<const Object*> pop_to_mark() {
    require(!marks_.empty(), "goes back to a mark that is not there");
    const std::vector<const Object*> items(stack_.begin() + int64_t(marks_.back()), stack_.end());
    stack_.resize(marks_.back());
    marks_.pop_back();
    return items;
  }
  void push_tuple(size_t size) {
    std::vector<const Object*> items(size);
    for (size_t i = size; i-- > 0;) items[i] = pop();
    push(Kind::tuple).items = std::move(items);
  }
  /// The dictionary on top of the stack, to be added to.
  Object& top_dictionary() {
    require(stack_.size() > (marks_.empty() ? 0 : marks_.back()), "takes from an empty stack");
    require(stack_.back()->kind == Kind::dictionary, "sets an item of ", name_of(stack_.back()->kind));
    return *const_cast<Object*>(stack_.back());  // every object is the machine's own
  }
  void add_items(const std::vector<const Object*>& items) {
    require(items.size() % 2 == 0, "sets a key without a value");
    Object& dictionary = top_dictionary();
    for (size_t i = 0; i < items.size(); i += 2)
      require(items[i]->kind == Kind::text || items[i]->kind == Kind::integer, "uses ",
              name_of(items[i]->kind), " as a key");
    spend(16 * items.size());
    dictionary.items.insert(dictionary.items.end(), items.begin(), items.end());
  }

  void step(uint8_t opcode) {
    switch (opcode) {
      case 0x80: {  // PROTO
        const auto protocol = number<uint8_t>();
        return require(protocol == 2, "is of protocol ", int(protocol), ", expected 2");
      }
      case '(':
        return marks_.push_back(stack_.size());
      case '}':
        push(Kind::dictionary);
        return;
      case ')':
        push(Kind::tuple);
        return;
      case 'N':
        push(Kind::none);
        return;
      case 0x88:  // NEWTRUE
      case 0x89:  // NEWFALSE
        push(Kind::boolean).integer = opcode == 0x88;
        return;
      case 'J':
        return push_integer(number<int32_t>());
      case 'K':
        return push_integer(number<uint8_t>());
      case 'M':
        return push_integer(number<uint16_t>());
      case 0x8A:  // LONG1
        return push_long();
      case 'G':  // its value is not used
        take(8);
        push(Kind::real);
        return;
      case 'X': {
        const std::string_view text = take(number<uint32_t>());
        spend(text.size());
        push(Kind::text).text = text;
        return;
      }
      case 'c':
        return push_global();
      case 'Q':
        return push_storage();
      case 't': {
        auto items = pop_to_mark();
        push(Kind::tuple).items = std::move(items);
        return;
      }
      case 0x85:  // TUPLE1
      case 0x86:  // TUPLE2
      case 0x87:  // TUPLE3
        return push_tuple(size_t(opcode) - 0x84);
      case 'R':
        return reduce();
      case 'b':
        return build();
      case 's': {
        const Object* const value = pop();
        const Object* const key = pop();
        return add_items({key, value});
      }
      case 'u':
        return add_items(pop_to_mark());
      case 'q':
        return put(number<uint8_t>());
      case 'r':
        return put(number<uint32_t>());
      case 'h':
        return get(number<uint8_t>());
      case 'j':
        return get(number<uint32_t>());
      default: {
        constexpr char kDigits[] = "0123456789abcdef";
        refuse("has the instruction 0x", kDigits[opcode >> 4], kDigits[opcode & 15],
               opcode >= 0x21 && opcode < 0x7F ? std::string(" ('") + char(opcode) + "')" : "");
      }
    }
  }

  void put(uint32_t slot) {
    require(stack_.size() > (marks_.empty() ? 0 : marks_.back()), "takes from an empty stack");
    spend(64);
    memo_[slot] = stack_.back();
  }
  void get(uint32_t slot) {
    const auto found = memo_.find(slot);
    require(found != memo_.end(), "asks for memo ", slot, ", which is not set");
    stack_.push_back(found->second);
  }

  void push_long() {
    const auto size = number<uint8_t>();
    require(size <= 8, "has an integer of ", int(size), " bytes, more than 8");
    const std::string_view bytes = take(size);
    uint64_t value = size && (uint8_t(bytes[size - 1]) & 0x80) ? ~uint64_t{0} : 0;
    for (size_t i = size; i-- > 0;) value = value << 8 | uint8_t(bytes[i]);
    push_integer(int64_t(value));
  }

  void push_global() {
    const std::string_view module = line(), name = line();
    const auto* const found = std::find_if(kGlobals.begin(), kGlobals.end(), [&](const GlobalName& known) {
      return module == known.module && name == known.name;
    });
    require(found != kGlobals.end(), "names ", shown(std::string(module)), ".", shown(std::string(name)),
            ", which is not among those allowed");
    push(Kind::name).integer = found - kGlobals.begin();
  }
  const GlobalName& global(const Object* object) const {
    require(object->kind == Kind::name, "calls ", name_of(object->kind));
    return kGlobals[size_t(object->integer)];
  }

  static bool is_storage(Global name) { return name == Global::storage || name == Global::untyped_storage; }

  /// ('storage', <type>, '<key>', '<location>', <elements>); of an untyped storage the elements are bytes.
  void push_storage() {
    const auto& id = pop(Kind::tuple, "the id of a storage")->items;
    const bool fits = id.size() == 5 && id[0]->kind == Kind::text && id[0]->text == "storage" &&
                      id[1]->kind == Kind::name && is_storage(global(id[1]).global) &&
                      id[2]->kind == Kind::text && id[3]->kind == Kind::text && id[4]->kind == Kind::integer;
    require(fits, "has an id that is not of a storage");
    require(id[4]->integer >= 0, "has a storage of ", id[4]->integer, " elements");
    spend(id[2]->text.size());
    Object& storage = push(global(id[1]).global == Global::storage ? Kind::storage : Kind::untyped_storage);
    storage.dtype = global(id[1]).dtype;
    storage.text = id[2]->text;
    storage.integer = id[4]->integer;
  }

  void reduce() {
    const std::vector<const Object*> arguments = pop(Kind::tuple, "arguments")->items;
    const GlobalName& callee = global(pop());
    if (callee.global == Global::ordered_dict) {
      require(arguments.empty(), "makes an OrderedDict of arguments");
      push(Kind::dictionary);
    } else if (callee.global == Global::rebuild_tensor) {
      push_tensor(arguments);
    } else if (callee.global == Global::rebuild_typed_tensor) {
      push_typed_tensor(arguments);
    } else if (callee.global == Global::rebuild_parameter) {
      require(arguments.size() == 3 && arguments[0]->kind == Kind::tensor,
              "makes a parameter of what is not a tensor");
      stack_.push_back(arguments[0]);
    } else {
      refuse("calls ", callee.module, ".", callee.name);
    }
  }

  /// Names what sets a tensor apart from the elements of its storage, such as {'neg': True}: a view that
  /// PyTorch negates when it is read. Its storage alone would give values of the wrong sign.
  void check_metadata(const Object& metadata) const {
    require(metadata.kind == Kind::dictionary, "uses ", name_of(metadata.kind), " as a tensor's metadata");
    for (size_t i = 0; i < metadata.items.size(); i += 2) {
      const Object &key = *metadata.items[i], &value = *metadata.items[i + 1];
      require(
          value.kind == Kind::boolean && value.integer == 0, "has a tensor whose metadata sets ",
          key.kind == Kind::text ? "'" + shown(key.text) + "'" : std::to_string(key.integer),
          ", so that its values are not those of its storage; call resolve_neg() on it before torch.save");
    }
  }

  /// (storage, offset, sizes, strides, requires_grad, hooks[, metadata])
  void push_tensor(const std::vector<const Object*>& arguments) {
    require(arguments.size() == 6 || arguments.size() == 7, "makes a tensor of ", arguments.size(),
            " arguments, expected 6 or 7");
    require(arguments[0]->kind == Kind::storage && arguments[1]->kind == Kind::integer &&
                arguments[2]->kind == Kind::tuple && arguments[3]->kind == Kind::tuple,
            "makes a tensor of arguments of other kinds than storage, offset, sizes and strides");
    if (arguments.size() == 7) check_metadata(*arguments[6]);
    push_view(arguments, arguments[0]->dtype);
  }

  /// (storage of bytes, offset, sizes, strides, requires_grad, hooks, dtype[, metadata]), of dtypes that have
  /// no type of storage. Those among kGlobals take one byte, so that bytes are elements.
  void push_typed_tensor(const std::vector<const Object*>& arguments) {
    require(arguments.size() == 7 || arguments.size() == 8, "makes a tensor of ", arguments.size(),
            " arguments, expected 7 or 8");
    require(arguments[0]->kind == Kind::untyped_storage && arguments[1]->kind == Kind::integer &&
                arguments[2]->kind == Kind::tuple && arguments[3]->kind == Kind::tuple &&
                arguments[6]->kind == Kind::name && global(arguments[6]).global == Global::dtype,
            "makes a tensor of arguments of other kinds than untyped storage, offset, sizes, strides and "
            "dtype");
    if (arguments.size() == 8) check_metadata(*arguments[7]);
    push_view(arguments, global(arguments[6]).dtype);
  }

  /// The tensor of (storage, offset, sizes, strides, ...), whose kinds were checked.
  void push_view(const std::vector<const Object*>& arguments, DType dtype) {
    const auto &sizes = arguments[2]->items, &strides = arguments[3]->items;
    require(sizes.size() == strides.size() && sizes.size() <= size_t(kMaxRank), "has a tensor of ",
            sizes.size(), " sizes and ", strides.size(), " strides, expected as many and at most ", kMaxRank);
    const Object& storage = *arguments[0];
    const int64_t offset = arguments[1]->integer;
    int64_t last = offset;           // the last element it touches
    int64_t count = 1, largest = 1;  // zero sizes do not excuse the others
    bool overflow = offset < 0;
    std::array<int64_t, kMaxRank> extents{}, steps{};
    for (size_t dim = 0; dim < sizes.size(); ++dim) {
      require(sizes[dim]->kind == Kind::integer && strides[dim]->kind == Kind::integer,
              "has a size or stride that is not an integer");
      const int64_t size = sizes[dim]->integer, stride = strides[dim]->integer;
      require(size >= 0 && stride >= 0, "has a tensor with size ", size, " and stride ", stride);
      int64_t reach = 0;
      overflow |= __builtin_mul_overflow(std::max<int64_t>(size - 1, 0), stride, &reach);
      overflow |= __builtin_add_overflow(last, reach, &last);
      overflow |= __builtin_mul_overflow(largest, std::max<int64_t>(size, 1), &largest);
      count *= size != 0 && !overflow ? size : size == 0 ? 0 : 1;
      extents[dim] = size;
      steps[dim] = stride;
    }
    require(!overflow && largest <= INT64_MAX / 8, "has a tensor whose offset, sizes and strides overflow");
    require(count == 0 || last < storage.integer, "has a tensor that reaches to element ", last,
            " of a storage of ", storage.integer);
    require(count <= storage.integer, "has a tensor of ", count, " elements on a storage of ",
            storage.integer, ", which repeats some, as expand() makes it; clone() it before torch.save");
    Object& tensor = push(Kind::tensor);
    tensor.dtype = dtype;
    tensor.layout.shape = Shape(std::span<const int64_t>(extents.data(), sizes.size()));
    tensor.layout.strides = steps;
    tensor.layout.offset = count == 0 ? 0 : offset;
    tensor.items = {&storage};
  }

  /// state_dict() carries versions of modules as an attribute, which is not needed.
  void build() {
    pop(Kind::dictionary, "attributes");
    require(stack_.size() > (marks_.empty() ? 0 : marks_.back()), "takes from an empty stack");
    require(stack_.back()->kind == Kind::dictionary, "sets attributes of ", name_of(stack_.back()->kind));
  }

  static PickledTensor named(const std::string& name, const Object& tensor) {
    const Object& storage = *tensor.items[0];
    return {name, tensor.dtype, tensor.layout, storage.text, uint64_t(storage.integer)};
  }

  void collect(const Object& dictionary, const std::string& prefix, int depth,
               std::vector<PickledTensor>& tensors, std::set<std::string>& names,
               std::vector<std::string>* others) {
    require(depth < kDeepest, "has dictionaries more than ", kDeepest, " deep");
    for (size_t i = 0; i < dictionary.items.size(); i += 2) {
      const Object &key = *dictionary.items[i], &value = *dictionary.items[i + 1];
      spend(16);
      const bool kept = value.kind == Kind::tensor, nested = value.kind == Kind::dictionary;
      if (!kept && !nested && !others) continue;
      const std::string own = key.kind == Kind::text ? key.text : std::to_string(key.integer);
      spend(4 * (prefix.size() + own.size()) + sizeof(PickledTensor) + 128);
      const std::string name = prefix + own;
      if (nested && !value.items.empty()) {
        collect(value, name + ".", depth + 1, tensors, names, others);
        continue;
      }
      if (!kept) {
        if (others)
          others->push_back(name + " (" + (nested ? "an empty dictionary" : name_of(value.kind)) + ")");
        continue;
      }
      require(names.insert(name).second, "has two tensors of the name '", shown(name), "'");
      tensors.push_back(named(name, value));
    }
  }

  const std::string& path_;
  std::string_view code_;
  size_t at_ = 0, opcode_at_ = 0, spent_ = 0;
  std::deque<Object> objects_;  // all that were made: they may refer to one another in circles
  std::vector<const Object*> stack_;
  std::vector<size_t> marks_;  // heights of the stack
  std::map<uint32_t, const Object*> memo_;
};

}  // namespace

std::vector<PickledTensor> read_state_dict(const std::string& path, std::string_view pickle,
                                           std::vector<std::string>* others) {
  Machine machine(path, pickle);
  return machine.tensors_of(machine.run(), others);
}

}  // namespace tessera::io
