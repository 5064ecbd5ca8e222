#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "dist/world.h"
#include "optim/optimizer.h"

namespace tessera::dist {

/// How gradients are summed: by the communicator (NCCL on GPUs), or by copies between GPUs with peer access
/// on one machine (comm::PeerSums; not for sharded gradients). Bitwise the same.
enum class Exchange : uint8_t { automatic, communicator, peer };
const char* name_of(Exchange exchange);
Exchange parse_exchange(std::string_view name);  // throws, naming the choices

struct DataParallelOptions {
  /// True: the step uses the mean of the gradients over ranks; false: the sum, for losses that are already
  /// divided by the number of samples of all ranks.
  bool mean = true;
  /// Approximate size in MiB of a bucket of gradients that is reduced at once during the backward pass
  /// (overlap()); for an optimizer with sharded states Sharding::bucket_mb is used instead.
  double bucket_mb = 32;
  /// automatic: peer if possible. peer: throws, with the reason, if it is not possible.
  Exchange exchange = Exchange::automatic;
};

/// Data-parallel training. With one line before the training loop,
///
///   optim::AdamW optimizer(nn::parameters(model), {...});
///   dist::DataParallel reduce(optimizer, world);
///
/// each step() first all-reduces the gradients. Each rank computes the loss of its own data; all ranks make
/// the same number of steps. The constructor broadcasts rank 0's weights (if that changes any, masters are
/// reset to the weights; moments stay each rank's own). Weights stay bitwise equal, since the sums are
/// (comm::Communicator). If a gradient is not finite on one rank, all ranks skip that step. On one rank it
/// only calls the `complete` of overlap().
///
/// With a second line, communication overlaps with the backward pass:
///
///   reduce.overlap();
///   tape.backward(loss);
///   optimizer.step();
///
/// Results are bitwise the same with and without it, and for any bucket size.
///
/// The optimizer and the world may be moved, but this must live as long as steps are made.
class DataParallel {
 public:
  /// Throws on all ranks if their parameters differ in number, name, shape or dtype.
  DataParallel(optim::Optimizer& optimizer, const World& world, const DataParallelOptions& options = {});
  ~DataParallel();
  DataParallel(const DataParallel&) = delete;

  /// Call before the last backward pass of a step: each bucket is sent as soon as all of its gradients, and
  /// all buckets before it, are final. All ranks call it, or none. `complete(begin, end)`, if given, is
  /// called for each bucket before it is sent, to finish those elements of gradients(); on one rank in
  /// step(), for all of them.
  ///
  /// A gradient that arrives after its bucket was sent, in a further pass, makes that pass throw. The
  /// gradients of the step are lost then: step() throws, and all passes of the step must be repeated.
  ///
  /// A pass that throws cancels overlap(), and on the CPU waits for sums in flight; gradients are then as
  /// they were before it (Tape::backward). The next step is correct if the pass threw at the same point on
  /// all ranks, or before this rank sent a bucket. Otherwise the next overlap() or step() throws on all ranks
  /// (comm::RankFailure), and they must be restarted.
  ///
  /// If a step is given up after overlap(), the next overlap() waits for its sums. In a captured body step(),
  /// or collect(), follows in the same body; else the capture throws, since the host does not see what a
  /// replay sends.
  ///
  /// Several optimizers of one world may overlap with the same pass. On the CPU the world's communicators,
  /// and those split from them, must not be used otherwise until step() or collect().
  ///
  /// With sharded gradients (optim::Sharding::gradients) call it before every backward pass of a step,
  /// without `complete`. Throws if that pass would overwrite sums of collect() that have not been used.
  void overlap(std::function<void(int64_t begin, int64_t end)> complete = {});
  /// With sharded gradients: call it after each backward pass of a step; step() does it after the last one.
  /// gradients() is then this rank's part of the sum over ranks, and the parameters have no gradients. The
  /// next pass overwrites it, so GradientTree accumulates the sums of several passes. Without sharded
  /// gradients it does nothing.
  void collect();
  /// With sharded gradients: names of the parameters whose gradients have permanent memory
  /// (optim::GradientRing::keep), because they arrive in another order than that of the arena.
  std::vector<std::string> kept() const;
  /// Exposed communication: milliseconds of the last step in which only communication ran; waits for the
  /// device. Negative if unknown: on one rank, and on a GPU without overlap().
  double exposed_ms() const;
  /// How gradients are summed: peer or communicator; the latter on one rank.
  Exchange exchange() const;

 private:
  struct State;
  struct Alone;
  std::shared_ptr<State> state_;  // null on one rank
  std::shared_ptr<Alone> alone_;  // null on several
};

/// The micro-batches of a step that one rank computes: `count` of them, `stride` apart.
struct Share {
  int first = 0, count = 1, stride = 1;
  int at(int index) const { return first + index * stride; }
};
/// Divides the micro-batches of a step over ranks: consecutive ones for each rank or, with `in_turn`,
/// round-robin. Sharded gradients need the latter: the sum over ranks of their k-th micro-batches is then a
/// subtree of GradientTree (for 2^n ranks). Throws unless micro_batches is a multiple of ranks.
Share share_of(int micro_batches, int rank, int ranks, bool in_turn = false);

/// Accumulates the gradients of micro-batches in the order of a fixed binary tree over all micro-batches of a
/// step, ((0 + 1) + (2 + 3)) + ..., so that the sum does not depend on the number of ranks: a rank's 2^n
/// micro-batches are a subtree, and all_reduce continues the tree over ranks. Takes log2(micro-batches per
/// rank) more arenas of gradients. With sharded gradients the leaves are sums over ranks (share_of with
/// `in_turn`), and the arenas hold this rank's parts.
class GradientTree {
 public:
  explicit GradientTree(optim::Optimizer& optimizer) : optimizer_(&optimizer) {}
  /// Call after each backward pass, of this rank's micro-batch `index` of `count`; every pass must overwrite
  /// the gradients. After the last one gradients() is the sum.
  void add(int index, int count);
  /// The same for elements `begin` to `end` only, after the last of `count` micro-batches: for the `complete`
  /// function of DataParallel::overlap.
  void finish(int count, int64_t begin, int64_t end) const;

 private:
  optim::Optimizer* optimizer_;
  std::vector<Tensor> sums_;  // of 2^i micro-batches
};

}  // namespace tessera::dist
