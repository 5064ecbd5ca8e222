#include "dist/data_parallel.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "autograd/tape.h"
#include "comm/lane.h"
#include "comm/peer_sums.h"
#include "ops/pointwise/pointwise.h"
#include "runtime/allocator.h"
#include "runtime/capture.h"
#include "runtime/text.h"
#include "tensor/kernels.h"

namespace tessera::dist {
namespace {

/// Elements that are divided at a time: the scratch memory of a mean.
constexpr int64_t kBlock = int64_t{1} << 24;

Tensor host_copy(const Tensor& x) {
  const Tensor copy = Tensor::empty_packed(x.shape(), x.dtype(), Device::cpu());
  copy.copy_from(x);
  return copy;
}

void check_same_parameters(const optim::Optimizer& optimizer, const World& world) {
  MessageStream list;
  for (const auto& [name, tensor] : optimizer.parameters())  // without the device, which is each rank's own
    list << name << ' ' << tensor.dtype() << tensor.shape() << '\n';
  const std::string text = list.str();
  MessageStream own;
  int64_t elements = 0;  // with the pads between them
  for (const optim::Bucket& bucket : optimizer.buckets(32)) elements += bucket.end - bucket.begin;
  own << optimizer.parameters().size() << " parameters, digest " << std::hash<std::string>()(text) << ", of "
      << elements << " elements";
  const std::vector<std::string> all = world.host().gather_texts(own.str());
  for (size_t r = 1; r < all.size(); ++r)
    check(all[r] == all[0], "data parallel: rank ", r, " has ", all[r], "; rank 0 has ", all[0],
          ": all ranks must have the same model");
}

}  // namespace

struct DataParallel::State : std::enable_shared_from_this<DataParallel::State> {
  State(const World& world, const optim::Optimizer& optimizer, const DataParallelOptions& options)
      : world(world),
        data(world.data(optimizer.gradients().device())),
        gradients(optimizer.gradients()),
        parameters(optimizer.parameters()),
        buckets(optimizer.buckets(options.bucket_mb)),
        spread(optimizer.sharding().parts > 1),
        ring(optimizer.ring()),
        factor(options.mean ? 1.0 / data.size() : 1.0),
        bucket_of(parameters.size()) {
    if (options.exchange != Exchange::communicator) {
      const std::string lacks = ring ? "gradients are spread over the ranks (--zero 2)"
                                     : comm::PeerSums::lacks(world.host(), gradients.device());
      check(lacks.empty() || options.exchange == Exchange::automatic,
            "data parallel: gradients cannot be summed by copies between GPUs: ", lacks,
            "; let the communicator sum them (--rank-exchange communicator)");
      if (lacks.empty()) peers.emplace(world.host(), gradients);
    }
    for (size_t i = 0; i < buckets.size(); ++i)
      for (const size_t parameter : buckets[i].parameters) bucket_of[parameter] = i;
  }

  comm::Lane& lane() {
    if (!lane_made)
      lane_made = gradients.device().is_cpu()
                      ? world.lane()
                      : std::make_shared<comm::Lane>(data, gradients.device(), peers ? &*peers : nullptr);
    return *lane_made;
  }

  /// On the CPU also waits for the sums of others of this world, which are joined by the same call: step()
  /// may make calls of its own after it.
  void join() {
    lane().join();
    if (gradients.device().is_cpu()) exposed = lane().exposed_ms();
  }

  double exposed_ms() const {
    return lane_made && gradients.device().is_cuda() ? lane_made->exposed_ms() : exposed;
  }

