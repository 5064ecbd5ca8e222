#pragma once

#include <optional>

#include "autograd/gradient.h"

/// How gradients add up; for the tape alone.

namespace tessera::gradients {

/// A view whose gradient lies in its base's.
inline bool is_alias(const GradState& state) {
  return state.view && !state.retain;
}
/// The gradient in whose memory this one lies; itself unless it is that of a view.
const std::shared_ptr<GradState>& root_of(const std::shared_ptr<GradState>& state);
/// Whether nothing has arrived yet.
inline bool is_empty(const GradState& state) {
  return !state.grad.defined() || (state.tape == 0 && state.stale);
}
/// Whether what is there may be added to in place: a leaf's always, a result's if it was given and no other
/// result still needs it.
inline bool is_writable(const GradState& state) {
  return state.tape == 0 || (state.given && (!state.sharers || state.sharers.use_count() == 1));
}
/// Zeroes what holds nothing: to be called before all of the gradient is read or added to.
void fill_gaps(GradState& state);

/// Where the elements of a view lie, if they are consecutive along one dimension of a tensor that is the root
/// or a view of all its elements.
struct Range {
  const GradState* whole;
  int dim;
  int64_t begin, end;
  bool overlaps(const Range& other) const {
    return whole != other.whole || dim != other.dim || (begin < other.end && other.begin < end);
  }
};
std::optional<Range> range_of(const GradState& view);
/// The memory of a view's gradient inside its root's; undefined if the root's lies so that there is no such
/// view.
Tensor memory_of(const GradState& view);
/// Makes memory for the gradient of a root of which nothing has arrived, if it has none, for a view of it
/// that is to be written first.
void open_for(const std::shared_ptr<GradState>& view);
/// Whether nothing of that range holds anything.
bool is_gap(const GradState& root, const Range& range);
/// Notes that the range is written. Returns whether it held nothing; if a part of it did not, that is zeroed.
bool close_gap(GradState& root, const Range& range);

/// What arrives: `given` if its memory is that of gradients alone. Other gradients that it was given to hold
/// `sharers`.
struct Arrival {
  Tensor gradient;
  bool given = false;
  std::shared_ptr<const void> sharers = {};
};
/// Adds to the gradient of `state`, wherever it lies.
void add(const std::shared_ptr<GradState>& state, Arrival arrival);
/// Adds the gradient of a view that is kept for itself to its base's.
void add_retained_to_base(const std::shared_ptr<GradState>& view);

/// A leaf's gradient as it was at some point.
struct LeafGrad {
  std::shared_ptr<GradState> state;
  Tensor grad;
  bool stale;

  explicit LeafGrad(const std::shared_ptr<GradState>& state)
      : state(state), grad(state->grad), stale(state->stale) {}
  bool still_is() const;
  void restore() const;
};

/// Called before a leaf's gradient is read or written: the graph that is being captured then depends on it.
void note_in_capture(const std::shared_ptr<GradState>& leaf);

}  // namespace tessera::gradients
