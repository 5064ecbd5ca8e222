#include "ops/all_reduce_rmsnorm/rank_group.h"

#include <algorithm>
#include <optional>

#include "comm/deadline.h"
#include "comm/peer_memory.h"
#include "ops/all_reduce_rmsnorm/peer_channels.h"
#include "runtime/integers.h"
#include "runtime/text.h"
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
  std::optional<PeerRows> rows;
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
    return ceil_div(elements * int64_t(size_of(dtype)), 16) * 4;
  };
  constexpr int64_t kMostColumns = int64_t(kPeerColumnBlocks) * kPeerColumnBytes;
  const int64_t column_bytes = columns * int64_t(size_of(dtype)),
                blocks = ceil_div(std::min(column_bytes, kMostColumns), kPeerColumnBytes);
  PeerChannels sums, gathered;
  PeerRows many;
  const auto for_all = [&](auto&& set) { set(sums), set(gathered), set(many); };
  for_all([&](auto& one) {
    one.rank = rank(), one.ranks = size();
    one.patience_ns = uint64_t(comm::call_timeout() * 1e9);
  });
  sums.channels = kPeerRows, sums.words = std::min<int64_t>(words_of(width), kPeerThreads * kPeerSteps * 4);
  gathered.channels = int32_t(kPeerRows * blocks), gathered.words = kPeerColumnBytes / 4;
  many.rows = kPeerManyRows, many.row_bytes = sums.words * 4;
  // One after the other: the messages of both kinds of channels, the rows, their flags.
  const int64_t after_sums = sums.memory_words() * 8,
                after_columns = after_sums + gathered.memory_words() * 8,
                after_rows = after_columns + many.memory_bytes();
  state_->memory =
      std::make_unique<comm::PeerMemory>(state_->host, device, size_t(after_rows + many.flag_count() * 4));
  state_->counts = Tensor::zeros({sums.channels + gathered.channels + many.rows}, DType::i32, device);
  state_->lost = Tensor::zeros({1}, DType::i32, device);
  state_->report = Tensor::empty_pinned({1}, DType::i32);
  state_->report.fill(0);
  for (int r = 0; r < size(); ++r) {
    std::byte* const block = state_->memory->of(r);
    sums.memory[r] = reinterpret_cast<uint64_t*>(block);
    gathered.memory[r] = reinterpret_cast<uint64_t*>(block + after_sums);
    many.memory[r] = reinterpret_cast<uint8_t*>(block + after_columns);
    many.flags[r] = reinterpret_cast<uint32_t*>(block + after_rows);
  }
  uint32_t* const counts = reinterpret_cast<uint32_t*>(state_->counts.data<int32_t>());
  sums.counts = counts, gathered.counts = counts + sums.channels;
  many.counts = gathered.counts + gathered.channels;
  for_all([&](auto& one) {
    one.lost = reinterpret_cast<uint32_t*>(state_->lost.data<int32_t>());
    one.report = reinterpret_cast<uint32_t*>(state_->report.data<int32_t>());
  });
  device.synchronize();
  state_->sums = sums, state_->columns = gathered, state_->rows = many;
}

const PeerChannels* RankGroup::sum_channels() const {
  return state_ && state_->sums ? &*state_->sums : nullptr;
}
const PeerChannels* RankGroup::column_channels() const {
  return state_ && state_->columns ? &*state_->columns : nullptr;
}

const PeerRows* RankGroup::many_rows() const {
  return state_ && state_->rows ? &*state_->rows : nullptr;
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
