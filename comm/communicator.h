#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/transport.h"

namespace tessera::comm {

/// The ranks of a job, which make the same calls in the same order. A handle: copies are the same
/// communicator. Where it comes from: comm/threads.h (ranks in one process), comm/tcp.h (processes),
/// comm/dry.h (nothing is sent, calls are counted).
///
/// Every call takes packed tensors of the same shape and dtype on all ranks, on a device that the transport
/// takes, and works without a tape. Sums are those of a fixed binary tree over the ranks,
/// ((0 + 1) + (2 + 3)) + ..., rounded to the tensor's dtype after each addition: bits depend neither on
/// timing nor on the transport.
///
/// A call that another rank makes with another shape, dtype or in another order throws RankFailure on all
/// ranks, naming both sides; so does a rank that dies, fails or misses the deadline. After that the
/// communicator is of no use. On the CPU a call returns when its result is there; nccl issues work to the
/// stream. One thread at a time.
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
  /// out = part `rank` of the sum of all ranks' `in`, [size * n, ...] -> [n, ...].
  void reduce_scatter(const Tensor& in, const Tensor& out, Site site = Site::here()) const;
  /// Elements ends[r - 1] (0 for r = 0) to ends[r] of x, [n] = their sum over all ranks, on rank r; what x
  /// holds elsewhere is undefined then. As many ends as ranks, not falling, up to n; any may be equal.
  void reduce_parts(const Tensor& x, std::span<const int64_t> ends, Site site = Site::here()) const;
  /// out = all ranks' `in` in the order of the ranks, [n, ...] -> [size * n, ...].
  void all_gather(const Tensor& in, const Tensor& out, Site site = Site::here()) const;
  /// x = x of rank `root`.
  void broadcast(const Tensor& x, int root, Site site = Site::here()) const;
  /// tensors[i] = tensors[i] of rank owners[i]: many broadcasts at once.
  void share(std::span<const Tensor> tensors, std::span<const int> owners, Site site = Site::here()) const;
  /// Part r of out = part `rank` of rank r's `in`; [size * n, ...] both.
  void all_to_all(const Tensor& in, const Tensor& out, Site site = Site::here()) const;
  /// To be received by rank `to` with the same shape and dtype. Two ranks that send to each other at once
  /// wait for ever, that is to the deadline: one must receive first.
  void send(const Tensor& x, int to, Site site = Site::here()) const;
  void receive(const Tensor& x, int from, Site site = Site::here()) const;
  /// Returns when all ranks have called it.
  void barrier(Site site = Site::here()) const;
  /// Communicators of the ranks with equal colors, ordered by (key, rank). All ranks call it.
  Communicator split(int color, int key = 0, Site site = Site::here()) const;

  // Of host values, by the calls above; for small ones, and transports that take the CPU.
  /// The largest of all ranks' values.
  int64_t largest(int64_t value) const;
  /// All ranks' texts, at most 1 MiB each, by rank.
  std::vector<std::string> gather_texts(const std::string& text) const;

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
