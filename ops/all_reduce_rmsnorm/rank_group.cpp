#include "ops/all_reduce_rmsnorm/rank_group.h"

#include <algorithm>
#include <optional>

#include "comm/deadline.h"
#include "comm/peer_memory.h"
#include "ops/all_reduce_rmsnorm/peer_channels.h"
#include "runtime/parse_name.h"
#include "tensor/tensor.h"

namespace tessera::ops {

namespace {

constexpr const char* kExchanges[] = {"communicator", "peer"};

}  // namespace

const char* name_of(RankExchange exchange) {
  return kExchanges[size_t(exchange)];
}
RankExchange parse_rank_exchange(std::string_view name) {
  return parse_name<RankExchange>("ranks: there is no exchange", kExchanges, name);
}

struct RankGroup::State {
  comm::Communicator host, data;
  RankExchange exchange = RankExchange::communicator;
  std::unique_ptr<comm::PeerMemory> memory;
  Tensor counts, lost, report;
  std::optional<PeerChannels> sums, columns;
};

RankGroup::RankGroup(comm::Communicator host, comm::Communicator data, RankExchange exchange)
    : state_(std::make_shared<State>()) {
  check(host.size() == data.size() && host.rank() == data.rank(),
        "ranks: the communicators are of different ranks");
  check(host.size() <= kMostRanks, "ranks: ", host.size(), " ranks for one model; at most ", kMostRanks);
  state_->host = std::move(host);
  state_->data = std::move(data);
  state_->exchange = exchange;
}

int RankGroup::rank() const {
  return state_ ? state_->host.rank() : 0;
}
int RankGroup::size() const {
  return state_ ? state_->host.size() : 1;
}
RankExchange RankGroup::exchange() const {
  return state_ ? state_->exchange : RankExchange::communicator;
}
const comm::Communicator& RankGroup::host() const {
  static const comm::Communicator alone;
  return state_ ? state_->host : alone;
}
const comm::Communicator& RankGroup::data() const {
  static const comm::Communicator alone;
  return state_ ? state_->data : alone;
}

void RankGroup::reserve(Device device, DType dtype, int64_t width, int64_t columns) const {
  if (exchange() != RankExchange::peer || size() == 1) return;
  check(!state_->memory, "ranks: memory for one model only; make a group for each");
  const std::string lacks = comm::PeerMemory::lacks(state_->host, device);
  check(lacks.empty(), "ranks: the exchange over peer memory needs GPUs that reach each other: ", lacks,
        "; take the communicator's");
  const auto words_of = [&](int64_t elements) {  // whole 16-byte words
    return (elements * int64_t(size_of(dtype)) + 15) / 16 * 4;
  };
  constexpr int64_t kMostColumns = int64_t(kPeerColumnBlocks) * kPeerColumnBytes;
  const int64_t column_bytes = columns * int64_t(size_of(dtype)),
                blocks = (std::min(column_bytes, kMostColumns) + kPeerColumnBytes - 1) / kPeerColumnBytes;
  PeerChannels sums, gathered;
  for (PeerChannels* const one : {&sums, &gathered}) {
    one->rank = rank(), one->ranks = size();
    one->patience_ns = uint64_t(comm::call_timeout() * 1e9);
  }
  sums.channels = kPeerRows, sums.words = std::min<int64_t>(words_of(width), kPeerThreads * kPeerSteps * 4);
  gathered.channels = int32_t(kPeerRows * blocks), gathered.words = kPeerColumnBytes / 4;
  const int64_t all = sums.memory_words() + gathered.memory_words();
  state_->memory = std::make_unique<comm::PeerMemory>(state_->host, device, size_t(all) * 8);
  state_->counts = Tensor::zeros({sums.channels + gathered.channels}, DType::i32, device);
  state_->lost = Tensor::zeros({1}, DType::i32, device);
  state_->report = Tensor::empty_pinned({1}, DType::i32);
  state_->report.fill(0);
  for (PeerChannels* const one : {&sums, &gathered}) {
    for (int r = 0; r < size(); ++r)
      one->memory[r] = reinterpret_cast<uint64_t*>(state_->memory->of(r)) +
                       (one == &gathered ? sums.memory_words() : 0);
    one->counts = reinterpret_cast<uint32_t*>(state_->counts.data<int32_t>()) +
                  (one == &gathered ? sums.channels : 0);
    one->lost = reinterpret_cast<uint32_t*>(state_->lost.data<int32_t>());
    one->report = reinterpret_cast<uint32_t*>(state_->report.data<int32_t>());
  }
  device.synchronize();
  state_->sums = sums, state_->columns = gathered;
}

const PeerChannels* RankGroup::sum_channels() const {
  return state_ && state_->sums ? &*state_->sums : nullptr;
}
const PeerChannels* RankGroup::column_channels() const {
  return state_ && state_->columns ? &*state_->columns : nullptr;
}

void RankGroup::check_waits() const {
  if (!state_ || !state_->sums) return;
  const int missing = *static_cast<const volatile int32_t*>(state_->report.data<int32_t>()) - 1;
  if (missing < 0) return;
  comm::fail_for(missing, "rank " + std::to_string(missing) + " has not sent its share to rank " +
                              std::to_string(rank()) + " within " +
                              std::to_string(int64_t(comm::call_timeout())) +
                              " s (TESSERA_COMM_SECONDS): it hangs, or computes something else");
}

}  // namespace tessera::ops
