#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "io/tokenizer/settings_internal.h"
#include "io/tokenizer/tokenizer.h"

namespace tessera::io {

/// The post-processor of a tokenizer.json: where special tokens stand around one text or two.
///
/// TemplateProcessing, BertProcessing, RobertaProcessing, ByteLevel (it only trims offsets), Sequence.
class PostProcessor {
 public:
  using Known = std::function<bool(int64_t id)>;
  PostProcessor();
  /// Throws if a special token's number is not `known`.
  PostProcessor(const Settings& settings, const Known& known);
  /// Special tokens that a text or a pair gets.
  size_t added(bool pair) const;
  /// `b` null: one text.
  Encoding operator()(const std::vector<int32_t>& a, const std::vector<int32_t>* b, bool special) const;

 private:
  struct Part {
    int sequence = -1;  // 0 the first text, 1 the second, -1 the special tokens `ids`
    std::vector<int32_t> ids;
    int32_t type = 0;
  };
  void add(const Settings& settings, const Known& known);
  std::vector<Part> single_, pair_;
  bool has_parts_ = false;
};

}  // namespace tessera::io
