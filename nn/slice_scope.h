#pragma once

#include <memory>
#include <utility>

#include "nn/form.h"
#include "runtime/override.h"

namespace tessera::nn {

struct AttentionPass;

/// Facts about the rows of sliced layers that this thread calls, beyond the layer's form. The innermost scope
/// counts.
class SliceScope {
 public:
  /// The layers' inputs have a row for each token of the pass: its padding rows are not chosen. Null: every
  /// row may be. The pass must outlive the scope.
  explicit SliceScope(const AttentionPass* pass) : SliceScope(pass, nullptr) {}
  /// The layers called in it choose their rows together, among those of the scope around it.
  static SliceScope of_shared_rows();

  /// The slice completed with the scope's facts, as operators take it.
  static SlicedBackward completed(const SlicedBackward& slice);

 private:
  SliceScope(const AttentionPass* pass, std::shared_ptr<ops::SharedRows> shared)
      : pass_(pass), shared_(std::move(shared)) {}

  static inline constinit thread_local SliceScope* current_ = nullptr;
  const AttentionPass* pass_;
  std::shared_ptr<ops::SharedRows> shared_;
  Override<SliceScope*> scope_{current_, this};
};

}  // namespace tessera::nn
