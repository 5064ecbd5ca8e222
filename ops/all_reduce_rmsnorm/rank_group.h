#pragma once

#include <memory>
#include <string_view>

#include "comm/communicator.h"

namespace tessera::ops {

struct PeerChannels;
struct PeerRows;

/// How tensor-parallel ranks reduce: by calls of the communicator or, on GPUs of one machine, in kernels that
/// write to each other's memory.
enum class RankExchange : uint8_t { communicator, peer };
const char* name_of(RankExchange exchange);
RankExchange parse_rank_exchange(std::string_view name);  // throws, naming the choices

/// The ranks of a tensor-parallel model, each with a shard of it. All of them call the operators of this
/// directory in the same order. A handle.
class RankGroup {
 public:
  /// One rank alone.
  RankGroup() = default;
  /// `host` takes the CPU; `data` the device that is computed on. Throws for more than 8 ranks.
  RankGroup(comm::Communicator host, comm::Communicator data,
            RankExchange exchange = RankExchange::communicator);

  int rank() const;
  int size() const;
  RankExchange exchange() const;
  const comm::Communicator& host() const;
  const comm::Communicator& data() const;

  /// What RankExchange::peer needs: memory for rows of `width` elements (all_reduce_rmsnorm) and of `columns`
  /// from each rank (all_gather_columns). All ranks call it, before their first call of an operator; nothing
  /// where the exchange is the communicator's. Throws if the ranks cannot map each other's memory, and says
  /// why.
  void reserve(Device device, DType dtype, int64_t width, int64_t columns) const;
  /// Null unless reserved. One for each of the operators.
  const PeerChannels* sum_channels() const;
  const PeerChannels* column_channels() const;
  const PeerRows* many_rows() const;
  /// Throws comm::RankFailure if a kernel's wait for another rank has timed out (after comm::call_timeout()):
  /// its results are NaN. Call it after waiting for the device.
  void check_waits() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace tessera::ops
