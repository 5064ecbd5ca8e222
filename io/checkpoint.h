#pragma once

#include <charconv>
#include <map>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "io/safetensors.h"
#include "tensor/fields.h"

/// Checkpoints: the state of a computation in one file that is whole or refused.
///
///   io::save(path, io::named("model", model), io::named("step", step), io::named("rng", rng));
///   io::load(path, io::named("model", model), io::named("step", step), io::named("rng", rng));
///
/// The file is safetensors; any reader of that format reads its tensors. Its metadata holds, each under its
/// name, the scalars ("step": "i64 1200", "rng": "rng 42 7") and the XXH3-128 checksum of each tensor's bytes
/// ("model.weight": "xxh3 <32 hex digits>"). "tessera.checksum" is the XXH3-128 of the eight length bytes and
/// the header, computed with its own digits set to zeros, so every byte of the file is covered. Checksums
/// detect damage, not tampering.
///
/// Loading reads and verifies the whole file, then compares every name, dtype and shape with what is to be
/// loaded, and whether each of these tensors can be written, and only then changes anything: it throws and
/// leaves all as it was, or loads all. A tensor that has two names (tied weights) needs equal values under
/// both. It needs host memory of the file's size.

namespace tessera::io {

/// An object to save or load, with the prefix of its fields' names.
template <class T>
struct Named {
  std::string name;
  T object;
};
template <class T>
Named<T> named(std::string name, T&& object) {
  return {std::move(name), std::forward<T>(object)};
}

class Checkpoint {
 public:
  /// A scalar as it is written: "i64", "u64", "f32", "f64", "bool", "string" or "rng", and its text, which
  /// returns exactly the same value.
  struct Scalar {
    std::string type, text;
    bool operator==(const Scalar&) const = default;
  };
  using Value = std::variant<Tensor, Scalar>;

  /// Adds a leaf, or every field below a struct or container. Undefined tensors are left out. Tensors are
  /// shared, not copied: save before changing them. Throws if the name is taken or begins with "tessera.".
  template <class T>
  Checkpoint& add(const std::string& name, const T& thing);
  /// All of `things`: named ones under their names, a single unnamed one under its fields' own names ("value"
  /// if it is a leaf), several unnamed ones under their positions "0", "1", ...
  template <class... Things>
  static Checkpoint of(Things&&... things);

  /// Writes the file as AtomicFile does. Tensors of any layout and device.
  void save(const std::string& path) const;
  /// Reads and verifies everything; tensors are packed, on the CPU. Throws, naming file, tensor and offset.
  static Checkpoint read(const std::string& path) { return read(InputFile(path), true); }
  static Checkpoint read(InputFile file) { return read(std::move(file), true); }
  /// Verifies everything that read() does and keeps no tensor: host memory of the largest tensor is enough.
  static void verify(const std::string& path) { read(InputFile(path), false); }

  /// Puts the values back into things given as to of(). Throws, with a table of all names that are missing,
  /// unexpected, of another type or shape, of tensors that cannot be written (expanded ones and results of a
  /// tape), or of one tensor with different values, before anything is changed.
  template <class... Things>
  void restore(Things&&... things) const;
  /// The same in steps, for objects that no single caller has: compare() each, then finish(), then assign()
  /// each.
  class Restoring;

  const std::map<std::string, Value>& values() const { return values_; }
  /// What was saved as io::named(name, ...), as if it had been saved alone: a training checkpoint's
  /// `Checkpoint::read(path).part("model")` restores the model and leaves the optimizer out. Tensors are
  /// shared. Throws if there is no such part.
  Checkpoint part(const std::string& name) const;
  /// The tensors alone, by name: for nn::load, which takes some of them, under other names and of other
  /// dtypes.
  std::map<std::string, Tensor> tensors() const;
  /// Gives a value that there is another name, which must be free.
  void rename(const std::string& name, const std::string& other);
  /// Null if there is none.
  const Value* find(const std::string& name) const;
  /// One value. Throws if there is none or it is of another type.
  template <Leaf T>
  T get(const std::string& name) const;

  /// Where it was read from; for messages.
  const std::string& path() const { return path_; }

 private:
  static constexpr const char* kUnexpected = "not expected";
  struct Mismatch {
    std::string name, stored, wanted;
  };
  static Checkpoint read(InputFile file, bool keep);
  void put(const std::string& name, Value value);
  [[noreturn]] void refuse(std::vector<Mismatch> mismatches) const;

  /// Calls f(prefix, thing) for each.
  template <class F, class... Things>
  static void for_each_thing(F&& f, Things&&... things);

  std::string path_;
  std::map<std::string, Value> values_;
};

template <class... Things>
void save(const std::string& path, Things&&... things) {
  Checkpoint::of(things...).save(path);
}
template <class... Things>
void load(const std::string& path, Things&&... things) {
  Checkpoint::read(path).restore(things...);
}

}  // namespace tessera::io

#include "io/checkpoint_leaf.h"
