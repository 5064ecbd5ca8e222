#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "comm/communicator.h"

namespace tessera::ops {

struct PeerChannels;
struct PeerRows;

/// How the ranks that hold one model together bring their shares together: by the calls of the communicator,
/// or, on GPUs of one machine, within kernels that write to each other's memory.
enum class RankExchange : uint8_t { communicator, peer };
const char* name_of(RankExchange exchange);
RankExchange parse_rank_exchange(std::string_view name);  // throws, naming the choices

/// The ranks that compute one model together, each with a share of it; they call the operators of this folder
/// in the same order. A handle.
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
  /// Throws comm::RankFailure if a kernel has waited for another rank in vain: what it made is NaN. Kernels
  /// wait as long as comm::call_timeout() says. Called by who has waited for the device.
  void check_waits() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace tessera::ops
