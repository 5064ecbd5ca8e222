#pragma once

#include <utility>

namespace tessera {

/// Gives `variable` another value for the lifetime of the scope, and then the value that it had before. The
/// scopes of this library that nest per thread are classes with one as a member: it also makes them
/// impossible to copy.
template <class T>
class Override {
 public:
  Override(T& variable, T value) : variable_(variable), outer_(std::exchange(variable, std::move(value))) {}
  ~Override() { variable_ = std::move(outer_); }
  Override(const Override&) = delete;

  /// The value that the variable had before, and will have again.
  T& outer() { return outer_; }
  const T& outer() const { return outer_; }

 private:
  T& variable_;
  T outer_;
};

}  // namespace tessera
