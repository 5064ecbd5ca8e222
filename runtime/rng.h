#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "runtime/device.h"
#include "runtime/override.h"
#include "runtime/philox.h"
#include "runtime/replay.h"

namespace tessera {

/// The argument with which a kernel draws from one reserved stream. The stream's number is `*base + delta` on
/// a GPU, where `base` lives in device memory so that the replays of a captured graph advance; on the CPU
/// `base` is null and it is `delta`.
struct RandomStream {
  uint64_t seed = 0;
  const uint64_t* base = nullptr;
  uint64_t delta = 0;
  TESSERA_HD uint64_t offset() const { return (base ? *base : 0) + delta; }
};

/// Recompute with the same random numbers: the streams that any Rng of this thread reserves. While they are
/// replayed no Rng moves.
using RandomReplay = Replay<RandomStream>;

/// A seeded source of random streams. Every use (one dropout, one initialisation) reserves one stream; the
/// numbers of a stream are addressed by element, so they do not depend on device or thread. A handle: copies
/// draw from the same source, so that none repeats another's numbers. Not thread-safe.
class Rng {
 public:
  explicit Rng(uint64_t seed);
  Rng(const Rng&) = default;  // and no move, which would leave an empty handle
  Rng& operator=(const Rng&) = default;
  /// Whether both draw from the same source.
  bool operator==(const Rng&) const = default;

  /// The next stream, for a kernel on `device`. Under graph capture the graph advances the device's counter
  /// by the streams that it reserved, once per replay; it keeps the seed that it captured.
  RandomStream reserve(Device device) const;

  struct State {
    uint64_t seed = 0, offset = 0;
    bool operator==(const State&) const = default;
  };
  /// Saving and resuming: the state after the streams reserved (replays included) so far.
  State state() const;
  void set_state(State state) const;

 private:
  friend class DrawnSources;
  struct Shared;  // outlives the handles in the graphs that captured it
  explicit Rng(std::shared_ptr<Shared> shared) : shared_(std::move(shared)) {}
  RandomStream draw(Device device) const;
  std::shared_ptr<Shared> shared_;
};

/// Notes the sources that this thread draws from while it lives; of nested scopes only the innermost notes.
class DrawnSources {
 public:
  DrawnSources();
  /// In the order of their first draws. Not those that are gone: of a generator that a function made for
  /// itself nothing is left.
  std::vector<Rng> all() const;

 private:
  friend class Rng;
  static inline constinit thread_local DrawnSources* innermost_ = nullptr;
  std::vector<std::weak_ptr<Rng::Shared>> sources_;
  Override<DrawnSources*> scope_{innermost_, this};
};

}  // namespace tessera
