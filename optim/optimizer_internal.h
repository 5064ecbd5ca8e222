#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "optim/optimizer.h"
#include "optim/packing.h"

/// What the source files of Optimizer share: optimizer_make.cpp lays the arenas out, optimizer.cpp takes
/// steps, whole_state.cpp gathers states that are spread over ranks.

namespace tessera::optim {

/// Throws, naming the option of the optimizer `name` that is wrong.
void check_loss_scale(const char* name, const LossScale& options);

struct Optimizer::Buffers {
  std::string name;
  std::vector<int> rule_of;                  // by parameter
  std::vector<std::vector<size_t>> members;  // by rule: parameters, in the order of the arenas
  Packing packing;
  Tensor gradients, masters, partials;
};

/// What an optimizer knows of states that are spread over ranks.
struct Optimizer::ShardedState {
  std::vector<Bucket> buckets;
  std::vector<StateShard> state_shards;  // this rank's
  std::vector<Tensor> weights;           // all stretches, and the ranks that update them
  std::vector<int> owners;
  Tensor own_blocks;  // norm blocks, as bytes on the device
  int64_t own_block_count = 0;
  std::optional<comm::Communicator> ranks;
  std::shared_ptr<GradientRing> ring;  // if gradients are spread, too
  struct Arena {
    Tensor own;
    PackedRange range;  // of the arena of gradients; of masters everything
    bool masters;
    std::vector<std::pair<size_t, size_t>> views;  // number in State::parts, parameter
  };
  std::vector<Arena> arenas;
  bool whole = false;  // a WholeState lives
};

}  // namespace tessera::optim
