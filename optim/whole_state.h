#pragma once

#include "optim/optimizer.h"

namespace tessera::optim {

/// While it lives, Optimizer::fields() has all states of an optimizer whose states are spread over ranks: in
/// host memory, whole. Of an optimizer that holds its states whole it does nothing. So a checkpoint is the
/// same file on any number of ranks, and any number of ranks reads it.
class WholeState {
 public:
  /// For states that are to be loaded: memory of zeros. Each rank for itself.
  explicit WholeState(Optimizer& optimizer);
  /// For states that are to be saved: on rank 0 what all ranks hold; fields() is rank 0's alone. All ranks
  /// make it. `host`: the ranks of Optimizer::join, by a transport that takes the CPU.
  WholeState(Optimizer& optimizer, const comm::Communicator& host);
  ~WholeState();
  WholeState(const WholeState&) = delete;
  /// Copies this rank's part of the loaded state into its state.
  void take() const;

 private:
  void open();
  Optimizer& optimizer_;
  std::vector<Tensor> arenas_;  // whole, one for each that is spread
};

}  // namespace tessera::optim
