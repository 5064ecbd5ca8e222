#pragma once

#include <memory>
#include <optional>
#include <string>

#include "comm/communicator.h"
#include "dist/place.h"

namespace tessera::dist {

/// The ranks that train one model together, each a process with one device. A handle. Made in one line from
/// the environment that the launcher gave (dist/place.h):
///
///   dist::World world = dist::World::join();
///
/// In a process that no launcher started it is one rank alone, at no cost.
class World {
 public:
  /// One rank alone.
  World() = default;
  /// Of these communicators, for tests and ranks that are threads: `host` for values of the host, `data` for
  /// gradients.
  World(comm::Communicator host, comm::Communicator data, Place place = {});
  /// Joins the job of this process's environment; waits for all ranks. `what`: the program and what it was
  /// told, the same on all ranks. `lost` as in comm::TcpOptions. Throws what own_place and comm::meet throw.
  static World join(const std::string& what = {}, std::function<void(const std::string& message)> lost = {});

  int rank() const { return host_.rank(); }
  int size() const { return host_.size(); }
  /// Rank 0, which logs and saves.
  bool leads() const { return rank() == 0; }
  const Place& place() const { return place_; }
  Device device() const { return device_at(place_); }
  /// For values of the host: flags, texts. Always takes the CPU.
  const comm::Communicator& host() const { return host_; }
  /// For tensors on `device`; for a GPU by NCCL, the first call connects, which all ranks make together.
  const comm::Communicator& data(Device device) const;
  /// Tells the other ranks that this one has failed.
  void fail(const std::string& cause) const { host_.fail(cause); }
  /// f(); what it throws the other ranks are told, unless one of them is the cause.
  template <class F>
  auto told(F&& f) const {
    try {
      return f();
    } catch (const comm::RankFailure&) {
      throw;
    } catch (const std::exception& error) {
      if (size() > 1) fail(error.what());
      throw;
    }
  }

 private:
  Place place_;
  comm::Communicator host_;
  comm::Communicator data_;
  std::shared_ptr<std::optional<comm::Communicator>> gpu_ =
      std::make_shared<std::optional<comm::Communicator>>();
};

}  // namespace tessera::dist
