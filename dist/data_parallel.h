#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "dist/world.h"
#include "optim/optimizer.h"

namespace tessera::dist {

/// Who sums gradients: NCCL, or the ranks' GPUs by copies to each other's memory (comm::PeerSums), which
/// takes GPUs of one machine that reach each other and gradients that are not spread. The bits are the same.
enum class Exchange : uint8_t { automatic, communicator, peer };
const char* name_of(Exchange exchange);
Exchange parse_exchange(std::string_view name);  // throws, naming the choices

struct DataParallelOptions {
  /// The step uses the mean of the ranks' gradients; false: their sum, for losses that are shares of a mean
  /// over all ranks already.
  bool mean = true;
  /// MiB of gradients, about, that travel at once next to a backward pass (DataParallel::overlap); of an
  /// optimizer whose states are spread those of its Sharding count.
  double bucket_mb = 32;
  /// automatic: peer where that can be. Throws for peer where it cannot, and says why.
  Exchange exchange = Exchange::automatic;
};

/// Makes an optimizer's steps those of all ranks together: in one line of a training loop,
///
///   optim::AdamW optimizer(nn::parameters(model), {...});
///   dist::DataParallel reduce(optimizer, world);
///
/// each step() sums the gradients over the ranks first. Each rank computes its loss on data of its own; the
/// ranks must make the same steps. All ranks begin with the weights of rank 0, which this copies (if that
/// changes any, masters become the weights; states are each rank's own), and stay equal to the bit, since the
/// sums are (comm::Communicator). A gradient that is not finite on one rank is not finite on all: all skip
/// that step. In a world of one rank it does nothing.
///
/// With a second line the sums run next to the backward pass:
///
///   reduce.overlap();
///   tape.backward(loss);
///   optimizer.step();
///
/// The bits are the same with and without it, and with buckets of any size.
///
/// The optimizer and the world may be moved, but this must live as long as steps are made.
class DataParallel {
 public:
  /// Throws on all ranks if their parameters differ in number, name, shape or dtype.
  DataParallel(optim::Optimizer& optimizer, const World& world, const DataParallelOptions& options = {});
  ~DataParallel();
  DataParallel(const DataParallel&) = delete;

  /// The next backward pass is the last one before step(): each bucket is sent as soon as all of its
  /// gradients, and all buckets before it, have come. All ranks call it, or none. `complete(begin, end)`, if
  /// any, is called for each bucket before it is sent, to finish those elements of gradients().
  ///
  /// A gradient that comes after its bucket was sent, from a further pass, is an error of that pass. The
  /// step's gradients are lost then: its step() throws, and all of its passes must be made again.
  ///
  /// A pass that throws takes overlap() back, and waits on the CPU for the sums that are in flight; gradients
  /// are then as they were before it (Tape::backward). The next step is right if it threw at the same point
  /// on all ranks, or before it had sent a bucket. Else the next overlap() or step() is an error of all
  /// ranks (comm::RankFailure), after which they must be started again.
  ///
  /// With gradients that are spread (optim::Sharding::gradients) before every backward pass of a step,
  /// without `complete`; throws if sums of collect() would be overwritten that nothing has taken.
  void overlap(std::function<void(int64_t begin, int64_t end)> complete = {});
  /// Of gradients that are spread, after each backward pass of a step but the last one, for which step() does
  /// it: gradients() is then this rank's part of the sum over the ranks, and the parameters have none. The
  /// next pass overwrites it: sums of several passes are formed by GradientTree. Does nothing for other
  /// gradients.
  void collect();
  /// Of gradients that are spread: the parameters whose gradients have memory of their own
  /// (optim::GradientRing::keep), since they came in another order than that of the arena.
  std::vector<std::string> kept() const;
  /// Milliseconds of the last step in which only the communication ran; waits for the device. Negative where
  /// it is not known: on one rank, and on a GPU without overlap.
  double exposed_ms() const;
  /// How gradients are summed: peer or communicator; the latter on one rank.
  Exchange exchange() const;

 private:
  struct State;
  std::shared_ptr<State> state_;  // null on one rank
};

/// The micro-batches of a step that are a rank's: `count` of them, each `stride` after the one before it.
struct Share {
  int first = 0, count = 1, stride = 1;
  int at(int index) const { return first + index * stride; }
};
/// Ranks take consecutive micro-batches, equally many; or, `in_turn`, one after the other takes the next one:
/// the sum over the ranks of their k-th ones, which spread gradients begin with, is then a subtree of
/// GradientTree's if the ranks are a power of two. Throws unless the ranks divide `micro_batches`.
Share share_of(int micro_batches, int rank, int ranks, bool in_turn = false);

/// Adds the gradients of micro-batches in the order of a fixed binary tree over all micro-batches of a step,
/// ((0 + 1) + (2 + 3)) + ..., so that their sum does not depend on how many ranks there are: the sum of a
/// rank's 2^n micro-batches is a subtree, and all_reduce adds the ranks' sums by the rest of the tree. Holds
/// log2 of a rank's micro-batches further arenas of gradients. With gradients that are spread its leaves are
/// sums over the ranks, each of micro-batches in turn (share_of), and the arenas are this rank's parts.
class GradientTree {
 public:
  explicit GradientTree(optim::Optimizer& optimizer) : optimizer_(&optimizer) {}
  /// After the backward pass of micro-batch `index` of `count` of this rank, which overwrote the gradients.
  /// After the last one gradients() is the sum; before, the next pass is to overwrite them again.
  void add(int index, int count);
  /// For elements `begin` to `end` alone, which the last of `count` micro-batches has filled: for
  /// DataParallel::overlap.
  void finish(int count, int64_t begin, int64_t end) const;

 private:
  optim::Optimizer* optimizer_;
  std::vector<Tensor> sums_;  // of 2^i micro-batches
};

}  // namespace tessera::dist
