#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/transport.h"

namespace tessera::comm {

/// The ranks of a job, which make the same calls in the same order. A handle: copies refer to the same
/// communicator. To make one: comm/threads.h (ranks in one process), comm/tcp.h (processes), comm/nccl.h
/// (GPUs), comm/dry.h (sends nothing, counts calls).
///
/// Tensors must be packed, of the same shape and dtype on all ranks, and on a device that the transport
/// supports. Calls are not recorded by a tape. Sums over ranks use a fixed binary tree, ((0 + 1) + (2 + 3)) +
/// ..., and round to the tensor's dtype after each addition: results are bitwise independent of timing and of
/// the transport.
///
/// If another rank makes a different call, or passes another shape or dtype, all ranks throw
/// RankFailure, which names both calls; likewise if a rank dies, fails or misses the deadline. The
/// communicator cannot be used after that. On the CPU calls are synchronous; nccl issues work to the
/// stream. Not thread-safe.
class Communicator {
 public:
  /// One rank alone: calls copy.
  Communicator();
  explicit Communicator(std::shared_ptr<Transport> transport);

  int rank() const { return transport_->rank(); }
  int size() const { return transport_->size(); }
  /// "threads", "tcp", "nccl", "dry", or "alone".
  const char* transport() const { return transport_->name(); }
  bool takes(Device device) const { return transport_->takes(device); }

  /// x = the sum of all ranks' x; f64, f32, bf16 or f16.
  void all_reduce(const Tensor& x, Site site = Site::here()) const;
  /// out = slice `rank` along dimension 0 of the sum of `in` over all ranks: [size * n, ...] -> [n, ...].
  void reduce_scatter(const Tensor& in, const Tensor& out, Site site = Site::here()) const;
  /// In-place reduce_scatter with uneven parts: on rank r, elements ends[r - 1] (0 for r = 0) to ends[r] of x
  /// [n] become their sum, the rest undefined. `size` ends, ascending (equal ones allowed), the last one n.
  void reduce_parts(const Tensor& x, std::span<const int64_t> ends, Site site = Site::here()) const;
  /// out = all ranks' `in` by rank, [n, ...] -> [size * n, ...]; `in` may be this rank's part of out only.
  void all_gather(const Tensor& in, const Tensor& out, Site site = Site::here()) const;
  /// x = x of rank `root`.
  void broadcast(const Tensor& x, int root, Site site = Site::here()) const;
  /// In place, tensors[i] = tensors[i] of rank owners[i]: a group of broadcasts.
  void share(std::span<const Tensor> tensors, std::span<const int> owners, Site site = Site::here()) const;
  /// Slice r of out = slice `rank` of rank r's `in`, along dimension 0; both are [size * n, ...].
  void all_to_all(const Tensor& in, const Tensor& out, Site site = Site::here()) const;
  /// Rank `to` must receive it with the same shape and dtype. Two ranks that send to each other at the same
  /// time block until the deadline: one of them must receive first.
  void send(const Tensor& x, int to, Site site = Site::here()) const;
  void receive(const Tensor& x, int from, Site site = Site::here()) const;
  /// Returns when all ranks have called it.
  void barrier(Site site = Site::here()) const;
  /// Communicators of the ranks with equal colors, ordered by (key, rank). All ranks call it.
  Communicator split(int color, int key = 0, Site site = Site::here()) const;

  // For small values on the host, by the calls above; only with transports that support the CPU.
  /// The maximum of `value` over all ranks.
  int64_t largest(int64_t value, Site site = Site::here()) const;
  /// All ranks' texts, at most 1 MiB each, by rank.
  std::vector<std::string> gather_texts(const std::string& text, Site site = Site::here()) const;

  /// On the host, for comm::Lane: until it is called with std::thread::id(), calls of other threads throw,
  /// also on communicators that this one was split from, or was split into.
  void keep_to(std::thread::id thread) const { transport_->keep_to(thread); }
  /// On the host, for other communicators of the same ranks: compares their calls after they were made
  /// (comm/call_check.h). The first call of this function is collective.
  CallCheck& call_check() const { return transport_->call_check(); }
  /// Tells the other ranks that this one has failed: each gets a RankFailure that says `cause`. Any thread.
  void fail(const std::string& cause) const { transport_->fail(cause); }

 private:
  void run(Kind kind, const Tensor& in, const Tensor& out, int peer = -1) const;
  Call begin(Kind kind, const Tensor& given, int peer = -1) const;
  void check_tensor(Kind kind, const Tensor& tensor) const;

  std::shared_ptr<Transport> transport_;
  struct Counts;
  std::shared_ptr<Counts> counts_;
};

}  // namespace tessera::comm
