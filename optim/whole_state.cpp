#include "optim/whole_state.h"

#include "optim/optimizer_internal.h"

namespace tessera::optim {
namespace {

struct Span {
  int64_t whole, own, elements;  // where it lies in the whole arena, and in a rank's
};

std::vector<Span> spans_of(const std::vector<StateShard>& state_shards, int64_t first, bool masters) {
  std::vector<Span> spans;
  for (const StateShard& state_shard : state_shards)
    spans.push_back(masters
                        ? Span{state_shard.first_master, state_shard.master_at, state_shard.masters}
                        : Span{state_shard.range.first - first, state_shard.at, state_shard.range.elements});
  return spans;
}

int64_t length_of(const std::vector<Span>& spans) {
  return spans.empty() ? 0 : spans.back().own + spans.back().elements;
}

}  // namespace

WholeState::WholeState(Optimizer& optimizer) : optimizer_(optimizer) {
  open();
}

WholeState::WholeState(Optimizer& optimizer, const comm::Communicator& host) : optimizer_(optimizer) {
  const auto& state = *optimizer.state_;
  if (!state.sharded) return;
  const Packing& packing = state.buffers->packing;
  if (host.rank() == 0) open();
  for (size_t a = 0; a < state.sharded->arenas.size(); ++a) {
    const Optimizer::ShardedState::Arena& arena = state.sharded->arenas[a];
    const Tensor own = arena.own.to(Device::cpu());
    if (host.rank() != 0) {
      if (own.count() > 0) host.send(own, 0);
      continue;
    }
    for (int rank = 0; rank < host.size(); ++rank) {
      const std::vector<Span> spans =
          spans_of(state_shards_of(state.sharded->buckets, packing, rank, arena.range), arena.range.first,
                   arena.masters);
      if (length_of(spans) == 0) continue;
      const Tensor part =
          rank == 0 ? own : Tensor::empty_packed({length_of(spans)}, own.dtype(), Device::cpu());
      if (rank != 0) host.receive(part, rank);
      for (const Span& span : spans)
        arenas_[a]
            .slice(0, span.whole, span.whole + span.elements)
            .copy_from(part.slice(0, span.own, span.own + span.elements));
    }
  }
}

void WholeState::open() {
  auto& state = *optimizer_.state_;
  if (!state.sharded) return;
  const Packing& packing = state.buffers->packing;
  for (const Optimizer::ShardedState::Arena& arena : state.sharded->arenas) {
    const int64_t elements = arena.masters ? packing.masters_before(arena.range.first + arena.range.elements)
                                           : arena.range.elements;
    arenas_.push_back(Tensor::zeros({elements}, arena.own.dtype(), Device::cpu()));
    for (const auto& [number, parameter] : arena.views)
      state.parts[number].tensor = arena.masters ? packing.master_view(arenas_.back(), parameter)
                                                 : packing.view(arenas_.back(), parameter, arena.range.first);
  }
  state.sharded->whole = true;
}

WholeState::~WholeState() {
  auto& state = *optimizer_.state_;
  if (!state.sharded) return;
  for (const Optimizer::ShardedState::Arena& arena : state.sharded->arenas)
    for (const auto& [number, parameter] : arena.views) state.parts[number].tensor = Tensor();
  state.sharded->whole = false;
}

void WholeState::take() const {
  const auto& state = *optimizer_.state_;
  if (!state.sharded) return;
  for (size_t a = 0; a < arenas_.size(); ++a) {
    const Optimizer::ShardedState::Arena& arena = state.sharded->arenas[a];
    for (const Span& span : spans_of(state_shards_of(state.sharded->buckets, state.buffers->packing,
                                                     state.sharding.part, arena.range),
                                     arena.range.first, arena.masters))
      arena.own.slice(0, span.own, span.own + span.elements)
          .copy_from(arenas_[a].slice(0, span.whole, span.whole + span.elements));
  }
}

}  // namespace tessera::optim
