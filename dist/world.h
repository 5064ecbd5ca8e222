#pragma once

#include <memory>
#include <optional>
#include <string>

#include "comm/communicator.h"
#include "comm/deadline.h"
#include "dist/place.h"

namespace tessera::comm {
class Lane;
}

namespace tessera::dist {

/// The ranks that train one model together, each a process with one device. A handle. Made in one line from
/// the environment that the launcher gave (dist/place.h):
///
///   dist::World world = dist::World::join();
///
/// In a process that was not started by a launcher it is one rank.
class World {
 public:
  /// One rank alone.
  World() = default;
  /// From given communicators, for tests and for ranks that are threads: `host` for host values, `data` for
  /// gradients.
  World(comm::Communicator host, comm::Communicator data, Place place = {});
  /// Joins the job of this process's environment; blocks until all ranks have. `what`: program and arguments,
  /// equal on all ranks. `lost`: see comm::TcpOptions. From then on the process ends with its launcher.
  /// Throws as own_place and comm::rendezvous do.
  static World join(const std::string& what = {}, std::function<void(const std::string& message)> lost = {});

  int rank() const { return host_.rank(); }
  int size() const { return host_.size(); }
  /// Whether this is rank 0, which logs and saves.
  bool leads() const { return rank() == 0; }
  /// Timeout in seconds of a call that the other ranks make while rank 0 still works alone (saves, samples):
  /// none, since the end of a rank is noticed anyway. Rank 0, which waits for no such work, has that of all
  /// calls. For comm::TimeoutScope.
  double limit_after_rank_zero() const { return leads() ? comm::call_timeout() : 0; }
  const Place& place() const { return place_; }
  Device device() const { return device_at(place_); }
  /// Throws on all ranks if two of them have the same GPU. All ranks call it; data() does.
  void check_own_gpu(Device device) const;
  /// For values of the host: flags, texts. Always takes the CPU.
  const comm::Communicator& host() const { return host_; }
  /// For tensors on `device`; for a GPU, the first call creates the NCCL communicator and is collective.
  const comm::Communicator& data(Device device) const;
  /// On the CPU, for calls of data() next to a computation: the same lane for all who ask while one of them
  /// holds it, since the calls of a communicator come one after the other, in the same order on all ranks.
  std::shared_ptr<comm::Lane> lane() const;
  /// Tells the other ranks that this one has failed.
  void fail(const std::string& cause) const { host_.fail(cause); }
  /// Calls f(). If it throws, the other ranks are told, unless the exception is a RankFailure.
  template <class F>
  auto told(F&& f) const {
    try {
      return f();
    } catch (const comm::RankFailure&) {
      throw;
    } catch (const std::exception& error) {
      if (size() > 1) fail(message_of(error));
      throw;
    }
  }

 private:
  Place place_;
  comm::Communicator host_;
  comm::Communicator data_;
  std::shared_ptr<std::optional<comm::Communicator>> gpu_ =
      std::make_shared<std::optional<comm::Communicator>>();
  std::shared_ptr<std::weak_ptr<comm::Lane>> lane_ = std::make_shared<std::weak_ptr<comm::Lane>>();
};

}  // namespace tessera::dist