  void begin(std::function<void(int64_t, int64_t)> function) {
    lane();  // makes the stream or thread before anything is captured
    // If the step before was given up, its sums are still being written to the gradients.
    if (overlaps) join();
    end_in_capture();
    meet_after_failure();
    check(!spoiled ||
              std::ranges::all_of(parameters, [](const auto& p) { return p.tensor.grad_state()->stale; }),
          "data parallel: overlap() after a backward pass failed whose step had sent gradients; call "
          "zero_grad() first, and make all passes of the step again");
    spoiled = false;
    passes = 0;
    complete = std::move(function);
    missing.clear();
    for (const optim::Bucket& bucket : buckets) missing.push_back(bucket.parameters.size());
    has_arrived.assign(parameters.size(), false);
    is_open.assign(buckets.size(), false);
    last_use.assign(optim::GradientRing::kSlots, 0);
    sent = 0;
    overlaps = true;
  }

  /// A captured body that begins to send, or sends, ends after its step: a replay repeats its sums, which the
  /// host does not see, and step() outside would make them again.
  void end_in_capture() {
    CaptureSession* const session = CaptureSession::current();
    if (!session || !(session->device() == gradients.device())) return;
    session->add({.key = this,
                  .capture_end =
                      [state = weak_from_this()] {
                        const auto here = state.lock();
                        check(!here || !here->overlaps,
                              "data parallel: a captured body sends gradients (overlap()) and ends before "
                              "step(), which waits for their sums; capture overlap(), the backward pass and "
                              "step() in one body");
                      },
                  .failed =
                      [state = weak_from_this()] {
                        if (const auto here = state.lock()) here->overlaps = false, here->complete = nullptr;
                      }});
  }

  void arrived(size_t parameter) {
    if (!overlaps) return;
    follow_pass();
    size_t& left = missing[bucket_of[parameter]];
    check(left > 0 && !has_arrived[parameter], "data parallel: the gradient of ", parameters[parameter].name,
          " came again after it had been sent; call overlap() only before the last backward pass of a step");
    left -= 1;
    has_arrived[parameter] = true;
    while (sent < buckets.size() && missing[sent] == 0) send();
  }

  // ---- passes that throw ----

  /// Called for each gradient of the pass in progress.
  void follow_pass() {
    if (if_pass_throws(this, [state = weak_from_this()] {
          if (const auto here = state.lock()) here->give_up();
        }))
      passes += 1;
  }

  /// The pass has thrown, and its gradients are about to become what they were before. Calls in flight come
  /// first: on the CPU they write their sums to the gradients, on a GPU they still read them. The other ranks
  /// have made these calls or will, unless they fail, too.
  void give_up() {
    // A pass after the first one added to gradients that may have been sums over the ranks already.
    spoiled = passes > 1;
    overlaps = false;
    complete = nullptr;
    unmatched = unmatched || (sent > 0 && !gradients.device().capturing());
    sent = 0;
    join();
    if (!ring) return;
    const NoTape off;
    gradients.fill(0);  // sums of some buckets
  }

  /// A pass that threw may have been the same on all ranks: they all come here after as many calls, and go
  /// on. A rank whose pass went on makes another call, which is an error of all ranks: never are gradients of
  /// a pass that one rank has given up added to those of others.
  void meet_after_failure() {
    if (!std::exchange(unmatched, false)) return;
    join();
    try {
      data.barrier();
    } catch (const comm::RankFailure& failure) {
      comm::fail_for(
          failure.rank(),
          "data parallel: a backward pass threw on this rank after it had sent gradients, and not at "
          "the same point on all ranks; end all ranks and start again from a checkpoint: " +
              failure.message());
    }
  }

  void check_whole() {
    const bool lost = spoiled;
    if (!ring) spoiled = false;  // else the next overlap() ends that
    check(!lost,
          "data parallel: a further backward pass after overlap() failed, and the gradients of this step are "
          "lost; call zero_grad(), and make all passes of the step again");
  }

  // ---- sharded gradients ----

