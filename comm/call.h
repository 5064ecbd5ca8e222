#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "tensor/tensor.h"

namespace tessera::comm {

/// What a rank asks of the others.
enum class Kind : uint8_t {
  all_reduce,
  reduce_scatter,
  all_gather,
  broadcast,
  all_to_all,
  send,
  receive,
  barrier,
  reduce_parts,
  share
};
const char* name_of(Kind kind);

/// One call of a communicator; all ranks must make the same one. Trivially copyable: it travels with every
/// message, and the receiver compares it with its own call.
struct Call {
  Kind kind = Kind::barrier;
  DType dtype = DType::u8;
  uint8_t dims = 0;
  uint8_t reserved = 0;
  int32_t peer = -1;                      // root of a broadcast; the other rank of send and receive
  uint64_t communicator = 0, number = 0;  // which communicator, which of its calls; sends are not counted
  std::array<int64_t, kMaxRank> sizes{};  // of what the rank gives

  Call() = default;
  Call(Kind kind, const Tensor& given, int peer = -1);
  /// "all_reduce f32[1024] (call 17)", "broadcast f32[3] from rank 0 (call 4)".
  std::string text() const;
  /// Whether a message that rank `from` sent in call `theirs` is what this call of rank `self` expects.
  bool agrees_with(const Call& theirs, int self, int from) const;
};
static_assert(sizeof(Call) == 88 && std::is_trivially_copyable_v<Call>);

}  // namespace tessera::comm
