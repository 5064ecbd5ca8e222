#include "comm/call.h"

#include <algorithm>

namespace tessera::comm {

const char* name_of(Kind kind) {
  constexpr const char* kNames[] = {"all_reduce",   "reduce_scatter", "all_gather", "broadcast",
                                    "all_to_all",   "send",           "receive",    "barrier",
                                    "reduce_parts", "share"};
  return size_t(kind) < std::size(kNames) ? kNames[size_t(kind)] : "an unknown call";
}

Call::Call(Kind kind, const Tensor& given, int peer) : kind(kind), peer(peer) {
  if (!given.defined()) return;
  dtype = given.dtype();
  dims = uint8_t(given.rank());
  std::ranges::copy(given.shape().sizes(), sizes.begin());
}

std::string Call::text() const {
  MessageStream out;
  out << name_of(kind);
  if (kind != Kind::barrier) {
    out << ' ' << (size_t(dtype) <= size_t(DType::boolean) ? tessera::name_of(dtype) : "?") << '[';
    for (int i = 0; i < std::min<int>(dims, kMaxRank); ++i) out << (i ? ", " : "") << sizes[size_t(i)];
    out << ']';
  }
  if (kind == Kind::broadcast) out << " from rank " << peer;
  if (kind == Kind::send) out << " to rank " << peer;
  if (kind == Kind::receive) out << " from rank " << peer;
  if (kind != Kind::send && kind != Kind::receive) out << " (call " << number << ")";
  return out.str();
}

bool Call::agrees_with(const Call& theirs, int self, int from) const {
  if (communicator != theirs.communicator || dtype != theirs.dtype || dims != theirs.dims ||
      sizes != theirs.sizes)
    return false;
  if (kind == Kind::receive) return theirs.kind == Kind::send && peer == from && theirs.peer == self;
  return kind == theirs.kind && peer == theirs.peer && number == theirs.number;
}

}  // namespace tessera::comm