  /// Hook: the first gradient of a parameter in this pass is about to be written.
  void on_first_gradient(size_t parameter) {
    const size_t bucket = bucket_of[parameter];
    const std::string& name = parameters[parameter].name;
    check(
        overlaps, "data parallel: the gradient of ", name,
        " has no memory outside of overlap(): gradients are spread over the ranks (--zero 2); call overlap() "
        "before every backward pass, or spread the states alone (--zero 1)");
    check(bucket >= sent, "data parallel: the gradient of ", name,
          " came again after it had been sent; with gradients that are spread call overlap() before every "
          "backward pass of a step, and collect() after it");
    if (is_open[bucket]) return;
    follow_pass();
    const NoTape off;
    constexpr size_t kSlots = optim::GradientRing::kSlots;
    if (!ring->keeps(bucket)) {
      while (bucket >= sent + kSlots && is_complete(sent)) send();
      if (bucket >= sent + kSlots) {
        check(
            !gradients.device().capturing(), "data parallel: the gradient of ", name,
            " comes earlier in a captured step than in the first one; run steps whose order changes eagerly "
            "(--graph off), or spread the states alone (--zero 1)");
        ring->keep(bucket);
      }
    }
    acquire_slot(bucket);
  }

  /// Whether no further gradient of the bucket will arrive in this pass: parameters that no entry of the tape
  /// uses get none.
  bool is_complete(size_t bucket) const {
    return std::ranges::all_of(buckets[bucket].parameters, [&](size_t i) {
      return has_arrived[i] || parameters[i].tensor.grad_state()->pending == 0;
    });
  }

  void acquire_slot(size_t bucket) {
    is_open[bucket] = true;
    if (!ring->keeps(bucket)) lane().wait(last_use[ring->slot(bucket)]);
    if (ring->has_pads(bucket)) ring->memory(bucket).fill(0);
  }

  void send_spread(size_t number) {
    if (!is_open[number]) acquire_slot(number);
    if (!ring->has_pads(number))
      for (const size_t i : buckets[number].parameters)
        if (!has_arrived[i]) ring->view(i).fill(0);
    lane().reduce_parts(ring->memory(number), ends_of(number), ring->own(number));
    if (!ring->keeps(number)) last_use[ring->slot(number)] = lane().posted();
  }

  /// After a backward pass: sends the remaining buckets and waits for all sums.
  void collect() {
    if (ring) check_whole();
    if (!ring || !overlaps) return;
    while (sent < buckets.size()) send();
    join();
    ring->release();
    overlaps = false;
  }

  // ---- sharded or not ----

  std::vector<int64_t> ends_of(size_t number) const {
    std::vector<int64_t> ends;
    for (const int64_t end : buckets[number].ends) ends.push_back(end - buckets[number].begin);
    return ends;
  }

  void send() {
    end_in_capture();
    const size_t number = sent++;
    const optim::Bucket& bucket = buckets[number];
    const NoTape off;
    if (ring) return send_spread(number);
    if (complete) complete(bucket.begin, bucket.end);
    const Tensor part = gradients.slice(0, bucket.begin, bucket.end);
    if (!spread) return lane().all_reduce(part);
    lane().reduce_parts(part, ends_of(number));
  }

  /// In step(): gradients that no backward pass has written are zero by now.
  void finish() {
    meet_after_failure();
    check_whole();
    if (ring) {
      collect();
    } else if (!overlaps && !spread && gradients.device().is_cuda()) {
      peers ? peers->all_reduce(gradients) : data.all_reduce(gradients);
    } else {
      if (!overlaps) sent = 0;
      if (overlaps || spread)
        while (sent < buckets.size()) send();
      else
        lane().all_reduce(gradients);
      join();
    }
    overlaps = false;
    complete = nullptr;
    if (factor == 1) return;
    const NoTape off;
    for (int64_t begin = 0; begin < gradients.count(); begin += kBlock) {
      const Tensor block = gradients.slice(0, begin, std::min(begin + kBlock, gradients.count()));
      block.copy_from(ops::scale(block, factor));
    }
  }

