#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/transport.h"

namespace tessera::comm {

/// One message of an exchange.
struct Transfer {
  enum class Way { send, receive } way;
  int peer;
  void* data;  // only read if it is sent
  size_t bytes;
};

/// Messages between the ranks of a job, what collectives are made of (host_transport.cpp).
class Links {
 public:
  virtual ~Links() = default;
  virtual const char* name() const = 0;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// Does all transfers at once, none to this rank itself; from one rank to another, messages keep the order
  /// of the list. Every message carries its sender's call; throws RankFailure on all ranks if that is not
  /// what `call` expects (Call::agrees_with), if another rank fails, or if a transfer takes longer than the
  /// deadline. `ranks[i]` is the rank here of the communicator's rank i, for messages.
  virtual void exchange(const Call& call, std::span<const Transfer> transfers,
                        std::span<const int> ranks) = 0;
  /// Sums x over all ranks in place, if the links themselves can by the order of sum_in_tree; else returns
  /// false.
  virtual bool sum(const Call&, const Tensor&, std::span<const int>) { return false; }
  /// Sums parts[r] over all ranks on rank r alone, likewise.
  virtual bool sum_parts(const Call&, std::span<const Tensor>, std::span<const int>) { return false; }
  /// Where messages lie.
  virtual Device device() const { return Device::cpu(); }
  virtual void fail(const std::string& cause) = 0;
};

/// Collectives by messages. A sum over ranks is the sum over a binary tree whose leaves are the ranks in
/// their order, ((0 + 1) + (2 + 3)) + ..., each addition rounded to the tensor's dtype: the same bits
/// whatever the sizes of messages and their timing. Every element is summed by one rank, which receives it
/// from all others (reduce-scatter), and then sent to all (all-gather): 2 (n - 1) / n of the tensor's bytes
/// leave each rank.
std::shared_ptr<Transport> make_host_transport(std::shared_ptr<Links> links);

/// The message for two ranks whose calls differ, the lower rank first.
std::string disagreement(const Call& ours, int our_rank, const Call& theirs, int their_rank);

/// parts[0] = the sum over the tree; the other parts are overwritten. Any device.
void sum_in_tree(std::vector<Tensor>& parts);

}  // namespace tessera::comm
