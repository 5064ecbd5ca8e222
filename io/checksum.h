#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

namespace tessera::io {

/// XXH3 with 128 bits, in its canonical form as 32 hexadecimal digits (what the command xxh128sum prints).
class Xxh3 {
 public:
  static constexpr size_t kDigits = 32;
  Xxh3();
  ~Xxh3();
  void add(const void* data, size_t bytes);
  void add(std::string_view text) { add(text.data(), text.size()); }
  std::string digits() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tessera::io