  const World world;
  const comm::Communicator data;
  const Tensor gradients;
  std::optional<comm::PeerSums> peers;
  std::shared_ptr<comm::Lane> lane_made;  // after `peers`, which it uses
  double exposed = -1;                    // on the CPU: milliseconds of the last join
  const std::vector<nn::NamedParameter> parameters;
  const std::vector<optim::Bucket> buckets;
  const bool spread;
  const std::shared_ptr<optim::GradientRing> ring;  // null unless gradients are sharded
  const double factor;
  std::vector<size_t> bucket_of;  // by parameter
  std::vector<size_t> missing;    // by bucket: gradients that have not arrived
  std::vector<bool> has_arrived;  // by parameter
  std::vector<bool> is_open;      // by bucket of a ring: its slot holds gradients of this pass
  std::vector<size_t> last_use;   // by slot of a ring: number of calls to wait for before it is reused
  size_t sent = 0;                // number of buckets sent
  bool has_hooks = false;         // hooks on the parameters' gradients are installed
  bool overlaps = false;
  int passes = 0;          // since begin(): those that gave gradients
  bool spoiled = false;    // a pass has failed after another one of the same step
  bool unmatched = false;  // a pass has failed after buckets were sent, and the ranks have not met since
  std::function<void(int64_t, int64_t)> complete;
};

/// One rank: nothing is sent, but what finishes the gradients before that is called.
struct DataParallel::Alone {
  const std::vector<nn::NamedParameter> parameters;
  bool completes;          // the optimizer waits for that in step()
  bool has_hooks = false;  // hooks on the parameters' gradients are installed
  std::function<void(int64_t, int64_t)> complete = {};
};

DataParallel::DataParallel(optim::Optimizer& optimizer, const World& world,
                           const DataParallelOptions& options) {
  if (world.size() == 1) {
    const bool completes = optimizer.missing() == optim::MissingGrad::zero;
    alone_ = std::make_shared<Alone>(Alone{.parameters = optimizer.parameters(), .completes = completes});
    if (completes)
      optimizer.on_gradients([alone = alone_](const Tensor& gradients) {
        const NoTape off;
        if (const auto complete = std::exchange(alone->complete, nullptr)) complete(0, gradients.count());
      });
    return;
  }
  const Device device = optimizer.gradients().device();
  const comm::Communicator data = world.data(device);
  check_same_parameters(optimizer, world);
  optimizer.join(data);
  bool changed = false;
  for (const nn::NamedParameter& parameter : optimizer.parameters()) {
    const Tensor weight = parameter.tensor.detach(), dense = weight.packed();
    const bool compares = !world.leads() && size_of(weight.dtype()) == 2;
    const Tensor before = compares ? host_copy(dense) : Tensor();
    data.broadcast(dense, 0);
    if (!dense.shares_storage(weight)) weight.copy_from(dense);
    changed = changed || (compares && std::memcmp(before.raw(), host_copy(dense).raw(), before.bytes()) != 0);
  }
  // f32 masters are more precise than the weights: if all ranks have read the same checkpoint, keep them.
  if (world.host().largest(changed) != 0) optimizer.sync_masters();
  state_ = std::make_shared<State>(world, optimizer, options);
  optimizer.on_gradients([state = state_](const Tensor&) { state->finish(); });
  if (!state_->ring) return;
  for (size_t i = 0; i < state_->parameters.size(); ++i)
    before_grad(state_->parameters[i].tensor, [state = std::weak_ptr(state_), i] {
      if (const auto here = state.lock()) here->on_first_gradient(i);
    });
}

DataParallel::~DataParallel() = default;

void DataParallel::overlap(std::function<void(int64_t begin, int64_t end)> complete) {
  if (!state_) {
    alone_->complete = std::move(complete);
    if (!alone_->complete) return;
    check(alone_->completes, "data parallel: overlap() with a function that completes gradients, which ",
          "MissingGrad::skip does not allow; take MissingGrad::zero");
    // A pass that throws cancels it.
    if (!std::exchange(alone_->has_hooks, true))
      for (const nn::NamedParameter& parameter : alone_->parameters)
        on_grad(parameter.tensor, [alone = std::weak_ptr(alone_)](const Tensor&) {
          if (const auto here = alone.lock(); here && here->complete)
            if_pass_throws(here.get(), [alone] {
              if (const auto still = alone.lock()) still->complete = nullptr;
            });
        });
    return;
  }
  // Gradients of parameters with a hook arrive one by one, at a cost: install hooks only for overlap().
  if (!std::exchange(state_->has_hooks, true))
    for (size_t i = 0; i < state_->parameters.size(); ++i)
      on_grad(state_->parameters[i].tensor, [state = std::weak_ptr(state_), i](const Tensor&) {
        if (const auto here = state.lock()) here->arrived(i);
      });
  check(!state_->ring || !complete, "data parallel: gradients that are spread are completed after collect()");
  check(!state_->ring || !state_->overlaps,
        "data parallel: overlap() again before collect(): gradients are spread over the ranks");
  check(!state_->ring || !state_->ring->holds_sums(),
        "data parallel: overlap() after collect(), but nothing has taken its sums, which the next pass "
        "overwrites; add them up with GradientTree, or call step() or zero_grad()");
  state_->begin(std::move(complete));
}

void DataParallel::collect() {
  if (state_) state_->collect();
}

std::vector<std::string> DataParallel::kept() const {
  std::vector<std::string> names;
  if (!state_ || !state_->ring) return names;
  for (size_t b = 0; b < state_->buckets.size(); ++b)
    if (state_->ring->keeps(b))
      for (const size_t i : state_->buckets[b].parameters) names.push_back(state_->parameters[i].name);
  return names;
}

double DataParallel::exposed_ms() const {
  return state_ ? state_->exposed_ms() : -1;
}

Exchange DataParallel::exchange() const {
  return state_ && state_->peers ? Exchange::peer : Exchange::communicator;
}

constexpr const char* kExchanges[] = {"auto", "communicator", "peer"};

const char* name_of(Exchange exchange) {
  return kExchanges[size_t(exchange)];
}

Exchange parse_exchange(std::string_view name) {
  return parse_name<Exchange>("data parallel: there is no way to sum gradients", kExchanges, name);
}

Share share_of(int micro_batches, int rank, int ranks, bool in_turn) {
  check(micro_batches >= ranks && micro_batches % ranks == 0, "a step of ", micro_batches,
        " micro-batches on ", ranks, " ranks; expected a multiple of the ranks");
  const int count = micro_batches / ranks;
  return in_turn ? Share{rank, count, ranks} : Share{rank * count, count};
}

void GradientTree::add(int index, int count) {
  const Tensor& gradients = optimizer_->gradients();
  optimizer_->complete_gradients();
  // Binary counter: if bit i of `index` is set, sums_[i] holds the sum of 2^i micro-batches that is still to
  // be added to its sibling in the tree.
  size_t level = 0;
  for (; index >> level & 1; ++level) accumulate(gradients, sums_[level]);
  if (index + 1 < count) {
    if (level == sums_.size()) {
      const MemoryTag tag("optimizer");
      sums_.push_back(Tensor::empty_packed(gradients.shape(), gradients.dtype(), gradients.device()));
    }
    sums_[level].copy_from(gradients);
    return optimizer_->zero_grad();
  }
  // If the number of micro-batches is not a power of two, partial sums are left: add them, smallest first.
  for (++level; level <= sums_.size(); ++level)
    if (index >> level & 1) accumulate(gradients, sums_[level]);
}

void GradientTree::finish(int count, int64_t begin, int64_t end) const {
  const Tensor part = optimizer_->gradients().slice(0, begin, end);
  for (size_t level = 0; level < sums_.size(); ++level)
    if ((count - 1) >> level & 1) accumulate(part, sums_[level].slice(0, begin, end));
}

}  // namespace tessera::dist
