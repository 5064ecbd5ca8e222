#pragma once

#include <optional>

#include "autograd/gradient.h"

/// How gradients add up; for the tape alone.

namespace tessera::gradients {

/// The state of a tensor that has no gradient yet: a result of that tape, or a leaf (0).
std::shared_ptr<GradState> new_state(const Tensor& tensor, DType grad_dtype, uint64_t tape);

/// The leaves that the operators of f() use. Nothing that it records is kept.
std::vector<Tensor> leaves_used(const std::function<void()>& f);

/// A view whose gradient lies in its base's.
inline bool is_alias(const GradState& state) {
  return state.view && !state.retain;
}
/// The gradient that owns the memory: of a view the base's (recursively), otherwise itself.
const std::shared_ptr<GradState>& root_of(const std::shared_ptr<GradState>& state);
/// Whether there is no gradient yet.
inline bool is_empty(const GradState& state) {
  return !state.grad.defined() || (state.tape == 0 && state.stale);
}
/// Whether the gradient may be added to in place: a leaf's always; a result's if its memory was donated and
/// is not shared.
inline bool is_writable(const GradState& state) {
  return state.tape == 0 || (state.given && (!state.sharers || state.sharers.use_count() == 1));
}
/// Zeroes the parts that are not written yet; call it before the whole gradient is read or added to.
void fill_gaps(GradState& state);

/// Views of views that are one view of the base (View::within) become that, so that no walk passes the same
/// ones again: a loop that takes the first rows off what is left makes ranges of ranges. Call it before a
/// view's gradient is written.
void shorten_chain(GradState& view);

/// The elements of a view as a range of one dimension of `whole`, which is the root or a view of all its
/// elements. None if they are not consecutive.
struct Range {
  const GradState* whole;
  int dim;
  int64_t begin, end;
  bool overlaps(const Range& other) const {
    return whole != other.whole || dim != other.dim || (begin < other.end && other.begin < end);
  }
};
std::optional<Range> range_of(const GradState& view);
/// The memory of a view's gradient within its root's; undefined if the strides allow no such
/// view.
Tensor memory_of(const GradState& view);
/// Prepares the root of a view for its first gradient: allocates it if necessary and marks it as unwritten,
/// or zeroes it if the view is not a range.
void prepare_for_view(const std::shared_ptr<GradState>& view);
/// Whether no element of the range is written yet.
bool is_gap(const GradState& root, const Range& range);
/// Marks the range as written. Returns whether none of it was; if only a part was not, zeroes that part.
bool close_gap(GradState& root, const Range& range);

/// An incoming gradient. `given`: its memory is donated. If it was given to several inputs, each of their
/// gradients holds `sharers`.
struct Arrival {
  Tensor gradient;
  bool given = false;
  std::shared_ptr<const void> sharers = {};
};
/// Adds to the gradient of `state`, wherever it lies.
void add(const std::shared_ptr<GradState>& state, Arrival arrival);
/// Adds a view's retained gradient to its base's.
void add_retained_to_base(const std::shared_ptr<GradState>& view);

/// Snapshot of a leaf's gradient.
struct LeafGrad {
  std::shared_ptr<GradState> state;
  Tensor grad;
  bool stale;

  explicit LeafGrad(const std::shared_ptr<GradState>& state)
      : state(state), grad(state->grad), stale(state->stale) {}
  bool is_unchanged() const;
  void restore() const;
};

/// Call before a leaf's gradient is read or written: a graph being captured then depends on its state.
void note_in_capture(const std::shared_ptr<GradState>& leaf);

}  // namespace tessera::gradients
